"""Runs every Triton kernel on the CPU, in Triton's interpreter, on small problems whose sizes don't fill a tile.

Uses small tiles, so that a small problem needs many tiles. Also runs each configuration once with the tile size that
accel ships, on a problem just larger than one tile.

``TRITON_INTERPRET=1 python -m accel.kernels.proof.interpret [source file] [case]`` prints one JSON object with the
largest ratio of error to proven bound for each case. A ratio of 1 is the limit. ``run`` runs this module in a separate
process.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.errors import ChildCrashed, MissingExtra

from ..catalogue import reference
from ..catalogue.configs import CONFIGS, get
from ..catalogue.reference import QMAX, TORCH_DTYPES
from ..catalogue.spec import ACTS, BYTES, ConvSpec, EpilogueSpec, GemmSpec
from ..triton.launch import geometry as conv_constants
from ..triton.launch import row_config, run_conv2d, run_gemm, run_quantize

ACT = dict(zip(("fp16", "bf16", "int8", "fp8_e4m3", "fp32"), ACTS, strict=True))


def run(source: Path | None = None, case: str = "", timeout: float = 300) -> dict[str, float]:
    """Returns the largest ratio of an error to its bound in the interpreter, for each case whose name contains
    ``case``.

    ``source`` is the file with the kernels, by default accel's own file. Raises ``MissingExtra`` without Triton, and
    ``ChildCrashed`` if a kernel did not run.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("Triton", "kernels")
    command = [sys.executable, "-m", "accel.kernels.proof.interpret", str(source or ""), case]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ChildCrashed(
            f"a kernel failed in Triton's interpreter with the error {last}; to see the whole error, run: python "
            f"{' '.join(command[1:3])}"
        )
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def load(path: str | None) -> Any:
    if path is None:
        return importlib.import_module("accel.kernels.triton.kernels")
    spec = importlib.util.spec_from_file_location("triton_source", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_source"] = module
    spec.loader.exec_module(module)
    return module


def random(g: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    if dtype == "int8":
        return torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)
    return torch.randn(shape, generator=g).to(TORCH_DTYPES[dtype])


def gemm(
    kernels: Any,
    name: str,
    dtype: str,
    sizes: tuple[int, int, int],
    act: str,
    out: str,
    full: bool,
    small: bool = True,
) -> float:
    g = torch.Generator().manual_seed(sum(sizes))
    names = ("bias", "residual", "row_scale", "col_scale")
    epilogue = EpilogueSpec(act=act, out_dtype=out, **dict.fromkeys(names, full))
    m, n, k = sizes
    spec = GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue)
    a, b = random(g, dtype, m, k), random(g, dtype, n, k).t()
    if name == "gemm_64x64":  # any strides
        a, b = random(g, dtype, k, m).t(), random(g, dtype, k, n)
    scale = 0.01 if dtype == "int8" else 1.0
    made = {
        "bias": torch.randn(n, generator=g),
        "residual": random(g, out, m, n),
        "row_scale": scale * (torch.rand(m, generator=g) + 0.5),
        "col_scale": scale * (torch.rand(n, generator=g) + 0.5),
    }
    operands = {operand: made[operand] for operand in epilogue.operands}
    config = get(name)
    if small:  # the same code, more tiles
        config = replace(config, block_m=min(config.block_m, 32), block_n=32, block_k_bytes=16 * BYTES[dtype])
    got = run_gemm(spec, a, b, operands, config, kernels, interpreted=True)
    exact = reference.gemm_torch(spec, a, b, operands)
    # The interpreter truncates to bfloat16, so its error is up to one unit in the last place. A GPU rounds, so its
    # error is at most half a unit in the last place.
    return reference.error_over_bound(
        got, exact, reference.gemm_bound(spec, a, b, operands) * (2 if out == "bf16" else 1)
    )


def nans(kernels: Any, act: str) -> float:
    """Checks that a NaN in a row of ``a`` passes through the activation ``act``, and reaches only the same row of the
    output."""
    a = torch.ones(4, 5)
    a[1, 2] = float("nan")
    spec = GemmSpec(m=4, n=3, k=5, in_dtype="fp32", epilogue=EpilogueSpec(act=act, out_dtype="fp32"))
    got = run_gemm(spec, a, torch.ones(5, 3), {}, get("gemm_64x64"), kernels, interpreted=True)
    return 0.0 if got.isnan().equal(a.isnan().any(1)[:, None].expand(4, 3)) else float("inf")


def conv(kernels: Any, name: str, dtype: str, act: str, geometry: dict[str, Any], small: bool = True) -> float:
    g = torch.Generator().manual_seed(3)
    epilogue = EpilogueSpec(act=act, bias=True, residual=True, col_scale=True, out_dtype="fp32")
    config = get(name)
    images, c_in, c_out = 2, 19, 35
    if small:
        config = replace(config, block_m=32, block_n=32, block_k_bytes=16 * BYTES[dtype])
    else:  # an image has 24 output pixels
        images, c_in, c_out = config.block_m // 24 + 1, config.block_k(dtype) + 3, config.block_n + 3
    sizes: dict[str, Any] = {"images": images, "height": 7, "width": 6, "c_in": c_in, "c_out": c_out}
    spec = ConvSpec(**sizes, **geometry, in_dtype=dtype, epilogue=epilogue)
    x, w = random(g, dtype, images, 7, 6, c_in), random(g, dtype, c_out, *spec.kernel, c_in)
    operands = {
        "bias": torch.randn(c_out, generator=g),
        "residual": torch.randn(images, spec.out_height, spec.out_width, c_out, generator=g),
        "col_scale": torch.rand(c_out, generator=g) * 0.01,
    }
    got = run_conv2d(spec, x, w, operands, config, kernels, interpreted=True)
    exact = reference.conv2d_torch(spec, x, w, operands)
    return reference.error_over_bound(got, exact, torch.full_like(exact, 1e-4 * float(exact.abs().max())))


def quantize(kernels: Any, source: str, dtype: str, columns: int) -> float:
    x = random(torch.Generator().manual_seed(4), source, 5, columns) * 10
    x[1], x[2, 7], x[3, -1] = 0, float("nan"), 100
    if dtype == "int8":
        q, scale = run_quantize(x, dtype, kernels)
    else:  # torch converts to float8, because the interpreter rounds to float8 incorrectly
        wide, scale = torch.empty(x.shape), torch.empty(x.shape[0])
        sizes, block = (columns, *x.stride()), row_config(columns, dtype).block_k(dtype)
        kernels.quantize_rowwise[(x.shape[0],)](x, wide, scale, *sizes, QMAX=QMAX[dtype], INTEGER=False, BK=block)
        q = wide.to(TORCH_DTYPES[dtype])
    right_q, right_scale = reference.quantize_rowwise_torch(x, dtype)
    same = torch.equal(q.float().nan_to_num(), right_q.float().nan_to_num())
    return 0.0 if same and torch.equal(scale.nan_to_num(-1), right_scale.nan_to_num(-1)) else float("inf")


def plugin(dtype: str, operand: str, given: tuple[str, ...], transposed: bool) -> float:
    """Runs the kernels with arguments in TensorRT's order: the inputs, M, N, K, and the output."""
    from ..triton import plugin_kernels as triton_plugin

    g = torch.Generator().manual_seed(5)
    m, n, k = 37, 45, 53
    epilogue = EpilogueSpec(act="silu", out_dtype=dtype, **dict.fromkeys(given, True))
    spec = GemmSpec(m=m, n=n, k=k, in_dtype=operand, epilogue=epilogue)
    a, b = random(g, operand, m, k), random(g, operand, *((n, k) if transposed else (k, n)))
    scale = 0.01 if operand == "int8" else 1.0
    made = {
        "bias": torch.randn(n, generator=g),
        "row_scale": scale * (torch.rand(m, generator=g) + 0.5),
        "col_scale": scale * (torch.rand(n, generator=g) + 0.5),
        "residual": random(g, dtype, m, n),
    }
    operands = {name: made[name] for name in made if name in given}
    if operand == dtype and "row_scale" not in given and "col_scale" not in given and "bias" in given:
        operands["bias"] = operands["bias"].to(TORCH_DTYPES[dtype])
    out = torch.empty(m, n, dtype=TORCH_DTYPES[dtype])
    constants = {"ACT": "silu", "TRANSPOSED": transposed, "INTEGER": operand == "int8"}
    flags = {"HAS_BIAS": "bias", "HAS_ROW": "row_scale", "HAS_COL": "col_scale", "HAS_RESIDUAL": "residual"}
    constants |= {flag: name in given for flag, name in flags.items()}
    constants |= {"BM": 32, "BN": 32, "BK": 16, "GROUP": 2, "UPCAST": operand in ("bf16", "fp8_e4m3")}
    kernel = getattr(triton_plugin, f"gemm_plugin_{len(operands)}")
    kernel[(4,)](a, b, *operands.values(), m, n, k, out, **constants)
    dense = b.t() if transposed else b
    exact = reference.gemm_torch(spec, a, dense, operands)
    return reference.error_over_bound(
        out, exact, reference.gemm_bound(spec, a, dense, operands) * (2 if dtype == "bf16" else 1)
    )


def plugin_conv(dtype: str, given: tuple[str, ...], geometry: dict[str, Any], device: str = "cpu") -> float:
    """Runs a convolution with arguments in TensorRT's order: the inputs, the sizes, and the output. Images and weights
    are in ONNX's layout.

    On the CPU, the interpreter runs the kernel. On a GPU, Triton compiles the kernel.
    """
    from ..triton import plugin_kernels as triton_plugin

    g = torch.Generator().manual_seed(6)
    epilogue = EpilogueSpec(act="gelu_tanh", out_dtype=dtype, **dict.fromkeys(given, True))
    sizes: dict[str, Any] = {"images": 3, "height": 7, "width": 6, "c_in": 19, "c_out": 35}
    spec = ConvSpec(**sizes, **geometry, in_dtype=dtype, epilogue=epilogue)
    x, w = random(g, dtype, 3, 7, 6, 19), random(g, dtype, 35, *spec.kernel, 19)
    made = {"bias": random(g, dtype, 35), "residual": random(g, dtype, 3, spec.out_height, spec.out_width, 35)}
    operands = {name: made[name] for name in made if name in given}

    def first(value: torch.Tensor) -> torch.Tensor:
        return (value.permute(0, 3, 1, 2).contiguous() if value.dim() == 4 else value).to(device)

    out = torch.full((3, 35, spec.out_height, spec.out_width), float("nan"), dtype=TORCH_DTYPES[dtype], device=device)
    scalars = (spec.gemm.m, 35, 19, 7, 6, spec.out_height, spec.out_width)
    constants = {"ACT": "gelu_tanh", "HAS_BIAS": "bias" in given, "HAS_RESIDUAL": "residual" in given}
    constants |= {**conv_constants(spec), "BM": 32, "BN": 32, "BK": 16, "GROUP": 2}
    constants["UPCAST"] = dtype == "bf16" and device == "cpu"
    kernel = getattr(triton_plugin, f"conv_plugin_{len(operands)}")
    tiles = -(-spec.gemm.m // 32) * 2
    kernel[(tiles,)](first(x), first(w), *map(first, operands.values()), *scalars, out, **constants)
    exact = reference.conv2d_torch(spec, x, w, operands)
    # The allowed error covers fp32 sums and one rounding of the result. The allowed error of bfloat16 is larger,
    # because the interpreter truncates to bfloat16 instead of rounding.
    unit = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-7}[dtype]
    limit = unit * exact.abs() + 1e-5 * float(exact.abs().max())
    return reference.error_over_bound(out.cpu().permute(0, 2, 3, 1), exact, limit)


def cases(kernels: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    arguments: tuple[Any, ...]
    for config in CONFIGS:
        for dtype in config.dtypes:
            if config.op == "gemm":
                # TMA needs row lengths that are multiples of 16 bytes
                for sizes in ((37, 45, 48), (1, 1, 16)) if "tma" in config.name else ((37, 45, 53), (1, 1, 1)):
                    full, out = sizes[0] > 1, "bf16" if dtype == "bf16" else "fp16"
                    arguments = (kernels, config.name, dtype, sizes, ACT[dtype], out, full)
                    found[f"{config.name} {dtype} {sizes} {ACT[dtype]}"] = (gemm, arguments)
                # TMA needs row lengths that are multiples of 16 bytes, so K exceeds one step of the kernel's loop by 16
                # elements.
                over = (config.block_m + 5, config.block_n + 3, config.block_k(dtype) + 16)
                arguments = (kernels, config.name, dtype, over, ACT[dtype], out, True, False)
                found[f"{config.name} {dtype} shipped tile"] = (gemm, arguments)
            elif config.op == "conv2d":
                tap = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}
                arguments = (kernels, config.name, dtype, ACT[dtype], tap)
                found[f"{config.name} {dtype}"] = (conv, arguments)
                found[f"{config.name} {dtype} shipped tile"] = (conv, (*arguments, False))
    for act in ACTS:
        found[f"acts {act}"] = (gemm, (kernels, "gemm_128x128", "fp16", (20, 33, 17), act, "fp32", True))
        found[f"NaN through {act}"] = (nans, (kernels, act))
    names = ("bias", "row_scale", "col_scale", "residual")
    for count in range(5):
        for at, given in enumerate(itertools.combinations(names, count)):
            dtype = "bf16" if "residual" in given else "fp16"
            scaled = "row_scale" in given or "col_scale" in given
            operand = ("int8", "fp8_e4m3", dtype)[at % 3] if scaled else dtype
            found[f"plugin {operand} {' '.join(given)}"] = (plugin, (dtype, operand, given, at % 2 == 0))
    tap = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}
    for at, given in enumerate(((), ("bias",), ("residual",), ("bias", "residual"))):
        for dtype, pointwise in ((("fp16", "bf16", "fp32", "fp16")[at], False), ("fp16", True)):
            geometry = {"kernel": (1, 1)} if pointwise else tap
            name = f"plugin conv {dtype} {geometry['kernel']} {' '.join(given)}"
            found[name] = (plugin_conv, (dtype, given, geometry))
    for source in ("fp16", "bf16", "fp32"):
        for dtype in ("int8", "fp8_e4m3"):
            for columns in (37, 2100, 9000):  # 9000 elements don't fit in registers
                found[f"quantize {source} {dtype} {columns}"] = (quantize, (kernels, source, dtype, columns))
    return found


def main() -> None:
    kernels = load(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    results = {name: f(*arguments) for name, (f, arguments) in cases(kernels).items() if only in name}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
