"""Proves that the numpy reference and the torch reference agree, and that the CPU path stays within the proven error
bound.

These tests fail if the numpy or the torch formula is wrong, for example in the order of scale, bias, activation and
residual, or in the GELU. The tests fail if the CPU path rounds more than once, or if its sums are less precise than
fp32. The tests also fail if the bound is too loose to catch a planted mistake, such as a wrong index, a missing scale
or a wrong activation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import BadFeeds, UnknownName, UnsupportedHere
from accel.kernels.catalogue import reference
from accel.kernels.catalogue.reference import TORCH_DTYPES
from accel.kernels.catalogue.spec import ACTS, IN_DTYPES, MAX_INT8_K, OUT_DTYPES, ConvSpec, EpilogueSpec, GemmSpec
from accel.kernels.torch.gemm import fused_conv2d, fused_gemm, quantize_rowwise

SIZES = st.integers(1, 40)


@st.composite
def gemm_specs(draw: st.DrawFn) -> GemmSpec:
    flags = {name: draw(st.booleans()) for name in ("bias", "residual", "row_scale", "col_scale")}
    epilogue = EpilogueSpec(act=draw(st.sampled_from(ACTS)), out_dtype=draw(st.sampled_from(OUT_DTYPES)), **flags)
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    return GemmSpec(m=m, n=n, k=k, in_dtype=draw(st.sampled_from(IN_DTYPES)), epilogue=epilogue)


def operands_of(
    spec: GemmSpec, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Generator]:
    g = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        if spec.in_dtype == "int8":
            return torch.randint(-128, 128, shape, generator=g, dtype=torch.int8)
        return torch.randn(shape, generator=g).to(TORCH_DTYPES[spec.in_dtype])

    scale = 0.01 if spec.in_dtype == "int8" else 1.0
    made = {
        "bias": torch.randn(spec.n, generator=g),
        "residual": torch.randn(spec.m, spec.n, generator=g).to(TORCH_DTYPES[spec.epilogue.out_dtype]),
        "row_scale": scale * (torch.rand(spec.m, generator=g) + 0.5),
        "col_scale": scale * (torch.rand(spec.n, generator=g) + 0.5),
    }
    return matrix(spec.m, spec.k), matrix(spec.k, spec.n), {n: made[n] for n in spec.epilogue.operands}, g


def run(spec: GemmSpec, a: torch.Tensor, b: torch.Tensor, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    return fused_gemm(a, b, act=spec.epilogue.act, out_dtype=TORCH_DTYPES[spec.epilogue.out_dtype], **operands)


@given(spec=gemm_specs(), seed=st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_numpy_and_torch_agree_and_the_cpu_is_within_the_bound(spec: GemmSpec, seed: int) -> None:
    """Fails if the two float64 references differ, or if the CPU's error exceeds the bound. The references may have a
    relative difference of 1e-12. K is at most 40, so two erf calls and 40 rounding errors of 1e-16 each stay within a
    relative difference of 1e-12."""
    a, b, operands, _ = operands_of(spec, seed)
    exact = reference.gemm_torch(spec, a, b, operands)
    wide = {name: tensor.double().numpy() for name, tensor in operands.items()}
    twin = reference.gemm_numpy(spec, a.double().numpy(), b.double().numpy(), **wide)
    np.testing.assert_allclose(exact.numpy(), twin, rtol=1e-12, atol=1e-12 * max(1.0, np.abs(twin).max()))

    got = run(spec, a, b, operands)
    assert got.dtype == TORCH_DTYPES[spec.epilogue.out_dtype]
    finite = exact.abs() < float(torch.finfo(got.dtype).max)
    error = (got.double() - exact).abs()[finite]
    assert bool((error <= reference.gemm_bound(spec, a, b, operands)[finite]).all())


PLANTED: dict[str, Callable[..., torch.Tensor]] = {
    "wrong index": lambda a, b, o, act: fused_gemm(a.roll(1, 1), b, act=act, **o),
    "last row of K lost": lambda a, b, o, act: fused_gemm(a[:, :-1], b[:-1], act=act, **o),
    "missing row scale": lambda a, b, o, act: fused_gemm(a, b, act=act, **{**o, "row_scale": None}),
    "missing col scale": lambda a, b, o, act: fused_gemm(a, b, act=act, **{**o, "col_scale": None}),
    "wrong activation": lambda a, b, o, _: fused_gemm(a, b, act="gelu_tanh", **o),
    "residual before the activation": lambda a, b, o, _: torch.nn.functional.gelu(fused_gemm(a, b, **o).float()).half(),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_outside_the_bound(mistake: str) -> None:
    """Fails if the bound accepts a planted mistake. The operands and the output are fp16, because the bound for fp16 is
    wider than the bound for fp32. Even in fp16, the bound distinguishes GELU's tanh formula from its erf formula."""
    epilogue = EpilogueSpec(act="gelu_erf", bias=True, residual=True, row_scale=True, col_scale=True, out_dtype="fp16")
    spec = GemmSpec(m=33, n=47, k=29, epilogue=epilogue)
    a, b, operands, _ = operands_of(spec)
    operands["residual"] *= 0.01
    exact = reference.gemm_torch(spec, a, b, operands)
    bound = reference.gemm_bound(spec, a, b, operands)
    assert bool(((run(spec, a, b, operands).double() - exact).abs() <= bound).all())
    bad = PLANTED[mistake](a, b, operands, "gelu_erf")
    assert bool(((bad.double() - exact).abs() > bound).any())


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    act=st.sampled_from(ACTS),
    dtype=st.sampled_from(["fp32", "int8"]),
)
@settings(max_examples=80, deadline=None)
def test_convolution_agrees_with_the_tap_by_tap_sum(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    act: str,
    dtype: str,
) -> None:
    """Fails if a convolution differs from a reference that sums over the positions of the kernel. The fp32 output may
    differ by 1e-4 of the largest element. K is at most 45, so cancellation and 45 fp32 rounding errors stay below 1e-4
    of the largest element. The float64 output may differ by 1e-12."""
    fits = [s + 2 * p - d * (k - 1) >= 1 for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)]
    epilogue = EpilogueSpec(act=act, bias=True, residual=True, col_scale=True, out_dtype="fp32")
    geometry = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    sizes = {"images": 2, "height": size[0], "width": size[1], "c_in": 5, "c_out": 3}
    if not all(fits):
        with pytest.raises(BadFeeds, match="larger than the padded"):
            ConvSpec(**sizes, **geometry, in_dtype=dtype, epilogue=epilogue)
        return
    spec = ConvSpec(**sizes, **geometry, in_dtype=dtype, epilogue=epilogue)
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, *size, 5, generator=g), torch.randn(3, *kernel, 5, generator=g)
    if dtype == "int8":
        x, w = (x * 40).to(torch.int8), (w * 40).to(torch.int8)
    operands = {
        "bias": torch.randn(3, generator=g),
        "residual": torch.randn(2, spec.out_height, spec.out_width, 3, generator=g),
        "col_scale": torch.rand(3, generator=g) * 0.01,
    }
    twin = reference.conv2d_numpy(spec, x.numpy(), w.numpy(), **{n: t.numpy() for n, t in operands.items()})
    exact = reference.conv2d_torch(spec, x, w, operands)
    largest = max(1.0, float(np.abs(twin).max()))
    np.testing.assert_allclose(exact.numpy(), twin, rtol=1e-12, atol=1e-12 * largest)
    got = fused_conv2d(
        x, w, act=act, stride=stride, padding=padding, dilation=dilation, out_dtype=torch.float32, **operands
    )
    np.testing.assert_allclose(got.numpy(), twin, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
def test_quantized_rows_are_within_half_a_step(dtype: torch.dtype, source: torch.dtype) -> None:
    """Fails if the error of a quantized row exceeds the rounding error. For int8, the rounding error is half a step of
    the scale. For e4m3, the rounding error is 1/16 of the value. For small values in e4m3, the rounding error is 2**-10
    of the scale, which is half the smallest step. The test multiplies the allowed error by 1 + 4e-5, because the
    division in fp32 adds an error of up to 127 * 2**-24 of a step."""
    x = (torch.randn(17, 33, generator=torch.Generator().manual_seed(2)) * 100).to(source)
    x[3] = 0
    x[4] *= 1e-6
    q, scale = quantize_rowwise(x, dtype)
    assert (q.dtype, scale.dtype, scale[3].item()) == (dtype, torch.float32, 1.0)
    back, wide = q.double() * scale.double()[:, None], x.double()
    step = scale.double()[:, None]
    allowed = step / 2 if dtype == torch.int8 else torch.maximum(wide.abs() / 16, step * 2.0**-10)
    assert bool(((back - wide).abs() <= allowed * (1 + 4e-5)).all())
    assert bool((q.double().abs().amax(1)[4] == (127 if dtype == torch.int8 else 448)).all())


def test_a_nan_row_keeps_a_nan_scale() -> None:
    x = torch.ones(3, 4, dtype=torch.float16)
    x[1, 2] = float("nan")
    scale = quantize_rowwise(x)[1]
    assert scale.isnan().tolist() == [False, True, False]


def test_w8a8_equals_the_integer_product() -> None:
    """Checks that the int8 path computes the int32 sum exactly. The comparison is exact, because the output is fp32 and
    the scales are powers of two."""
    a = torch.randint(-128, 128, (5, 1000), dtype=torch.int8)
    b = torch.randint(-128, 128, (1000, 7), dtype=torch.int8)
    half = torch.tensor(0.5)
    got = fused_gemm(a, b, row_scale=half, col_scale=half, out_dtype=torch.float32)
    assert torch.equal(got * 4, (a.long() @ b.long()).float())


@pytest.mark.parametrize("wrong", [(1, 2, 3), (), "same", 1.5, [1, "2"]])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_a_wrong_pair_is_refused(name: str, wrong: object) -> None:
    """Checks that the error for a wrong stride, padding or dilation names the option and asks for one or two
    numbers."""
    x, w = torch.ones(1, 5, 6, 3), torch.ones(2, 2, 2, 3)
    with pytest.raises(BadFeeds, match=f"{name} is .*; pass a whole number, or a pair"):
        fused_conv2d(x, w, **{name: wrong})  # type: ignore[arg-type]
    assert fused_conv2d(x, w, **{name: [2, 1]}).equal(fused_conv2d(x, w, **{name: (2, 1)}))  # type: ignore[arg-type]


def test_a_number_is_no_matrix() -> None:
    """Checks that an operand that isn't a matrix is refused with advice and not with an IndexError."""
    for a, b in ((torch.tensor(1.0), torch.ones(3, 5)), (torch.ones(3, 5), torch.tensor(1.0))):
        with pytest.raises(BadFeeds, match="reshape both to matrices"):
            fused_gemm(a, b)


def test_wrong_problems_are_refused_with_the_fix() -> None:
    a, b = torch.ones(2, 3, dtype=torch.float16), torch.ones(3, 4, dtype=torch.float16)
    with pytest.raises(BadFeeds, match="give b as many rows as a has columns"):
        fused_gemm(a, b.t())
    with pytest.raises(BadFeeds, match="a kernel never casts silently"):
        fused_gemm(a, b.float())
    with pytest.raises(BadFeeds, match="pass out_dtype"):
        fused_gemm(a.to(torch.int8), b.to(torch.int8))
    with pytest.raises(BadFeeds, match="bias has the shape \\[3\\], but needs the shape \\[4\\]"):
        fused_gemm(a, b, bias=torch.ones(3))
    with pytest.raises(BadFeeds, match="at least 1"):
        fused_gemm(a[:0], b)
    with pytest.raises(BadFeeds, match="grouped"):
        fused_conv2d(torch.ones(1, 4, 4, 8), torch.ones(8, 3, 3, 4))
    for call in (quantize_rowwise, torch.ops.accel.quantize_rowwise):
        with pytest.raises(BadFeeds, match="can't quantize to"):
            call(a, torch.float16)
        with pytest.raises(BadFeeds, match="float matrix"):
            call(a[0], torch.int8)
    with pytest.raises(UnknownName, match="use one of none, relu"):
        fused_gemm(a, b, act="gelu")
    with pytest.raises(UnsupportedHere, match="split K"):
        GemmSpec(m=1, n=1, k=MAX_INT8_K + 1, in_dtype="int8")
