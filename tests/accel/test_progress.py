"""Proves that public functions show their progress in a notebook and an interactive Python, and are silent in a
script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import accel
from accel.errors import BadSource
from accel.progress import report, shows_progress, watched_by


@shows_progress
def work(steps: int) -> int:
    """Reports its steps."""
    for step in range(steps):
        report("a step with a long name " * 5, step / steps)
    return steps


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


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script gets unrequested output."""
    work(2)
    assert capsys.readouterr().err == ""


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
