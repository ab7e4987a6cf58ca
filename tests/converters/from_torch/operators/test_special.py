"""Proves that accel exports special functions with all digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import accel

NUMBERS = torch.cat(
    [
        torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, -3.0, 0.5, -0.5, 1.5, torch.inf, -torch.inf, torch.nan]),
        torch.tensor([1e-30, -1e-30, 1e-6, 0.85, 0.8500001, -0.99999, 0.9999999, 10.0, 9.999999, 35.5, 1e4, 1e30]),
        torch.linspace(-1, 1, 200),
        torch.linspace(-20.05, 20.05, 201),
    ]
)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "erfinv": torch.erfinv,
    "ndtri": torch.special.ndtri,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "log_ndtr": torch.special.log_ndtr,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
}


class _Functions(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(x) for name, function in FUNCTIONS.items()}


def test_functions(tmp_path: Path) -> None:
    """Fails if the file differs from PyTorch by more than the rounding of float32, at a pole, at infinity, or at the
    border of two ranges of the approximation."""
    made = accel.export(_Functions(), example=(torch.rand(2, 3),), out=tmp_path / "m.onnx", simplify=False)
    x = NUMBERS[: NUMBERS.numel() // 3 * 3].reshape(-1, 3)
    with accel.load(made) as session:
        wanted = {name: found.float() for name, found in _Functions()(x.double()).items()}
        torch.testing.assert_close(session(x), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
