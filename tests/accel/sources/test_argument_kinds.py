"""Proves that an argument of a wrong kind is named, with an example that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel
from accel.errors import BadData, UsageError
from accel.optimizer.request import OptimizeRequest
from accel.sources.argument_kinds import check_kinds
from accel.sources.source import Source

OF_SOURCES = ("example", "dynamic", "inputs", "dims", "weights", "adapters")
OF_OPTIMIZE = ("target", "precision", "profiles", "engine", "quantize", "cast", "contexts", "lengths", "sizes", "text")


@pytest.mark.parametrize("name", OF_SOURCES)
@pytest.mark.parametrize("wrong", [3, object()])
def test_arguments_of_a_source(name: str, wrong: Any) -> None:
    """Fails if a wrong kind raises Python's own error, such as "'int' object is not iterable"."""
    with pytest.raises(UsageError, match=rf"^{name}= takes .*, not .*; give e.g. {name}="):
        Source(nn.Linear(4, 2), **{"example": (torch.ones(1, 4),), name: wrong})


@pytest.mark.parametrize("name", OF_OPTIMIZE)
def test_arguments_of_optimize(name: str) -> None:
    """Fails if a wrong kind raises Python's own error, or if the example in the message is refused, too."""
    with pytest.raises(UsageError, match=rf"^{name}= takes .*, not 3; give e.g. {name}=") as raised:
        accel.optimize("m.onnx", **{name: 3})
    example = eval(re.sub(rf".*; give e.g. {name}=", "", str(raised.value)))
    check_kinds({name: example})
    if name in ("target", "precision", "engine", "quantize", "cast"):
        given = (example,) if name == "precision" else example
        OptimizeRequest(source=Source("m.onnx"), out=Path("out"), **{name: given})


def test_a_metric_that_is_no_function_and_data_of_unequal_counts(tmp_path: Path) -> None:
    """Fails if a message has an empty name, or names a temporary file of accel instead of the user's data."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    made = accel.export(Two(), example=(torch.ones(2, 4), torch.ones(2, 4)), out=tmp_path / "m.onnx")
    data = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 4), np.float32)}
    with pytest.raises(UsageError, match=r"the metric 3 is not a function; give a function of \(outputs, data\)"):
        accel.optimize(made, data=data, metric=3, target="ort-cpu", out=tmp_path / "out")  # type: ignore[arg-type]
    fewer = {**data, "y": data["y"][:7]}
    with pytest.raises(BadData, match=r"^batch 0 of the data: input 'y' has 7 samples, but input 'x' has 8 samples"):
        accel.optimize(made, data=fewer, target="ort-cpu", out=tmp_path / "out")
