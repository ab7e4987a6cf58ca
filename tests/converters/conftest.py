"""One engine, built once for all tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_models import two_inputs_engine, two_inputs_source

from accel.artifact import Artifact


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def source(folder: Path) -> Artifact:
    return two_inputs_source(folder)


@pytest.fixture(scope="session")
def engine(source: Artifact, folder: Path) -> Artifact:
    return two_inputs_engine(source, folder)
