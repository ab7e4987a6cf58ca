"""Builds the CPU kernels once for all tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from accel.kernels.native.cpu.build import build_for_cpu
from accel.kernels.native.cpu.library import CpuLibrary


@pytest.fixture(scope="session")
def library(shared: Path, one_worker: Callable[[str], AbstractContextManager[None]]) -> CpuLibrary:
    """Returns the library of CPU kernels. The first test worker builds it for all workers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with one_worker("cpu-kernels"):
        return CpuLibrary(build_for_cpu(cache=shared / "cpu-kernels").path)
