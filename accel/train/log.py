"""Writes ``log.jsonl``, ``tensorboard/`` and ``alive`` into a run folder. Touches ``alive`` at every step."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.errors import MissingExtra

from .config.schema import TrainConfig

LOG = "log.jsonl"
BOARD = "tensorboard"
ALIVE = "alive"


def beat(out: Path) -> None:
    """Tells the watchdog that the run makes progress. Any rank may call this function."""
    with suppress(OSError):
        (out / ALIVE).touch()


class StepLog:
    """Writes one JSON object every ``log_every`` steps, at the last step, and for each evaluation.

    Writes the same figures as TensorBoard scalars if ``config.tensorboard`` is set. ``flops`` is the number of FLOPs of
    a step over all ranks, and ``peak`` is the FLOP/s of all devices. If ``flops`` or ``peak`` is 0, no MFU is written.
    """

    def __init__(self, path: Path, config: TrainConfig, step: int, *, flops: float = 0.0, peak: float = 0.0) -> None:
        self.path, self.config = path, config
        self.flops, self.peak = flops, peak
        self.board: Any = _board(path.with_name(BOARD)) if config.tensorboard else None
        self.began, self.first, self.targets = time.monotonic(), step, 0.0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Counts the targets of ``step``, and writes the step's figures if a log entry is due."""
        self.targets += values["targets"]
        if step % self.config.log_every and step != self.config.steps:
            return
        seconds = time.monotonic() - self.began
        steps = step - self.first
        body = {
            "step": step,
            "steps": self.config.steps,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "targets_per_second": self.targets / seconds,
            "seconds_per_step": seconds / steps,
            "eta_seconds": (self.config.steps - step) * seconds / steps,
            "memory_bytes": _memory(),
        }
        if self.flops and self.peak:
            body["mfu"] = self.flops * steps / (seconds * self.peak)
        if self.board is not None:
            for name, value in body.items():
                if name not in ("step", "steps") and value is not None:
                    self.board.add_scalar(name, value, step)
            self.board.flush()
        self.began, self.first, self.targets = time.monotonic(), step, 0.0
        self._write(body)

    def skip(self, step: int, skipped: int, before: float, after: float) -> None:
        """Writes that ``step`` overflowed at the loss scale ``before``. ``skipped`` counts the run's skipped steps."""
        said = f"step {step} is skipped: a gradient overflowed at the loss scale {before:g}, which is {after:g} now"
        self._write({"note": said, "step": step, "skipped": skipped, "loss_scale": after})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics that ``evaluate`` measured after ``step``."""
        body = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(f"evaluate/{name}", value, step)
            self.board.flush()
        self._write({"step": step, "steps": self.config.steps, "evaluate": body})

    def note(self, said: str) -> None:
        """Writes a message for the person who watches the run."""
        self._write({"note": said})

    def _write(self, body: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(body) + "\n")


def keep_tensorflow_out() -> None:
    """Makes TensorBoard use its own stub instead of importing TensorFlow. The import of TensorFlow would take seconds
    and print warnings, and scalars don't need TensorFlow."""
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


def _board(folder: Path) -> Any:
    keep_tensorflow_out()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "train") from error
    return SummaryWriter(str(folder))


def _memory() -> int:
    """Returns this rank's peak memory in bytes. On a GPU, counts the tensors. On a CPU, counts the whole process."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
