"""Builds the operators for ONNX Runtime once for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from accel.kernels.native.bridges import build_for_onnxruntime
from tests.kernels.native.onnxruntime_models import INCLUDE


@pytest.fixture(scope="session")
def onnxruntime_library(shared: Path, one_worker: Callable[[str], AbstractContextManager[None]]) -> Path:
    """Returns the path of the library with the operators for ONNX Runtime. The first test worker builds the library for
    all workers."""
    if not INCLUDE or shutil.which("g++") is None:
        pytest.skip("needs g++ and ONNX Runtime's headers in $ACCEL_ONNXRUNTIME_INCLUDE")
    with one_worker("onnxruntime-operators"):
        return build_for_onnxruntime(Path(INCLUDE), cache=shared / "onnxruntime-operators").path
