"""Computes the learning rate of each step."""

from __future__ import annotations

import math

from .schema import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Returns the learning rate of ``step``. The first step is 0.

    The rate warms up linearly. After the warm-up, the rate stays constant, or falls linearly or as a cosine to
    ``floor`` times ``lr``.

    The cosine is equation 5 of Loshchilov and Hutter 2017, "SGDR", without restarts.
    """
    schedule, peak = config.schedule, config.optimizer.lr
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, config.steps - schedule.warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule.name]
    return peak * (schedule.floor + (1 - schedule.floor) * left)
