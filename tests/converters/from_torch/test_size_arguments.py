"""Proves that functions with dynamic sizes as arguments, and sums of overlapping windows, are exported right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel

WINDOW = torch.hann_window(16)


def _masked(x: torch.Tensor, **options: Any) -> torch.Tensor:
    spectrum = torch.stft(x, 16, 4, window=WINDOW, return_complex=True)
    mask = torch.sigmoid(spectrum.abs())
    return torch.istft(spectrum * mask, 16, 4, window=WINDOW, **options)


MODELS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    # the model, and the sizes at which it is compared
    "steps": (lambda x: x * torch.linspace(-1, 2, x.shape[1]), (1, 2, 5, 101)),
    "steps of integers": (lambda x: x + torch.linspace(0, 10, steps=x.shape[1], dtype=torch.int64), (1, 4, 7, 30)),
    "a signal": (_masked, (64, 203)),
    "a signal of a length": (lambda x: _masked(x, length=x.shape[1]), (64, 203)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_size_as_an_argument(name: str, tmp_path: Path) -> None:
    """Fails if ``linspace`` or ``istft`` keeps the size of the example, or if the windows of a signal are added
    wrongly."""
    model, sizes = MODELS[name]
    dynamic = {"x": {0: "batch", 1: "n"}}
    made = accel.export(model, example=(torch.randn(2, 48),), dynamic=dynamic, out=tmp_path / "m.onnx", simplify=False)
    with accel.load(made) as session:
        for size in sizes:
            x = torch.randn(3, size)
            torch.testing.assert_close(session(x), model(x), rtol=1e-4, atol=1e-5)
    assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
