"""Proves that the CPU kernels compute what the reference in NumPy computes, and agree with one another bit by bit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import BadFeeds, UnknownName
from accel.kernels.native.cpu import layout, reference
from accel.kernels.native.cpu.layout import Packed
from accel.kernels.native.cpu.library import CpuLibrary, Product, product

Array = np.ndarray[Any, Any]


def packed(
    draw: np.random.Generator, sizes: tuple[int, ...], k: int, bits: int, block: int, size: float = 1.0
) -> Packed:
    matrix = (size * draw.standard_normal((sum(sizes), k))).astype(np.float32)
    weights, scales = layout.quantize(matrix, bits=bits, block=block)
    return layout.pack(weights, scales, k=k, bits=bits, sizes=sizes)


@pytest.mark.parametrize("bits", [4, 8])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_kernel_is_within_the_bound(library: CpuLibrary, bits: int, data: Any) -> None:
    """Fails if a kernel reads past a row, mixes up outputs, blocks, rows or matrices, loses the zero point, or rounds
    otherwise than the other kernels, at any size that doesn't fill a group, a block or a tile."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, k = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 300))
    block = data.draw(st.sampled_from(layout.BLOCKS))
    gated = data.draw(st.booleans())
    sizes = data.draw(
        st.integers(1, 40).map(lambda n: (n, n))
        if gated
        else st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    )
    size = 10.0 ** data.draw(st.integers(-9, 9))
    weights = packed(draw, sizes, k, bits, block, size)
    x = (draw.standard_normal((rows, k)) * 10.0 ** draw.uniform(-6, 6, (rows, 1))).astype(np.float32)
    residual = draw.standard_normal((rows, sizes[0])).astype(np.float32) if data.draw(st.booleans()) else None
    wanted, bounds = reference.product(x, weights, gated=gated, residual=residual)
    first: list[Array] | None = None
    for kernel in library.runs:
        for threads in (1, 3):
            found = product(library, x, weights, gated=gated, residual=residual, kernel=kernel, threads=threads)
            for got, want, bound in zip(found, wanted, bounds, strict=True):
                assert got.shape == want.shape
                assert np.all(np.abs(got - want) <= bound), kernel
            first = first or found
            assert all(np.array_equal(a, b) for a, b in zip(first, found, strict=True)), kernel


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_sums_are_exact(library: CpuLibrary, bits: int) -> None:
    """Fails if a sum of integers saturates or is rounded: every weight and every activation is at an end of its range,
    and all scales are 1, so the result is the integer itself."""
    k, ends = 256, (0, 2**bits - 1)
    raw = np.array([[ends[(row + column) % 2 if row < 3 else row % 2] for column in range(k)] for row in range(5)])
    stored = raw[:, ::2] | raw[:, 1::2] << 4 if bits == 4 else raw
    weights = layout.pack(
        stored.astype(np.uint8).reshape(5, k // 32, -1), np.ones((5, k // 32), np.float32), k=k, bits=bits
    )
    signs = np.array([np.ones(k), -np.ones(k), np.where(np.arange(k) % 2, 1, -1)])
    x = (127 * signs).astype(np.float32)
    wanted = x.astype(np.int64) @ (raw - layout.ZERO_POINTS[bits]).T
    assert np.abs(wanted).max() < 2**24  # float32 has every integer up to here
    for kernel in library.runs:
        (found,) = product(library, x, weights, kernel=kernel)
        assert np.array_equal(found, wanted), kernel


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 128])
def test_the_product_is_near_the_unquantized_one(library: CpuLibrary, bits: int, block: int) -> None:
    """Fails if the packed weights aren't the weights: the reference reads the packed form, too."""
    draw = np.random.default_rng(0)
    matrix, x = draw.standard_normal((50, 1000)).astype(np.float32), draw.standard_normal((4, 1000)).astype(np.float32)
    weights, scales = layout.quantize(matrix, bits=bits, block=block)
    whole = layout.pack(weights, scales, k=1000, bits=bits)
    (found,) = product(library, x, whole)
    wanted = x @ matrix.T
    assert np.all(
        np.abs(whole.scales.swapaxes(1, 2).reshape(-1, len(scales[0]))[:50] * whole.gain / scales - 1) <= 2**-11
    )
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < (0.15 if bits == 4 else 0.015)


def test_what_is_not_finite_stays_in_its_row(library: CpuLibrary) -> None:
    """Fails if a NaN or an infinity is lost in int8, or changes another row; or if tiny and huge numbers overflow."""
    weights = packed(np.random.default_rng(0), (20,), 64, 4, 32)
    x = np.ones((6, 64), np.float32)
    x[0, 3], x[1, 40], x[2], x[3], x[4, ::2] = np.nan, -np.inf, 0, 1e-38, 3e38
    for kernel in library.runs:
        (found,) = product(library, x, weights, kernel=kernel)
        assert np.isnan(found[:2]).all(), kernel
        assert not found[2:4].any(), kernel
        assert np.isfinite(found[5]).all(), kernel


def test_silu_at_its_ends(library: CpuLibrary) -> None:
    """Fails if the exponential overflows, or loses a NaN: silu(x) is x for large x, and 0 for very negative x."""
    raw = np.full((2, 1, 32), 128, np.uint8)
    raw[:, 0, 0] = 129  # both matrices pick x[0]
    weights = layout.pack(raw, np.ones((2, 1), np.float32), k=32, bits=8, sizes=(1, 1))
    x = np.zeros((6, 32), np.float32)
    x[:, 0] = [1e4, -1e4, 0, 90, -90, np.nan]
    for kernel in library.runs:
        (found,) = product(library, x, weights, gated=True, kernel=kernel)
        np.testing.assert_allclose(found[[0, 2, 3], 0], [1e8, 0, 8100], rtol=1e-6)
        assert np.all(np.abs(found[[1, 4], 0]) < 1e-20)
        assert np.isnan(found[5, 0])


def test_callers_at_the_same_time(library: CpuLibrary) -> None:
    """Fails if two callers share the threads' work or the quantized rows."""
    draw = np.random.default_rng(0)
    cases = [(packed(draw, (300, 77), 512, 4, 32), draw.standard_normal((3, 512)).astype(np.float32)) for _ in range(4)]
    wanted = [product(library, x, weights) for weights, x in cases]
    wrong: list[int] = []

    def call(at: int) -> None:
        weights, x = cases[at]
        for _ in range(100):
            found = product(library, x, weights, threads=2)
            if not all(np.array_equal(a, b) for a, b in zip(found, wanted[at], strict=True)):
                wrong.append(at)

    threads = [threading.Thread(target=call, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_wrong_calls_are_one_sentence(library: CpuLibrary) -> None:
    """Fails if a size, a form or a kernel that doesn't exist reaches a kernel."""
    weights = packed(np.random.default_rng(0), (20, 20), 64, 4, 32)
    x = np.ones((1, 64), np.float32)
    with pytest.raises(BadFeeds, match=r"don't fit k=64"):
        product(library, x[:, :63], weights)
    with pytest.raises(BadFeeds, match=r"the residual \(1, 3\)"):
        product(library, x, weights, residual=np.ones((1, 3), np.float32))
    with pytest.raises(UnknownName, match="use one of"):
        product(library, x, weights, kernel="mmx")
    with pytest.raises(BadFeeds, match="a size is zero"):
        product(library, x[:0], weights)
    with pytest.raises(BadFeeds, match="NULL"):
        library.run(Product())
    with pytest.raises(BadFeeds, match="infinite or NaN"):
        layout.pack(np.zeros((16, 1, 16), np.uint8), np.full((16, 1), np.inf, np.float32), k=32, bits=4)
    with pytest.raises(BadFeeds, match="aren't supported"):
        layout.pack(np.zeros((16, 1, 8), np.uint8), np.ones((16, 1), np.float32), k=16, bits=4)


def test_the_torch_operator(library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torch's operator computes something else, with or without a library, or fails in torch.compile."""
    from accel.kernels.torch import packed as operator

    draw = np.random.default_rng(0)
    weights = packed(draw, (24, 24), 96, 4, 32)
    tensors = torch.from_numpy(weights.weights), torch.from_numpy(weights.scales)
    x = torch.from_numpy(draw.standard_normal((2, 3, 96)).astype(np.float32))
    (wanted,), _ = reference.product(x.reshape(6, 96).numpy(), weights, gated=True)
    for built in (library, None):
        monkeypatch.setattr(operator, "cpu_library", lambda built=built: built)
        (found,) = operator.packed_product(x, *tensors, [24, 24], 4, weights.gain, True)
        assert found.shape == (2, 3, 24)
        np.testing.assert_allclose(found.reshape(6, 24).numpy(), wanted, rtol=1e-5, atol=1e-5)
        assert [tuple(one.shape) for one in operator.packed_product(x[:0], *tensors, [24, 24], 4)] == [(0, 3, 24)] * 2
    torch.library.opcheck(
        operator.packed_product, (x, *tensors, [24, 24], 4), test_utils=("test_schema", "test_faketensor")
    )
    for wrong in ((x.double(), *tensors, [24, 24], 4), (x, *tensors, [24], 4), (x[..., :60], *tensors, [24, 24], 4)):
        with pytest.raises(BadFeeds, match="aren't a packed product"):
            operator.packed_product(*wrong)
