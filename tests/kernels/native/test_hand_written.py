"""Proves that dispatch runs the hand-written kernels correctly. The tests use CPU tensors, and kernels compiled for the
host.

These tests fail if the reference runs a problem that a hand-written kernel supports, or if a kernel gets operands in an
unsupported layout or dtype. The tests fail if a result has the wrong shape, or if a convolution's patches are
multiplied in the wrong order. The tests also check that ``why`` names the implementation that runs. The tests in
test_csrc.py run the kernels alone, under ASan.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.kernels.catalogue import problem, reference
from accel.kernels.catalogue.configs import HAND_WRITTEN
from accel.kernels.catalogue.reference import TORCH_DTYPES
from accel.kernels.catalogue.spec import ACTS, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.catalogue.units import NATIVE
from accel.kernels.choose import choices, dispatch
from accel.kernels.native import build
from accel.kernels.native import launch as native_launch
from accel.kernels.torch.gemm import fused_conv2d, fused_gemm, quantize_rowwise

FLOATS = ("fp32", "fp16", "bf16")
SMALL = GemmSpec(m=3, n=40, k=57)
CONV = ConvSpec(images=2, height=4, width=4, c_in=8, c_out=16, kernel=(3, 3), padding=(1, 1))
EVERY = [*NATIVE, *HAND_WRITTEN]


def chosen(spec: GemmSpec | ConvSpec, **given: Any) -> str:
    return str(choices.choose(spec, (8, 0), **{"dense": True, "native": list(HAND_WRITTEN), **given}))


def test_gemv_takes_few_rows_that_no_vector_load_takes() -> None:
    assert chosen(SMALL).startswith("cuda gemv: M = 3 <= 16, rows that don't start at a multiple of 16 bytes")
    aligned = replace(SMALL, k=64)
    assert chosen(aligned).startswith("cuda gemv: M = 3 <= 16, rows"), "at an address that is not a multiple of 16"
    assert chosen(aligned, tma_layout=True).startswith("triton gemm_16x64_split"), "tensor cores take it"
    assert chosen(aligned, tma_layout=True, triton_installed=False).startswith("cuda gemv: M = 3 <= 16, and Triton")
    assert chosen(aligned, tma_layout=True, triton_installed=False, native=EVERY).startswith("cutlass sm80_fp16")
    fp32 = replace(SMALL, in_dtype="fp32", epilogue=EpilogueSpec(out_dtype="fp32"))
    assert chosen(fp32).startswith("cuda gemv: M = 3 <= 16, fp32 products run on the plain cores")


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (replace(SMALL, m=17), {}),
        (SMALL, {"dense": False}),
        (SMALL, {"native": list(NATIVE)}),
        (replace(SMALL, epilogue=EpilogueSpec(out_dtype="fp32")), {}),
        (replace(SMALL, in_dtype="int8"), {}),
        (replace(SMALL, epilogue=EpilogueSpec(residual=True)), {"residual_dtype": "fp32"}),
    ],
)
def test_gemv_takes_nothing_that_it_would_compute_wrongly(spec: GemmSpec, given: dict[str, Any]) -> None:
    """Checks that dispatch doesn't choose gemv for too many rows, for unsupported strides or dtypes, or with a library
    that lacks gemv."""
    assert "gemv" not in chosen(spec, **given)
    assert chosen(spec, triton_installed=False, **given).startswith("reference: Triton is not installed")


def test_a_convolution_without_triton_is_a_product_of_its_patches() -> None:
    whole = {"tma_layout": True, "triton_installed": False, "native": EVERY}
    assert chosen(CONV, **whole).startswith(
        "cuda im2col: Triton, which computes whole convolutions, is not installed; "
    )
    assert "patches multiplied by cutlass sm80_fp16_streamk_64x64" in chosen(CONV, **whole)
    assert chosen(CONV, tma_layout=True, native=EVERY).startswith("triton conv2d_64x64")
    small = replace(CONV, images=1)
    assert "patches multiplied by cuda gemv: M = 16" in chosen(small, triton_installed=False)
    # No compiled kernel supports an unaligned product with 32 rows, so the reference (cuDNN) computes the whole
    # convolution.
    odd = replace(CONV, c_in=7)
    assert chosen(odd, **whole).startswith("reference: Triton is not installed")
    assert chosen(replace(CONV, in_dtype="fp8_e4m3"), **whole).startswith("reference: sm_80 has no fp8")
    assert chosen(CONV, **whole, residual_dtype="fp32").startswith("cuda im2col"), "it has no residual"
    added = replace(CONV, epilogue=EpilogueSpec(residual=True))
    assert chosen(added, **whole, residual_dtype="fp32").startswith("reference")


def test_rows_are_quantized_by_what_is_there() -> None:
    def chosen(dtype: str, capability: tuple[int, int] | None, triton: bool, native: list[str]) -> str:
        return str(choices.choose_quantize(dtype, capability, triton_installed=triton, native=native))

    assert chosen("int8", (8, 0), True, EVERY) == "triton quantize_8192: a program a row on sm_80"
    assert chosen("int8", (8, 0), False, EVERY).startswith("cuda quantize_rowwise: Triton is not installed")
    assert chosen("fp8_e4m3", (8, 0), True, EVERY).startswith("cuda quantize_rowwise: sm_80 has no fp8 conversion")
    assert chosen("fp8_e4m3", (8, 9), True, EVERY).startswith("triton")
    assert chosen("int8", (8, 0), False, list(NATIVE)) == "reference: Triton is not installed"
    assert chosen("int8", (7, 5), False, EVERY).startswith("reference: compute capability 7.5")
    assert chosen("int8", None, False, EVERY).startswith("reference: the CPU")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the library for the host with UBSan. Unlike ASan, UBSan needs no separate process. Copies the library to a
    folder without a build record, so that accel accepts the library for any GPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("host")
    return shutil.copy(build.build_for_host("undefined", cache=folder / "cache").path, folder / build.LIBRARY)


@pytest.fixture
def ran(compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Imitates a machine with a GPU of compute capability 8.0 and without Triton. Returns a list to which each call of
    a library function adds the function's name."""
    monkeypatch.setenv("ACCEL_KERNEL_LIBRARY", str(compiled))
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "capability_of", lambda _tensor: (8, 0))
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    native_launch.installed.cache_clear()
    library = native_launch.installed(None)  # dispatch uses this library object for CPU tensors
    assert library is not None
    calls: list[str] = []

    def spy(name: str) -> None:
        right = getattr(library, name)

        def called(*words: Any, **named: Any) -> None:
            calls.append(name)
            right(*words, **named)

        monkeypatch.setattr(library, name, called)

    for name in HAND_WRITTEN:
        spy(name)
    yield calls
    native_launch.installed.cache_clear()


@pytest.mark.proof
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_runs_gemv(dtype: str, act: str, ran: list[str]) -> None:
    """Fails if the operator's result differs from the reference by more than ``gemm_bound``. The bias has the dtype of
    the operands, and the residual is a view with other strides."""
    g = torch.Generator().manual_seed(0)
    m, n, k = (1, 5, 9) if act == "none" else (7, 6, 33)
    a, b = (torch.randn(size, generator=g).to(TORCH_DTYPES[dtype]) for size in ((m, k), (n, k)))
    operands = {
        "bias": torch.randn(n, generator=g).to(TORCH_DTYPES[dtype]),
        "residual": torch.randn(n, m, generator=g).to(TORCH_DTYPES[dtype]).t(),
        "row_scale": torch.rand(m, generator=g) + 0.5,
        "col_scale": torch.rand(n, generator=g) + 0.5,
    }
    got = fused_gemm(a, b.t(), act=act, **operands)
    assert ran == ["gemv"]
    spec = problem.gemm_spec(a, b.t(), operands, act, None)
    exact = reference.gemm_torch(spec, a, b.t(), operands)
    assert got.dtype == TORCH_DTYPES[dtype]
    assert reference.error_over_bound(got, exact, reference.gemm_bound(spec, a, b.t(), operands)) <= 1
    ran.clear()
    fused_gemm(a, b.t().contiguous(), act=act, **operands)
    assert ran == [], "b is (K, N): the kernel would read its columns as rows"


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", FLOATS)
def test_the_operator_quantizes(source: str, dtype: torch.dtype, ran: list[str]) -> None:
    """Fails if a quantized value differs from the reference. The inputs have gaps between rows, gaps between columns, a
    repeated row, or a single row."""
    whole = (torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 30).to(TORCH_DTYPES[source])
    whole[1] = 0
    for x in (whole, whole[:, :17], whole[::2], whole[:, ::3], whole[:1].expand(4, 40), whole[2:3, 5:9]):
        q, scale = quantize_rowwise(x, dtype)
        right_q, right_scale = reference.quantize_rowwise_torch(x, problem.dtype_name(dtype))
        assert torch.equal(q.float(), right_q.float())
        assert torch.equal(scale, right_scale)
    assert ran == ["quantize_rowwise"] * 6


@pytest.mark.proof
@pytest.mark.parametrize("at_once", [1, 2, 9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_runs_a_convolution_by_its_patches(
    dtype: str, at_once: int, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the error of a convolution by im2col exceeds four times the rounding error of the largest element. Each
    of the three images has 2 x 1 output pixels, and the kernel computes ``at_once`` images at a time."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, generator=g).to(TORCH_DTYPES[dtype]) for size in ((3, 5, 4, 3), (6, 3, 2, 3)))
    operands = {
        "bias": torch.randn(6, generator=g),
        "residual": torch.randn(3, 6, 2, 1, generator=g).to(TORCH_DTYPES[dtype]).permute(0, 2, 3, 1),
        "col_scale": torch.rand(6, generator=g) + 0.5,
    }
    geometry = {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 2)}
    patches = 2 * 1 * 18 * x.element_size()
    monkeypatch.setattr(dispatch, "PATCH_BYTES", at_once * patches)
    got = fused_conv2d(x, w, act="silu", **geometry, **operands)  # type: ignore[arg-type]
    assert ran == ["im2col", "gemv"] * -(-3 // min(at_once, 3))
    wide = {name: operand.float() for name, operand in operands.items()}
    monkeypatch.setattr(dispatch, "capability_of", lambda _tensor: None)
    wanted = fused_conv2d(x.float(), w.float(), act="silu", **geometry, **wide)  # type: ignore[arg-type]
    assert got.shape == wanted.shape == (3, 2, 1, 6)
    step = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-20}[dtype]
    assert float((got.float() - wanted).abs().max()) <= 4 * step * float(wanted.abs().max())
