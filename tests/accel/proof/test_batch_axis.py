"""Proves that samples are never read along another axis than the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel
from accel.errors import BadData
from accel.signature import Signature, TensorSpec
from accel.timing.blocks import batch_of


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.cumsum(0)[-1])


class BatchFirst(nn.Module):
    """Follows the advice of the message."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x.transpose(0, 1))


def test_time_first_data_is_refused_with_the_fix(tmp_path: Path) -> None:
    """Fails if the steps of a time-first sequence are taken for samples, which judges and measures sequences of one
    step, or if the advice doesn't help."""
    model = TimeFirst()
    data = [torch.randn(20, 8, 3) for _ in range(2)]
    axes = {"x": {0: "time", 1: "batch"}}
    made = accel.export(model, example=(torch.randn(5, 4, 3),), dynamic=axes, out=tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=data[0].numpy())
    said = r"input 'x' has the batch on axis 1, but the samples of the data lie along axis 0; wrap the model in a "
    said += r"module that passes on x.transpose\(0, 1\), and give the batch first in the example and in the data"
    for call in (
        lambda: accel.verify(made, made, data=data),
        lambda: accel.bisect(made, made, data=tmp_path / "d.npz"),
        lambda: accel.bench(made, data=data, rounds=1, budget_seconds=1),
        lambda: accel.optimize(made, data=tmp_path / "d.npz", target="ort-cpu", budget_seconds=5, out=tmp_path / "o"),
    ):
        with pytest.raises(BadData, match=said):
            call()
    assert accel.verify(made, made).passed  # without data, every dim goes by its name

    wrapped = BatchFirst(model)
    axes = {"x": {0: "batch", 1: "time"}}
    first = accel.export(wrapped, example=(torch.randn(4, 5, 3),), dynamic=axes, out=tmp_path / "first.onnx")
    assert accel.verify(first, first, data=[one.transpose(0, 1) for one in data]).passed


def test_a_state_with_the_layers_first_is_named(tmp_path: Path) -> None:
    """Fails if the layers of a state are taken for samples."""
    two = TwoInputs()
    example = {"x": torch.randn(4, 3), "state": torch.randn(2, 4, 3)}
    axes = {"x": {0: "batch"}, "state": {1: "batch"}}
    made = accel.export(two, example=example, dynamic=axes, out=tmp_path / "m.onnx")
    with pytest.raises(BadData, match=r"input 'state' has the batch on axis 1.*passes on state.transpose\(0, 1\)"):
        accel.verify(made, made, data=example)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return x + state.sum(0)


def test_the_samples_of_a_run_are_counted_along_the_batch() -> None:
    """Fails if the throughput of a time-first model counts steps instead of samples."""
    signature = Signature((TensorSpec("x", "float32", ("time", "batch", 3)),))
    assert batch_of(signature, {"x": np.zeros((20, 8, 3), np.float32)}) == 8
