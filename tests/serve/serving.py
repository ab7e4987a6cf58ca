"""Small models in Triton's layout for the tests of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_builder as build
from onnx import TensorProto

from accel.serve.process import ServingProcess

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


def linear(folder: Path, scale: float = 1.0) -> Path:
    """``y = scale * x @ WEIGHTS`` with a dynamic batch."""
    folder.mkdir(parents=True, exist_ok=True)
    return build.artifact(
        folder / "model.onnx",
        [build.node("MatMul", "x w", "y")],
        {"x": (FLOAT, ["batch", 4])},
        {"y": (FLOAT, ["batch", 3])},
        {"w": WEIGHTS * np.float32(scale)},
    ).path


def two_inputs(folder: Path) -> Path:
    """``total = a + b`` (int64) and ``text`` as it came."""
    folder.mkdir(parents=True, exist_ok=True)
    return build.artifact(
        folder / "model.onnx",
        [build.node("Add", "a b", "total"), build.node("Identity", "text", "same")],
        {"a": (INT64, ["batch", 2]), "b": (INT64, ["batch", 2]), "text": (STRING, ["batch", 1])},
        {"total": (INT64, ["batch", 2]), "same": (STRING, ["batch", 1])},
    ).path


def identity(folder: Path, dtype: int, shape: list[Any] | None = None) -> Path:
    """``y = x`` of one dtype and one shape without a batch."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape or ["n"]
    return build.artifact(
        folder / "model.onnx", [build.node("Identity", "x", "y")], {"x": (dtype, shape)}, {"y": (dtype, shape)}
    ).path


Start = Callable[..., ServingProcess]


class Served:
    """A running ``accel serve`` and its log."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accel", "serve", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self.log: list[dict[str, Any]] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(json.loads(line) if line.startswith("{") else {"message": line})
                self._news.notify_all()
        with self._news:
            self.log.append({"message": "end of log"})
            self._news.notify_all()

    def wait_for(self, message: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th line of the log that says so."""

        def lines() -> list[dict[str, Any]]:
            return [line for line in self.log if line["message"] == message]

        with self._news:
            assert self._news.wait_for(lambda: len(lines()) >= count or self.ended(), 60), self.log
            assert len(lines()) >= count, self.log
            return lines()[count - 1]

    def ended(self) -> bool:
        return any(line["message"] == "end of log" for line in self.log)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
