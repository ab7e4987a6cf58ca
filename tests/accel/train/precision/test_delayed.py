"""Proves that delayed scaling takes its scales from earlier steps, on all ranks alike and across a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel.train.config.schema import PrecisionConfig
from accel.train.precision.delayed import History
from accel.train.precision.fp8 import convert, rounded
from accel.train.run.launch import train
from tests.support.runs import config_of, logged, trainer_of

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PRECISION = {"mode": "bf16", "fp8": "delayed", "fp8_history": 3}


def _layer(length: int = 2) -> tuple[nn.Linear, History]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48))
    _, history = convert(model, PrecisionConfig(fp8="delayed", fp8_history=length), CPU)
    assert history is not None
    return model[0], history


def _scaled(value: torch.Tensor, form: torch.dtype, largest: float) -> torch.Tensor:
    most = torch.finfo(form).max
    scale = most / torch.tensor(largest)
    return (value * scale).clamp(-most, most).to(form).float() / scale


def test_the_first_step_has_the_scales_of_its_own_values() -> None:
    """Computes the output and both gradients from rounded operands. Fails if an operand has the wrong format, or if a
    number of rows that isn't a multiple of 16 changes a product."""
    layer, _ = _layer()
    weight = layer.weight.detach().clone()
    x = torch.randn(2, 5, 32)
    leaf, gradient = x.clone().requires_grad_(), torch.randn(2, 5, 48)
    output = layer(leaf)
    output.backward(gradient)
    low, flat = rounded(weight, E4M3, None), rounded(x.flatten(0, 1), E4M3, None)
    g = rounded(gradient.flatten(0, 1), E5M2, None)
    torch.testing.assert_close(output.flatten(0, 1), flat @ low.T + layer.bias)
    torch.testing.assert_close(leaf.grad.flatten(0, 1), g @ low)  # type: ignore[union-attr]
    torch.testing.assert_close(layer.weight.grad, g.T @ flat)


def test_later_steps_have_the_scales_of_the_steps_before() -> None:
    """Fails if a scale follows the current values, if the largest value of a step's micro-batches isn't the one that
    counts, or if a step stays in the history for too long. A value beyond the scale saturates."""
    layer, history = _layer(length=2)
    low = rounded(layer.weight.detach(), E4M3, None)

    def errors(sizes: tuple[float, ...], scales: tuple[float, ...]) -> list[torch.Tensor]:
        found = []
        for size in sizes:
            x = torch.randn(4, 32)
            x[0, 0] = size  # the largest value, because randn is below 6
            found.append((x, layer(x) - layer.bias))
        history.end_step()
        return [output - _scaled(x, E4M3, scale) @ low.T for (x, output), scale in zip(found, scales, strict=True)]

    for sizes, scales in (
        ((8.0, 64.0), (8.0, 64.0)),  # without a history, each pass has its own values
        ((8.0,), (64.0,)),
        ((100.0,), (64.0,)),  # saturates
        ((8.0,), (100.0,)),
        ((8.0,), (100.0,)),
        ((8.0,), (8.0,)),  # the step with 100 was three steps ago
    ):
        for error in errors(sizes, scales):
            torch.testing.assert_close(error, torch.zeros_like(error), rtol=0, atol=1e-4)


def test_a_resumed_run_has_its_history(tmp_path: Path) -> None:
    """Fails if a run that resumes after three of six steps has other losses than a run without a stop."""
    table = {"precision": PRECISION, "checkpoint": {"every": 3}}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    trainer_of(tmp_path / "whole", steps=6, **table).run()
    trainer_of(tmp_path / "cut", steps=3, **table).run()
    again = trainer_of(tmp_path / "cut", steps=6, **table)
    again.resume()
    assert again.built.history is not None
    assert float(again.built.history.largest.min()) > 0
    again.run()
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    other = trainer_of(tmp_path / "cut", steps=6, precision={**PRECISION, "fp8_history": 5})
    other.resume()
    assert other.built.history is not None
    assert float(other.built.history.largest.max()) == 0  # a history of another length isn't taken


@pytest.mark.parametrize("zero", [0, 3])
def test_all_ranks_have_the_same_scales(tmp_path: Path, zero: int) -> None:
    """Fails if the losses on two ranks differ from one process by more than bf16's rounding does. Also fails if the
    ranks keep histories of their own: the checkpoint has the largest values of all ranks."""
    table = {"precision": PRECISION, "global_batch": 8, "steps": 3}
    train(config_of(**table, micro_batch=4, parallel={"zero": zero}), tmp_path / "two", nproc=2)
    (tmp_path / "one").mkdir()
    trainer = trainer_of(tmp_path / "one", **table)
    trainer.run()
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), rel=5e-3)
    resumed = trainer_of(tmp_path / "two", **table)
    resumed.resume()
    own, theirs = trainer.built.history, resumed.built.history
    assert own is not None
    assert theirs is not None
    # The first step has the same weights, so its largest inputs and weights are the same.
    torch.testing.assert_close(theirs.steps[0, :, :2], own.steps[0, :, :2], rtol=1e-2, atol=1e-6)
