"""Proves that the weights of a large PyTorch model are written from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel
from accel.sources.onnx import weights


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
        self.rounded = torch.nn.Parameter(torch.randn(64, 48).to(torch.bfloat16))
        self.second.weight = torch.nn.Parameter(self.first.weight.t())  # isn't contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) @ self.rounded.float()


def test_weights_written_from_memory_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a byte of the file depends on where the weights are, if the weights are copied into a message, or if an
    array stays in memory after the export."""
    net = Net().eval()
    words = {"inputs": "x:float32[batch,64]", "simplify": False, "use_cache": False}
    plain = accel.export(net, out=tmp_path / "plain.onnx", **words)
    held: list[int] = []
    keep = weights.held_in_memory

    def counting(arrays: list[object]) -> object:
        held.append(len(arrays))
        return keep(arrays)  # type: ignore[arg-type]

    monkeypatch.setattr("accel.converters.graph.memory_weights.held_in_memory", counting)
    monkeypatch.setattr("accel.converters.graph.memory_weights.SMALL_BYTES", 1000)
    monkeypatch.setattr(weights, "DETACHED_BYTES", 0)
    made = accel.export(net, out=tmp_path / "made.onnx", **words)
    assert held == [3]
    assert made.path.read_bytes() == plain.path.read_bytes()
    assert not weights._held
