"""Proves that the cross entropy with smoothed labels and with probabilities is exported right."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import accel

WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])


class Losses(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        y = torch.where(y == 4, -100, y)  # a class that is ignored
        for reduction in ("none", "mean", "sum"):
            for weight in (None, WEIGHT):
                options = {"weight": weight, "reduction": reduction}
                found.append(F.cross_entropy(x, y, label_smoothing=0.1, **options))
                found.append(F.cross_entropy(x, y, **options))
                found.append(F.cross_entropy(x, x.flip(1).softmax(1), label_smoothing=0.2, **options))
                pixels = torch.stack([x, x.roll(1, 1)], -1), torch.stack([y, y], -1)
                found.append(F.cross_entropy(*pixels, label_smoothing=0.3, **options))
        return tuple(found)


def test_the_cross_entropy_of_smoothed_labels(tmp_path: Path) -> None:
    """Fails if a file leaves out the smoothing, the weights, the ignored rows or the probabilities of a loss."""
    x, y = torch.randn(4, 5), torch.tensor([0, 3, 4, 1])
    made = accel.export(
        Losses(), example=(x, y), inputs=["x:float32[batch,5]", "y:int64[batch]{0..3}"], out=tmp_path / "m.onnx"
    )
    with accel.load(made) as session:
        torch.testing.assert_close(tuple(session(x, y % 4)), Losses()(x, y % 4), rtol=1e-4, atol=1e-5)
