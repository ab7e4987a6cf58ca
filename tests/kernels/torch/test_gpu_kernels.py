"""Proves on a GPU that the kernels are correct for every dtype, every activation and any size.

These tests find faults that appear only on the hardware, such as a wrong descriptor, a missing barrier, or an epilogue
on the wrong row. The error bound is ``gemm_bound``, which is proven per element. For fp8, the error bound also covers
partial sums that the tensor cores keep in 14 bits. The tests run every candidate, not only the candidate that dispatch
chooses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel.kernels.catalogue import problem, reference
from accel.kernels.catalogue.reference import TORCH_DTYPES
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.catalogue.units import NATIVE
from accel.kernels.choose import choices, dispatch, tune
from accel.kernels.choose.tuned import Table
from accel.kernels.native import build
from accel.kernels.native import launch as native_launch
from accel.kernels.native.library import Library
from accel.kernels.proof import interpret
from accel.kernels.torch.fuse import fuse
from accel.kernels.torch.gemm import fused_conv2d, fused_gemm, quantize_rowwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = ("fp16", "bf16", "int8", "fp8_e4m3", "fp32")
# The sizes of RAGGED cover every alignment. Some sizes are smaller than a tile, some exceed a tile by one element, and
# some aren't multiples of a tile. The rows of ALIGNED are multiples of 16 bytes, because CUTLASS and TMA require this.
RAGGED = ((1, 1, 1), (3, 5, 7), (17, 33, 65), (129, 130, 131), (300, 257, 1023))
ALIGNED = ((1, 64, 64), (16, 136, 256), (37, 72, 80), (130, 264, 528), (511, 1032, 4112))


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def spec_of(dtype: str, act: str, sizes: tuple[int, int, int], full: bool) -> GemmSpec:
    m, n, k = sizes
    flags = dict.fromkeys(("bias", "residual", "row_scale", "col_scale"), full)
    epilogue = EpilogueSpec(act=act, out_dtype="bf16" if dtype == "bf16" else "fp16", **flags)
    return GemmSpec(m=m, n=n, k=k, in_dtype=dtype, epilogue=epilogue)


def check(spec: GemmSpec, native: frozenset[str], triton: bool) -> int:
    """Checks every candidate of ``spec`` against the float64 reference, and returns the number of candidates."""
    operands = tune.operands_for(spec, torch.device("cuda"))
    a, b, given = operands
    layout = {"tma_layout": dispatch.is_tma_layout(a, b), "dense": dispatch.is_dense(a, b)}
    usable = choices.candidates(spec, capability(), **layout, triton_installed=triton, native=native)
    for config in usable:
        got = dispatch.run_config(spec, a, b, given, config)
        error = tune.largest_error(spec, operands, got)
        assert error <= 1, (config.name, spec, error)
    return len(usable)


def triton_runs(dtype: str) -> bool:
    arch = choices.family(capability())
    return arch is not None and (dtype != "fp8_e4m3" or arch >= 89)


# Triton compiles a kernel for each alignment of each epilogue, and each compilation takes seconds. The cases are
# separate tests, so that the compilations run in parallel.
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_activations(dtype: str, act: str) -> None:
    for sizes in (RAGGED[3], ALIGNED[3]):
        assert (check(spec_of(dtype, act, sizes, True), frozenset(), True) > 0) == triton_runs(dtype)


@pytest.mark.parametrize("sizes", [*RAGGED, *ALIGNED], ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_shapes(dtype: str, sizes: tuple[int, int, int]) -> None:
    for full in (False, True):
        act = ACTS[DTYPES.index(dtype)]
        assert (check(spec_of(dtype, act, sizes, full), frozenset(), True) > 0) == triton_runs(dtype)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Returns the library that ``$ACCEL_KERNEL_LIBRARY`` names. If the variable isn't set, builds a library for this
    GPU."""
    if not os.environ.get("ACCEL_KERNEL_LIBRARY"):
        if build.find_nvcc() is None:
            pytest.skip("needs nvcc, or a library in ACCEL_KERNEL_LIBRARY")
        path = build.build([choices.native_arch(capability())], cache=tmp_path_factory.mktemp("kernels")).path
        os.environ["ACCEL_KERNEL_LIBRARY"] = str(path)
    native_launch.installed.cache_clear()
    found = native_launch.installed()
    assert found is not None
    yield found
    native_launch.installed.cache_clear()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8", "fp8_e4m3"])
def test_cutlass(dtype: str, act: str, library: Library) -> None:
    ran = 0
    for sizes in ALIGNED:
        for full in (False, True):
            for out in ("fp16", "bf16") if dtype in ("int8", "fp8_e4m3") else (None,):
                spec = spec_of(dtype, act, sizes, full)
                spec = spec if out is None else replace(spec, epilogue=replace(spec.epilogue, out_dtype=out))
                ran += check(spec, frozenset(library.gemms), False)
    if not ran:
        pytest.skip(f"no {dtype} GEMM in this library for this GPU")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("act", ACTS)
def test_gemv(dtype: str, act: str, library: Library) -> None:
    for m, n, k in ((1, 1, 1), (7, 33, 129), (16, 1000, 4096)):
        spec = spec_of(dtype, act, (m, n, k), True)
        spec = replace(spec, epilogue=replace(spec.epilogue, out_dtype=dtype))
        operands = a, b, given = tune.operands_for(spec, torch.device("cuda"))
        out = torch.empty(m, n, dtype=TORCH_DTYPES[dtype], device="cuda")
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        stream = torch.cuda.current_stream().cuda_stream
        addresses |= {"a": a.data_ptr(), "b": b.data_ptr(), "out": out.data_ptr()}
        library.gemv(**addresses, dtype=dtype, act=act, m=m, n=n, k=k, stream=stream)
        assert tune.largest_error(spec, operands, out) <= 1, (spec, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1500, 9000])
def test_quantize(source: torch.dtype, dtype: torch.dtype, columns: int, library: Library) -> None:
    """Fails if a kernel's quantized value differs from the CPU's value. The values have to be equal, because the CPU
    and the kernels use the same arithmetic. The Triton kernel reads a row twice if the row has more than 8192
    elements."""
    x = (torch.randn(67, columns, generator=torch.Generator().manual_seed(0)) * 30).to(source)
    x[1], x[2, 7] = 0, float("nan")
    wanted_q, wanted_scale = reference.quantize_rowwise_torch(x, problem.dtype_name(dtype))
    there = x.cuda()
    by_hand = torch.empty(x.shape, dtype=dtype, device="cuda"), torch.empty(67, device="cuda")
    library.quantize_rowwise(
        there.data_ptr(),
        problem.dtype_name(source),
        by_hand[0].data_ptr(),
        problem.dtype_name(dtype),
        by_hand[1].data_ptr(),
        67,
        columns,
        columns,
        torch.cuda.current_stream().cuda_stream,
    )
    for q, scale in (quantize_rowwise(there, dtype), by_hand):
        torch.testing.assert_close(q.cpu().float(), wanted_q.float(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scale.cpu(), wanted_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conv2d(dtype: torch.dtype, act: str) -> None:
    """Compares convolutions on the GPU with float32 convolutions on the CPU. The allowed difference is four times the
    rounding error of the largest element."""
    g = torch.Generator().manual_seed(0)
    for geometry in ({}, {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}):
        x, w = (torch.randn(s, generator=g).to(dtype) for s in ((3, 17, 15, 19), (35, 3, 2, 19)))
        bias = torch.randn(35, generator=g)
        got = fused_conv2d(x.cuda(), w.cuda(), bias=bias.cuda(), act=act, **geometry).cpu()  # type: ignore[arg-type]
        wanted = fused_conv2d(x.float(), w.float(), bias=bias, act=act, **geometry)  # type: ignore[arg-type]
        step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}[dtype]
        assert float((got.float() - wanted).abs().max()) <= 4 * step * float(wanted.abs().max())


@pytest.mark.parametrize("given", [(), ("bias",), ("residual",), ("bias", "residual")], ids="+".join)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_convolution_of_the_plugin(dtype: str, given: tuple[str, ...]) -> None:
    """Fails if the plugin's convolution is wrong. The operands have their channels first, as TensorRT passes them."""
    for geometry in ({"kernel": (1, 1)}, {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}):
        assert interpret.plugin_conv(dtype, given, geometry, "cuda") <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_a_convolution(dtype: str, library: Library) -> None:
    """Fails if an implementation of a convolution is wrong in any dtype. The implementations are two Triton kernels
    and, for 32 input channels, im2col with a matrix product. The error bound of each implementation is
    ``gemm_bound``."""
    names = dispatch.native_names(capability())
    ran = set()
    for c_in, c_out in ((19, 35), (32, 72)):
        shape = ConvSpec(images=3, height=17, width=15, c_in=c_in, c_out=c_out, kernel=(3, 3), padding=(1, 1))
        for spec in tune.conv_specs([dtype], ["silu"], [shape], added=("bias+residual",)):
            operands = x, w, given = tune.operands_for(spec, torch.device("cuda"))
            for config in choices.candidates(spec, capability(), tma_layout=True, native=names):
                got = dispatch.run_config(spec, x, w, given, config)
                assert tune.largest_error(spec, operands, got) <= 1, (config.name, spec)
                ran.add(config.name)
    assert ("conv2d_64x64" in ran) == triton_runs(dtype)
    compiled = {NATIVE[name].unit.dtype for name in names if name in NATIVE and NATIVE[name].runs_on(capability())}
    assert ("im2col" in ran) == (dtype in compiled)


def test_the_public_face_without_triton(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if gemv, quantization or the patches of a convolution are wrong in the compiled library. Dispatch
    uses the compiled library if Triton is not installed."""
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    g = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(5, 57, generator=g, device="cuda").half()
    b = torch.randn(40, 57, generator=g, device="cuda").half().t()
    spec = GemmSpec(m=5, n=40, k=57, epilogue=EpilogueSpec(act="silu"))
    assert str(dispatch.choose_for(spec, a, b)).startswith("cuda gemv")
    assert tune.largest_error(spec, (a, b, {}), fused_gemm(a, b, act="silu")) <= 1
    q, scale = quantize_rowwise(a[:, :50])
    wanted_q, wanted_scale = reference.quantize_rowwise_torch(a[:, :50].cpu(), "int8")
    assert torch.equal(q.cpu(), wanted_q)
    assert torch.equal(scale.cpu(), wanted_scale)
    conv = ConvSpec(images=1, height=4, width=4, c_in=5, c_out=7, kernel=(3, 3), padding=(1, 1))
    x, w, _ = tune.operands_for(conv, torch.device("cuda"))
    assert str(dispatch.choose_for(conv, x, w)).startswith("cuda im2col")
    assert tune.largest_error(conv, (x, w, {}), fused_conv2d(x, w, padding=1)) <= 1


def test_the_public_face_takes_any_strides(library: Library) -> None:
    """Fails if ``fused_gemm`` gives wrong results for operands whose strides don't fit a TMA descriptor."""
    g = torch.Generator("cuda").manual_seed(0)
    for a_of, b_of in ((lambda t: t, lambda t: t), (lambda t: t.t().contiguous().t(), lambda t: t[::2, 1::3])):
        a = a_of(torch.randn(130, 96, generator=g, device="cuda").half())
        b = b_of(torch.randn(192, 402, generator=g, device="cuda").half())[:96]
        got = fused_gemm(a, b, act="silu")
        spec = GemmSpec(m=130, n=b.shape[1], k=96, epilogue=EpilogueSpec(act="silu"))
        assert tune.largest_error(spec, (a, b, {}), got) <= 1


def test_a_graph_capture_holds_the_kernels(library: Library) -> None:
    """Fails if a launch synchronizes, allocates outside the stream's pool, or queries the driver."""
    spec = spec_of("fp16", "relu", (128, 256, 256), True)
    operands = a, b, given = tune.operands_for(spec, torch.device("cuda"))

    def run() -> torch.Tensor:
        return fused_gemm(a, b, act="relu", **given)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.zero_()
    graph.replay()
    assert tune.largest_error(spec, operands, out) <= 1


def test_torch_compile_keeps_the_operator(library: Library) -> None:
    """Checks that the operator's fake implementation gives the same strides and dtype as the GPU, and that
    ``torch.compile`` doesn't decompose the operator. The fp16 result may differ from the plain module by four times the
    rounding error of the largest element."""
    g = torch.Generator().manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).eval()
    for parameter in plain.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g) / 16
    plain = plain.half().cuda().requires_grad_(False)
    x = torch.randn(96, 256, generator=g).half().cuda()
    fused, report = fuse(plain, (x,))
    assert len(report.matches) == 2
    compiled = torch.compile(fused, fullgraph=True)(x)
    wanted = plain(x)
    assert float((compiled - wanted).abs().max()) <= 4 * 2.0**-10 * float(wanted.abs().max())


def test_tuning_finds_a_right_one_that_dispatch_then_takes(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    spec = tune.specs(["fp16"], ["gelu_erf"], [(512, 768, 768)])[0]
    found = tune.tune(spec, Table())
    assert found.entry is not None
    assert found.refused == {}
    a, b, _ = tune.operands_for(spec, torch.device("cuda"))
    choice = dispatch.choose_for(spec, a, b)
    assert choice.config is not None
    assert choice.config.name == found.entry.config
    assert "accel kernels tune" in choice.reason
    shape = ConvSpec(images=2, height=14, width=14, c_in=64, c_out=64, kernel=(3, 3), padding=(1, 1))
    for conv in tune.conv_specs(["fp16"], ["relu"], [shape]):
        entry = tune.tune(conv, Table()).entry
        assert entry is not None
        x, w, given = tune.operands_for(conv, torch.device("cuda"))
        taken = dispatch.choose_for(conv, x, w, given)
        assert taken.config is not None
        assert taken.config.name == entry.config


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str, library: Library) -> None:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("needs compute-sanitizer")
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable]
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    script = Path(__file__).with_name("gpu_cases.py")
    done = subprocess.run([*command, script], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
