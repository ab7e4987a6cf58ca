"""``accel::FusedGemm`` as a TensorRT quick plugin: its kernel is the Triton GEMM, compiled ahead of time to PTX.

    register(FusedGemm(product="gemm_nt", act="gelu_erf", bias=True, residual=False, dtype=TensorProto.FLOAT16))

registers ``accel::FusedGemm_gemm_nt_bias_gelu_erf_fp16``, the name of the operator in the ONNX files. The engine holds
the PTX; it needs neither Triton nor accel to run. For TensorRT (``tensorrt.plugin``), not for TensorRT-RTX, which has
no such plugins.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accel.errors import BuildFailed, MissingExtra, UnsupportedHere
from accel.kernels.configs import FIRST_FP8, get
from accel.kernels.cross import POINTERS
from accel.kernels.onnx_function import DOMAIN, OPERANDS, FusedGemm
from accel.kernels.triton_launch import GROUP, tile

TENSORRT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of outputs, as attributes of tensorrt
# Plain PTX of this architecture runs on every later one; that with wgmma or tensor memory runs on its own alone.
PORTABLE_ARCH = 80


@dataclass(frozen=True, kw_only=True)
class PluginKernel:
    """What TensorRT gets: ``ptx`` with the entry ``name``, whose parameters are the inputs, M, N, K and the output; a
    program a tile of ``block_m`` x ``block_n``."""

    name: str
    ptx: str
    threads: int
    shared: int
    block_m: int
    block_n: int


def compile_kernel(function: FusedGemm, arch: int = PORTABLE_ARCH) -> PluginKernel:
    """The kernel of ``function`` as PTX for sm_``arch`` and later.

    Raises ``UnsupportedHere`` where the architecture has no products of the operands, and ``MissingExtra`` without
    Triton.
    """
    dtypes = [OPERANDS[dtype] for dtype in function.dtypes]
    if dtypes[0] == "fp8_e4m3" and arch < FIRST_FP8:
        raise UnsupportedHere(
            f"{function.name} has no plugin for sm_{arch}; pass arch=89 or a later one, or leave it unregistered: "
            "TensorRT inlines its body"
        )
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("Triton", "kernels")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from accel.kernels import triton_plugin

    config = get("gemm_64x64")
    kernel = getattr(triton_plugin, f"gemm_plugin_{len(dtypes) - 2}")
    constants = {**plugin_constants(function), **tile(config, dtypes[0]), "GROUP": GROUP, "UPCAST": False}
    kinds = [*(POINTERS[dtype] for dtype in dtypes), "i32", "i32", "i32", POINTERS[OPERANDS[function.dtype]]]
    kinds += ["constexpr"] * len(constants)
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    tensors = [at for at, kind in enumerate(kinds) if kind.startswith("*")]
    attributes = {(at,): [["tt.divisibility", 16]] for at in tensors}  # TensorRT's buffers are aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return PluginKernel(
        name=made.metadata.name,
        ptx=without_scratch(made.asm["ptx"], len(kernel.arg_names) - len(constants)),
        threads=config.warps * 32,
        shared=made.metadata.shared,
        block_m=config.block_m,
        block_n=config.block_n,
    )


def plugin_constants(function: FusedGemm) -> dict[str, Any]:
    """The compile-time constants that say what the kernel computes."""
    return {
        "ACT": function.act,
        "HAS_BIAS": function.bias,
        "HAS_ROW": function.row_scale,
        "HAS_COL": function.col_scale,
        "HAS_RESIDUAL": function.residual,
        "TRANSPOSED": function.product == "gemm_nt",
        "INTEGER": OPERANDS[function.dtypes[0]] == "int8",
    }


def without_scratch(ptx: str, kept: int) -> str:
    """``ptx`` with the first ``kept`` parameters of its entry. Triton appends pointers to scratch memory, which
    TensorRT would leave unset; where the code reads one, it can't be a plugin (``BuildFailed``)."""
    entry = re.search(r"\.entry\s+([\w$]+)\(\s*(.*?)\s*\)", ptx, re.DOTALL)
    if entry is None:
        raise BuildFailed("the compiler gave no entry point; its version is not one that this accel knows")
    parameters = re.split(r",\s*", entry[2])
    body = ptx[entry.end() :]
    for at in range(kept, len(parameters)):
        if re.search(rf"\b{re.escape(entry[1])}_param_{at}\b", body):
            raise BuildFailed("the kernel reads Triton's scratch memory, which TensorRT doesn't give it")
    text = ",\n\t".join(parameters[:kept])
    return ptx[: entry.start(2)] + text + ptx[entry.end(2) :]


def register(function: FusedGemm, *, arch: int = PORTABLE_ARCH) -> str:
    """Register ``function`` with TensorRT's plugin registry; its id, ``accel::<name>``.

    Raises ``MissingExtra`` where TensorRT isn't installed, and what ``compile_kernel`` raises.
    """
    if importlib.util.find_spec("tensorrt") is None:
        raise MissingExtra("tensorrt", "tensorrt")
    import tensorrt
    import tensorrt.plugin as plugin

    kernel = compile_kernel(function, arch)
    identity = f"{DOMAIN}::{function.name}"
    scales = [*["row_scale"] * function.row_scale, *["col_scale"] * function.col_scale]
    names = ["a", "b", *["bias"] * function.bias, *scales, *["residual"] * function.residual]

    def describe(*inputs: Any) -> Any:
        out = inputs[0].like()
        out.shape_expr[-1] = _columns(function, inputs[1].shape_expr)
        if function.wide:
            out.dtype = getattr(tensorrt, TENSORRT_DTYPES[OPERANDS[function.dtype]])
        return out

    def ahead_of_time(*given: Any) -> Any:
        a, b = given[0].shape_expr, given[1].shape_expr
        m, n, k = _product(a[:-1]), _columns(function, b), a[-1]
        launch = plugin.KernelLaunchParams()
        launch.grid_x = plugin.cdiv(m, kernel.block_m) * plugin.cdiv(n, kernel.block_n)
        launch.block_x = kernel.threads
        launch.shared_mem = kernel.shared
        scalars = plugin.SymIntExprs(3)
        for at, size in enumerate((m, n, k)):
            scalars[at] = plugin.SymInt32(size)
        return kernel.name, kernel.ptx, launch, scalars

    plugin.register(identity)(_typed(describe, names, plugin.TensorDesc, returns=plugin.TensorDesc))
    returns = tuple[str | bytes, str | bytes, plugin.KernelLaunchParams, plugin.SymIntExprs]
    plugin.aot_impl(identity)(_typed(ahead_of_time, [*names, "outputs", "tactic"], None, returns=returns))
    return identity


def _columns(function: FusedGemm, shape: Any) -> Any:
    return shape[0] if function.product == "gemm_nt" else shape[1]


def _product(sizes: Sequence[Any]) -> Any:
    found = sizes[0]
    for size in sizes[1:]:
        found = found * size
    return found


def _typed(function: Callable[..., Any], names: Sequence[str], kind: Any, returns: Any) -> Callable[..., Any]:
    """``function`` with a signature: TensorRT reads the inputs of a plugin from it."""
    empty = inspect.Signature.empty
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind or empty) for name in names
    ]
    signature = inspect.Signature(parameters, return_annotation=returns or empty)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
