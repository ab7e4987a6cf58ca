"""Proves that a dynamic dim can be split into parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.errors import BadInputSpec

N = {"x": {0: "batch", 1: "n"}}
SPLITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the first part": lambda x: x.chunk(3, 1)[0],
    "the last part": lambda x: x.chunk(3, 1)[-1],
    "unsafe": lambda x: torch.unsafe_chunk(x, 3, 1)[1],
    "all parts": lambda x: torch.cat([part.cumsum(1) for part in x.chunk(3, 1)], 1),
    "parts of half the size": lambda x: torch.cat(x.split((x.shape[1] + 1) // 2, 1)[::-1], 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_of_a_dynamic_dim(name: str, tmp_path: Path) -> None:
    """Fails if a split of a dynamic dim is refused, or if a part has the size of the example's part."""
    model = SPLITS[name]
    given: Any = {"example": (torch.randn(2, 9, 4),), "dynamic": N, "dims": {"n": (5, 9, 40)}}
    with accel.load(accel.export(model, **given, out=tmp_path / "m.onnx", simplify=False)) as session:
        for size in (5, 6, 7, 12, 40):
            x = torch.randn(3, size, 4)
            torch.testing.assert_close(session(x), model(x))


def test_sizes_with_fewer_parts(tmp_path: Path) -> None:
    """Fails if a file is made for sizes at which the source has fewer parts, or if the advice doesn't help."""
    given: Any = {"example": (torch.randn(2, 9, 4),), "dynamic": N, "out": tmp_path / "m.onnx"}
    with pytest.raises(BadInputSpec, match=r"give dims=\{'n': '5:9:36'\}$"):
        accel.export(SPLITS["the last part"], **given)
    accel.export(SPLITS["the last part"], **given, dims={"n": "5:9:36"})
