"""Proves that public functions show their progress and their warnings in a notebook, an interactive Python and a
script, and that ``ACCEL_QUIET`` silences them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accel
from accel.errors import BadSource
from accel.progress import report, shows_progress, silent, watched_by
from tests.support import onnx_builder as build


@shows_progress
def work(steps: int) -> int:
    """Reports its steps."""
    for step in range(steps):
        report("a step with a long name " * 5, step / steps)
    return steps


@shows_progress
def doubtful() -> SimpleNamespace:
    """Returns a result with a warning."""
    return SimpleNamespace(warnings=("it is noisy",))


@pytest.fixture(autouse=True)
def not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCEL_QUIET", raising=False)


@pytest.fixture
def interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def test_a_line_that_vanishes(interactive: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a notebook shows the progress in one line, and erases the line at the end."""
    assert work(2) == 2
    shown = capsys.readouterr().err
    assert "\n" not in shown
    lines = shown.split("\r")
    assert any(line.startswith("accel: a step") for line in lines)
    assert max(map(len, lines)) <= 78
    assert not lines[-1].strip()
    assert not lines[-2].strip()


def test_a_script_shows_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script shows nothing, or a line for each percentage of a step."""
    work(3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"accel: {'a step with a long name ' * 5}\n"


@pytest.mark.parametrize("mode", ["script", "interactive"])
def test_warnings_are_shown(mode: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """Fails if the warnings of a result are hidden from a caller that doesn't print the result."""
    if mode == "interactive":
        request.getfixturevalue("interactive")
    doubtful()
    assert capsys.readouterr().err.rpartition("\r")[2] == "accel: warning: it is noisy\n"


def test_silence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cli: Any, tmp_path: Path) -> None:
    """Fails if ACCEL_QUIET doesn't silence a function, or if --quiet doesn't silence a command whose function would
    show its progress."""
    with watched_by(silent):
        work(2)
        doubtful()
    monkeypatch.setenv("ACCEL_QUIET", "1")
    work(2)
    doubtful()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("ACCEL_QUIET")
    shape = (build.FLOAT, ["batch", 2])
    build.artifact(tmp_path / "m.onnx", [build.node("Tanh", "x", "y")], {"x": shape}, {"y": shape})
    words = ("verify", tmp_path / "m.onnx", tmp_path / "m.onnx")
    assert cli(*words).stderr == "accel: verify\n"
    assert cli(*words, "--quiet").stderr == ""


def test_another_watcher(interactive: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a caller that watches the progress gets messages."""
    seen: list[str] = []
    with watched_by(lambda message, _: seen.append(message)):
        work(2)
    assert len(seen) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["export", "optimize", "bench", "verify"])
def test_public_functions(name: str, interactive: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Checks that every slow public function shows its progress, and erases its line after an error."""
    arguments = {"export": ("n.py:f",), "optimize": ("n.py:f",), "bench": (["n.py:f"],), "verify": ("n.py:f", "m.onnx")}
    with pytest.raises(BadSource):
        getattr(accel, name)(*arguments[name], **({"out": tmp_path / "x.onnx"} if name == "export" else {}))
    assert capsys.readouterr().err.endswith("\r")
