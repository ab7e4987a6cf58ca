"""Proves that RNNs on packed sequences are exported as PyTorch computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import accel


class Packed(nn.Module):
    def __init__(self, kind: Any, first: bool, whole: bool, value: float, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=first, **options)
        self.first, self.whole, self.value = first, whole, value

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, batch_first=self.first, enforce_sorted=False)
        output, hidden = self.rnn(packed)
        total = x.shape[1 if self.first else 0] if self.whole else None
        padded, found = pad_packed_sequence(output, self.first, self.value, total)
        return padded, found, hidden[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Packed(nn.GRU, True, False, 0.0), "b,t,4"),
        (Packed(nn.LSTM, False, False, -1.0, bidirectional=True), "t,b,4"),
        (Packed(nn.GRU, True, True, 2.0, num_layers=2), "b,t,4"),
    ],
)
def test_a_packed_sequence_is_padded_again(model: Packed, shape: str, tmp_path: Path, capfd: Any) -> None:
    """Fails if the outputs aren't as long as the longest sequence or as ``total_length``, if they are padded with
    another value, or if the exporter's C++ code writes warnings to stderr."""
    inputs = [f"x:float32[{shape}]", "lengths:int64[b]{1..t}"]
    made = accel.export(model.eval(), inputs=inputs, out=tmp_path / "m.onnx", simplify=False)
    assert "shape_type_inference" not in capfd.readouterr().err
    x, lengths = torch.randn(3, 9, 4), torch.tensor([2, 6, 3])
    x = x if model.first else x.transpose(0, 1).contiguous()
    with accel.load(made) as session, torch.no_grad():
        torch.testing.assert_close(tuple(session(x, lengths)), model(x, lengths), rtol=1e-4, atol=1e-5)


def test_what_others_write_meanwhile_is_kept(tmp_path: Path, capfd: Any) -> None:
    """Fails if a line that a model writes to stderr itself is lost together with the exporter's warnings."""
    import os

    class Loud(Packed):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if torch.jit.is_tracing():
                os.write(2, b"a line of the model\n")
            return super().forward(x, lengths)

    inputs = ["x:float32[b,t,4]", "lengths:int64[b]{1..t}"]
    accel.export(Loud(nn.GRU, True, False, 0.0).eval(), inputs=inputs, out=tmp_path / "m.onnx", simplify=False)
    assert "a line of the model" in capfd.readouterr().err
