"""Proves that Python functions raise ``CannotWrite`` for an output that can't be written, and not the system's
``OSError``."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import CannotWrite
from accel.timing import page


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(256, 256).eval()


@pytest.fixture(scope="module")
def fast(model: nn.Module) -> Any:
    words: dict[str, Any] = {"target": "ort-cpu", "precision": "fp32", "vary_session": False, "budget_seconds": 1}
    return accel.optimize(model, example=(torch.ones(2, 256),), **words)


def _export(model: nn.Module, _: Any, out: Path) -> Any:
    return accel.export(model, example=(torch.ones(2, 256),), out=out / "m.onnx")


def _export_to_a_folder(_: nn.Module, fast: Any, out: Path) -> Any:
    return accel.export(fast.artifact.path, to="openvino", out=out)


def _export_a_pipeline(model: nn.Module, _: Any, out: Path) -> Any:
    whole = accel.Pipeline(lambda parts, x: parts.net(x), net=model)
    return accel.export(whole, example=(torch.ones(2, 256),), out=out)


def _optimize(_: nn.Module, fast: Any, out: Path) -> Any:
    return accel.optimize(fast.artifact.path, target="ort-cpu", out=out)


def _save(_: nn.Module, fast: Any, out: Path) -> Any:
    return fast.save(out)


def _copy(_: nn.Module, fast: Any, out: Path) -> Any:
    return fast.artifact.copy_to(out / "m.onnx")


def _write_a_report(_: nn.Module, __: Any, out: Path) -> Any:
    return page.write(out / "report.json", {})


WRITERS = (_export, _export_to_a_folder, _export_a_pipeline, _optimize, _save, _copy, _write_a_report)


@pytest.mark.parametrize("place", ["below a file", "below a broken link", "/proc"])
@pytest.mark.parametrize("write", WRITERS)
def test_impossible_outputs(write: Callable[..., Any], place: str, model: nn.Module, fast: Any, tmp_path: Path) -> None:
    """Fails if a public function raises an ``OSError``, or writes anything, where a path can't be written."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deeper")
    places = {
        "below a file": tmp_path / "file",
        "below a broken link": tmp_path / "link",
        "/proc": Path("/proc/nowhere"),
    }
    with pytest.raises(CannotWrite, match=r"choose another path|check the path") as caught:
        write(model, fast, places[place] / "out")
    assert str(places[place]) in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@contextmanager
def full_disk() -> Iterator[None]:
    """Simulates a full disk by limiting the size of every file that this process writes to 1 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [_export, _save, _copy])
def test_a_full_disk(write: Callable[..., Any], model: nn.Module, fast: Any, tmp_path: Path) -> None:
    """Fails if a full disk gives an ``OSError``, or leaves a file behind."""
    if write is _export:
        accel.export(model, example=(torch.ones(2, 256),))  # only the copy of the cached file has no room
    with full_disk(), pytest.raises(CannotWrite, match=r"no space left for .*; free some, or point the output"):
        write(model, fast, tmp_path / "out")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_of_the_cache(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a stage without room in the cache raises an ``OSError``."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    with full_disk(), pytest.raises(CannotWrite, match=r"no space left for .*; free some"):
        accel.export(model, example=(torch.ones(2, 256),), out=tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_errors_of_the_users_code_pass_through(model: nn.Module, tmp_path: Path) -> None:
    """Fails if an error of the user's own function is taken for an output that can't be written."""

    def batches() -> Iterator[Any]:
        yield torch.ones(2, 256)
        raise FileNotFoundError(2, "No such file or directory", "images/7.png")

    with pytest.raises(Exception, match=r"images/7\.png") as caught:
        accel.optimize(model, example=(torch.ones(2, 256),), data=batches(), target="ort-cpu", budget_seconds=1)
    assert not isinstance(caught.value, CannotWrite)
