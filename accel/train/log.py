"""``log.jsonl``: what a run says about itself while it runs."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.train.config import TrainConfig

LOG = "log.jsonl"


class StepLog:
    """One JSON object every ``log_every`` steps and at the last."""

    def __init__(self, path: Path, config: TrainConfig, step: int) -> None:
        self.path, self.config = path, config
        self.began, self.first, self.targets = time.monotonic(), step, 0.0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Take note of ``step``."""
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
        self.began, self.first, self.targets = time.monotonic(), step, 0.0
        self._write(body)

    def note(self, said: str) -> None:
        """Something that whoever watches has to know."""
        self._write({"note": said})

    def _write(self, body: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(body) + "\n")


def _memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
