"""Defines the fixtures of all tests, such as one shared stage cache and real models that are exported once."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings

from accel.artifact import Artifact
from tests.forked import Server, fresh
from tests.short_measurements import shorten

pytest_plugins = ["tests.support.tensorflow_models"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Python functions would show their progress on stderr, which many tests read.
os.environ.setdefault("ACCEL_QUIET", "1")
# Two pytest workers and their children share the cores. So a thread that waits must not spin, and PyTorch needs no
# second thread, which costs a tenth of the time. OpenMP reads both variables when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Even if PYTHONDONTWRITEBYTECODE is set, pytest keeps the compiled tests. The next run collects in half the time.
_WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# pytest would add its handlers to PyTorch's log for machines, too. PyTorch would then describe many steps of an export,
# each with its stack. Nobody reads this log here.
logging.getLogger("torch.__trace").addHandler = lambda _: None  # type: ignore[method-assign]

# Hypothesis examples have no deadline, because the machine may be busy. Each run of the suite uses the same examples.
# With --hypothesis-profile=default, a run uses new examples.
settings.register_profile("accel", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("accel")


@pytest.hookimpl(trylast=True)  # the tests that don't run have been left out by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first if several pytest workers run. The last files are short then, so that no
    worker waits for long until the other worker has finished. A test counts as one second, a slow test as 15 seconds,
    and a test with the marker ``proof(seconds=N)`` as N seconds."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    sizes: dict[Path, int] = {}
    for item in items:
        seconds = 15 if item.get_closest_marker("slow") else 1
        if proof := item.get_closest_marker("proof"):
            seconds = proof.kwargs.get("seconds", seconds)
        sizes[item.path] = sizes.get(item.path, 0) + seconds
    items.sort(key=lambda item: sizes[item.path], reverse=True)


def pytest_collection_finish() -> None:
    """Ends the time in which bytecode is written. Keeps Python's garbage collector from looking through the imported
    modules again and again, which takes a tenth of the time."""
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """Forks accel's child processes from a server that has already imported the libraries, if several pytest workers
    run. A test that runs alone starts each child as a user's command does."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with ExitStack() as stack:
        for server in (Server("child"), Server("simplifier")):
            stack.enter_context(server.installed())
            stack.callback(server.end)
        yield


@pytest.fixture
def fresh_interpreters() -> Iterator[None]:
    """Makes the test start new Python interpreters instead of forking, like a user's command. Each interpreter imports
    all modules again."""
    with fresh():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that all pytest workers of this run share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


OneWorker = Callable[[str], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def one_worker(shared: Path) -> OneWorker:
    """Returns ``one_worker``. Only one pytest worker at a time runs the code inside ``with one_worker("name"):``. The
    other workers wait and then find the first worker's files."""

    @contextmanager
    def alone(name: str) -> Iterator[None]:
        with (shared / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return alone


def _without_memory() -> type:
    """Returns a class of costs that learns nothing. All tests share a cache, so the order of the candidates in a test
    would otherwise depend on the tests before it. The tests of the order use the real class."""
    from accel.optimizer.recipes.order import Costs

    class WithoutMemory(Costs):
        def remember(self, rows: object) -> None:
            pass

    return WithoutMemory


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> Iterator[None]:
    """Shortens the measurements of ``accel optimize``. The tests of the search set their own limits."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        patch.setattr("accel.optimizer.run.Costs", _without_memory())
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_cache(shared: Path) -> Iterator[None]:
    """Makes all tests of this run share one cache instead of the user's cache."""
    before = os.environ.get("ACCEL_CACHE_DIR")
    os.environ["ACCEL_CACHE_DIR"] = str(shared / "cache")
    yield
    if before is None:
        del os.environ["ACCEL_CACHE_DIR"]
    else:
        os.environ["ACCEL_CACHE_DIR"] = before


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Asserts that neither a test nor a library leaves a file in the current folder. Caches of tools are allowed."""
    before = set(Path.cwd().iterdir())
    yield
    left = {path for path in set(Path.cwd().iterdir()) - before if not path.name.startswith((".", "__pycache__"))}
    assert not left, f"left behind: {sorted(left)}"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test an empty cache of its own."""
    folder = tmp_path / "own-cache"
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(folder))
    return folder


@dataclass(frozen=True)
class Ran:
    """Holds the exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> object:
    """Returns ``cli``: ``cli("export", ...)`` runs the accel command in this process, exactly as accel's ``main``
    does."""
    import click

    from accel.cli import group, run

    @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def whole(words: Sequence[str]) -> None:
        raise SystemExit(run(group, list(words)))

    def call(*words: str | Path) -> Ran:
        monkeypatch.setenv("COLUMNS", "200")
        result = CliRunner().invoke(whole, ["--", *map(str, words)], catch_exceptions=False)
        return Ran(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the folder for the exported models of this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def minilm(models: Path, one_worker: OneWorker, _one_cache: None) -> Artifact:
    """Exports and simplifies all-MiniLM-L6-v2 with its real weights, for up to 4 samples of 256 tokens."""
    from accel.api.export import export

    with one_worker("minilm"):
        return export(
            "accel.examples.minilm:model",
            out=models / "minilm.onnx",
            dims={"batch": (1, 1, 4), "sequence": (8, 64, 256)},
        )


@pytest.fixture(scope="session")
def minilm_data(models: Path) -> Path:
    """Saves 32 real texts of 64 tokens."""
    from accel.examples import minilm as example

    path = models / "calib.npz"
    np.savez(path, **example.calibration_data(32, 64))  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="session")
def digits_weights(shared: Path, one_worker: OneWorker) -> Path:
    """Trains a small net on the digits and returns its weights."""
    from accel.examples import digits as example

    path = shared / "digits.safetensors"
    with one_worker("digits"):
        if not path.exists():
            accuracy = example.train(path, epochs=4)
            assert accuracy > 0.95
    return path


@pytest.fixture(scope="session")
def digits(models: Path, digits_weights: Path, _one_cache: None) -> Artifact:
    """Exports the trained net to ONNX."""
    from accel.api.export import export

    return export("accel.examples.digits:model", weights=digits_weights, out=models / "digits.onnx")


@pytest.fixture(scope="session")
def digits_data(models: Path) -> tuple[Path, Path]:
    """Saves calibration images and labeled test images in two files."""
    from accel.examples import digits as example

    parts = example.data()
    calibration, test = models / "digits_calib.npz", models / "digits_test.npz"
    np.savez(calibration, image=parts["train"]["image"][:128])
    np.savez(test, **parts["test"])  # type: ignore[arg-type]
    return calibration, test


MY_MODEL = textwrap.dedent(
    """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.head = torch.nn.Linear(8, 5)

        def forward(self, x):
            return self.head(torch.relu(self.conv(x)).mean((2, 3)))

    def make():
        return Net()
    """
)


@pytest.fixture
def my_model(tmp_path: Path) -> Path:
    """Writes a model factory of a user to a file."""
    path = tmp_path / "my_model.py"
    path.write_text(MY_MODEL)
    return path
