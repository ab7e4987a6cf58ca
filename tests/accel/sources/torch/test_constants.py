"""Proves that constants among the arguments and results of a module stay what the module computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel


class Scaled(nn.Module):
    """Takes two tensors and constants of each kind."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0, flip: bool = False, how: str = "sum"
    ) -> torch.Tensor:
        both = x + y if how == "sum" else x * y
        return (-both if flip else both) * scale


def twice(parts: Any, x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return parts.inner(parts.inner(x, y, scale), y, scale)


X, Y = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)


def test_another_constant_is_another_model(own_cache: Path) -> None:
    """Fails if an export takes the cached file that was made with other constants, or compares itself with the kept
    outputs of a run with other constants."""
    model = Scaled()
    for scale, use_cache in ((3.0, True), (5.0, True), (7.0, False)):
        with accel.load(accel.export(model, example=(X, Y, scale), use_cache=use_cache)) as session:
            assert torch.equal(session(X, Y, scale), model(X, Y, scale)), scale


def test_a_pipeline_with_another_constant_is_another_model(own_cache: Path) -> None:
    """Fails if a pipeline or its parts keep the constant of an earlier export."""
    pipeline = accel.Pipeline(twice, inner=Scaled())
    for scale in (2.0, 3.0):
        with accel.load(accel.export(pipeline, example=(X, Y, scale))) as session:
            assert torch.equal(session(X, Y, scale), pipeline(X, Y, scale)), scale


@pytest.mark.parametrize("other", [{"scale": 2}, {"scale": 2.0}, {"flip": True}, {"how": "product"}])
def test_constants_are_part_of_the_hash(other: dict[str, Any]) -> None:
    """Fails if two examples that differ in one constant, or only in its type, give one sha256. Also fails if equal
    examples give two."""
    one, again, another = (
        accel.Source(Scaled(), example={"x": X, "y": Y, **constants}).open().source["sha256"]
        for constants in ({"scale": 3}, {"scale": 3}, other)
    )
    assert one == again != another
