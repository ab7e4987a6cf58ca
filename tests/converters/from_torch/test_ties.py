"""Proves that accel finds calls that choose between equal or nearly equal scores."""

from __future__ import annotations

from pathlib import Path

import torch

from accel.converters.from_torch.ties import OtherOrder


def changed(scores: torch.Tensor) -> list[str]:
    """Runs ``topk``, ``sort`` and ``argsort`` with both other orders. Returns the calls whose result changed."""
    found = []
    for odd in (False, True):
        with torch.inference_mode(), OtherOrder(odd=odd) as other:
            values, indices = scores.topk(2, dim=1)
            assert torch.equal(values.nan_to_num(), scores.gather(1, indices).nan_to_num())
            torch.sort(scores, 1, descending=True)
            scores.argsort(1)
        found += other.places
    return sorted(place.partition(" ")[0] for place in set(found))


def test_scores_that_rounding_orders() -> None:
    """Fails if equal scores or scores that differ by a rounding error keep their order, or if other scores change
    theirs."""
    calls = ["argsort", "sort", "topk"]
    assert changed(torch.full((2, 4), 0.5)) == calls
    assert changed(torch.tensor([[3.0, 0.2, 1.0 + 2e-7, 1.0]])) == calls
    assert changed(torch.tensor([[-torch.inf, 2.0, 1.0, torch.nan, 3.0]])) == []
    assert changed(torch.tensor([[4.0, 2.0, 1.0, 3.0]])) == []


def test_the_line_of_the_call_is_named() -> None:
    """Fails if the place isn't the line of the model's code that calls ``topk``."""
    with OtherOrder(odd=False) as other:
        torch.ones(1, 4).topk(2)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text == "        torch.ones(1, 4).topk(2)")
    assert other.places == [f"topk at test_ties.py:{line}"]
