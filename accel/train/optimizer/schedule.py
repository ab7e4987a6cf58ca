"""Computes the learning rate of each step from the config's schedule, which may be one of torch's."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from accel.errors import BadConfig, one_line

from ..config.schedule import learning_rate
from ..config.schema import SCHEDULES, TrainConfig
from .named import load_named

# Schedules that a config can't describe, with the reason.
_REFUSED = {
    "ReduceLROnPlateau": "follows a metric, so a resumed run could not repeat it",
    "SequentialLR": "is made of other schedules",
    "ChainedScheduler": "is made of other schedules",
}


class Rates:
    """The learning rates of a run. A resumed run gets the same rates, because a schedule of torch is run again from the
    first step on an optimizer without a model."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._next = 0
        self._made: torch.optim.lr_scheduler.LRScheduler | None = None
        if config.schedule.name not in SCHEDULES:
            self._made = self._begin()

    def at(self, step: int) -> float:
        """Returns the learning rate of ``step``. The first step is 0. The rate warms up linearly to the first rate of
        the schedule."""
        if self._made is None:
            return learning_rate(self.config, step)
        warmup = self.config.schedule.warmup
        wanted = max(0, step - warmup)
        if wanted < self._next:
            self._made, self._next = self._begin(), 0
        with warnings.catch_warnings():  # torch warns of a schedule without steps of the optimizer
            warnings.simplefilter("ignore")
            while self._next < wanted:
                self._made.step()
                self._next += 1
        rate = float(self._made.get_last_lr()[0])
        return rate * (step + 1) / warmup if step < warmup else rate

    def _begin(self) -> torch.optim.lr_scheduler.LRScheduler:
        kind, name = _kind(self.config.schedule.name), self.config.schedule.name
        options, taken = dict(self.config.schedule.options), inspect.signature(kind).parameters
        for option in options:
            if option not in taken or option == "optimizer":
                known = ", ".join(n for n in taken if n != "optimizer")
                raise BadConfig(f"the schedule {name} has no option {option}; its options are: {known}")
        if options.get("cycle_momentum"):
            raise BadConfig(f"accel changes only the learning rate; use cycle_momentum = false with {name}")
        if "cycle_momentum" in taken:
            options["cycle_momentum"] = False
        if "lr_lambda" in options:
            options["lr_lambda"] = _function(str(options["lr_lambda"]))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=self.config.optimizer.lr)
        try:
            made: torch.optim.lr_scheduler.LRScheduler = kind(optimizer, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadConfig(
                f"the schedule {name} can't be made ({one_line(error, 200)}); correct the table schedule.options"
            ) from error
        return made


def _kind(name: str) -> Any:
    example = "torch.optim.lr_scheduler.StepLR"
    base = torch.optim.lr_scheduler.LRScheduler
    kind = load_named(name, what="schedule", name=name, known=SCHEDULES, example=example, base=base)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise BadConfig(f"schedule.name is {name!r}, which is no schedule; use e.g. torch.optim.lr_scheduler.StepLR")
    if kind.__name__ in _REFUSED:
        raise BadConfig(
            f"{name} {_REFUSED[kind.__name__]}; use torch.optim.lr_scheduler.LambdaLR with options.lr_lambda = "
            "'file.py:function'"
        )
    return kind


def _function(spec: str) -> Any:
    from accel.sources.python_object import load_object

    return load_object(spec, "function")[1]
