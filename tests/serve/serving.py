"""Small models in Triton's layout for the tests of the server."""

from __future__ import annotations

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
