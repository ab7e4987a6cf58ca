"""Proves that the int8 quantization of ZeRO++ changes a value by at most half a step. A block with a NaN or an infinity
must become NaN."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.train.parallel.quantized_comm import BLOCK, decode, dequantize, encode, quantize


@settings(deadline=None)
@given(size=st.integers(1, 3 * BLOCK), seed=st.integers(0, 1000), scale=st.floats(1e-20, 1e20))
def test_a_value_moves_by_half_a_step_at_most(size: int, seed: int, scale: float) -> None:
    """Fails if a block uses another block's scale, or if values are truncated instead of rounded."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    codes, scales = quantize(values)
    found = dequantize(codes, scales).view(-1)
    assert (found[size:] == 0).all()
    for start in range(0, size, BLOCK):
        block = values[start : start + BLOCK]
        step = block.abs().max() / 127
        assert (found[start : start + len(block)] - block).abs().max() <= step * 0.5001


def test_one_outlier_spoils_its_own_block_only() -> None:
    """Fails if all blocks of a tensor share one scale."""
    values = torch.full((2 * BLOCK,), 1e-3)
    values[0] = 1e3
    found = dequantize(*quantize(values)).view(-1)
    torch.testing.assert_close(found[BLOCK:], values[BLOCK:], rtol=1e-2, atol=0)


def test_what_is_no_number_stays_none() -> None:
    """Fails if quantization turns a NaN or an infinity into a finite number. If one rank overflows, a finite number
    would hide the overflow, and the other ranks would wrongly make the step."""
    values = torch.ones(3 * BLOCK)
    values[1], values[BLOCK] = torch.nan, torch.inf
    found = dequantize(*quantize(values))
    assert found[:2].isnan().all()
    assert (found[2] == 1).all()


def test_zeros_stay_zeros() -> None:
    assert (dequantize(*quantize(torch.zeros(5))) == 0).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2 * BLOCK + 3), min_size=1, max_size=5), st.integers(0, 100))
def test_a_parameter_is_rounded_as_if_it_were_alone(sizes: list[int], seed: int) -> None:
    """Fails if a block holds values of two parameters. Large values of one parameter would make the rounding of the
    other parameter coarser. Also fails if a value is decoded into another parameter."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator) * 10.0 ** (index - 2) for index, size in enumerate(sizes)]
    codes, scales = encode(torch.cat(parts), sizes)
    assert len(codes) == sum(sizes)
    found = decode(torch.stack([codes, codes]), torch.stack([scales, scales]), sizes)
    alone = [dequantize(*quantize(part)).view(-1)[: len(part)] for part in parts]
    assert torch.equal(found, torch.cat(alone).expand(2, -1))
