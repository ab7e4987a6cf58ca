"""Runs the user's ``evaluate`` on the unsharded weights."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from accel.errors import BadConfig, TrainingFailed, kind_of, one_line

from .build import make_model, seeded
from .config.schema import TrainConfig


def evaluated(
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    state: Mapping[str, torch.Tensor],
    config: TrainConfig,
    step: int,
    out: Path,
) -> dict[str, float]:
    """Returns the metrics of the unsharded weights ``state`` as plain numbers. ``evaluate`` gets a separate model.

    Raises ``TrainingFailed`` if ``evaluate`` fails, and ``BadConfig`` if the result of ``evaluate`` isn't a dict of
    numbers.
    """
    name = config.evaluate
    model = make_model(config.model, config.seed)
    model.load_state_dict(dict(state))
    try:
        with seeded(config.seed):
            found = evaluate(model.eval())
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise TrainingFailed(
            f"evaluate {name} failed at step {step} ({reason}; its traceback is in {out / 'ranks.log'})"
        ) from error
    if not isinstance(found, Mapping):
        raise BadConfig(
            f"evaluate {name} returned {kind_of(found)}; return a dict of metrics, such as "
            "{'top1': 0.97} (docs/how-to/training.md)"
        )
    metrics = {}
    for key, value in found.items():
        try:
            metrics[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadConfig(
                f"evaluate {name} returned {kind_of(value)} for the metric {key!r}, which is not a number; "
                "return a dict of numbers, such as {'top1': 0.97} (docs/how-to/training.md)"
            ) from error
    return metrics
