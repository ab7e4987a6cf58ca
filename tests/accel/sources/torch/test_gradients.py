"""Proves that a model that computes gradients in forward is refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from accel.errors import BadSource

X = torch.arange(6.0).reshape(2, 3)


class Forces(nn.Module):
    """Returns an energy and its gradient, by torch or written out."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.written = written

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.written:
            energies = self.linear(x).tanh()
            return energies.sum(1), (1 - energies**2) @ self.linear.weight
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            energy = self.linear(y).tanh().sum(1)
            return energy.detach(), torch.autograd.grad(energy.sum(), y)[0]


def test_gradients_are_the_reason() -> None:
    """Fails if a model that computes forces from an energy is told to correct its inputs, or if the advice doesn't
    work."""
    by_torch, written = Forces(False), Forces(True)
    written.load_state_dict(by_torch.state_dict())
    with pytest.raises(BadSource, match=r"computes gradients in forward \(test_gradients.py line \d+\).*write the"):
        accel.load(by_torch, example=(X,))
    with accel.load(written, example=(X,)) as session:
        torch.testing.assert_close(session(X), tuple(one.detach() for one in by_torch(X)))


def test_another_error_is_no_gradient() -> None:
    """Fails if a model that fails for another reason is said to compute gradients."""
    with pytest.raises(BadSource, match="fails in PyTorch") as found:
        accel.load(lambda x: x @ torch.ones(3, 3), inputs=["x:float32[batch,4]"])
    assert "gradients" not in str(found.value)
