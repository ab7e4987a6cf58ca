"""Proves that threads can export at the same time, and that an export hides no output of another thread."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.errors import ExportFailed
from accel.sources.torch.quiet_export import quiet_export


class Meeting(nn.Module):
    """Waits until the main thread has printed, if an exporter calls it in another thread. ONNX lacks its operator, so
    accel tries both exporters."""

    entered = threading.Event()
    printed = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if sys.stdout is not Meeting.own:
            Meeting.entered.set()
            assert Meeting.printed.wait(60)
        print("the model says")
        return torch.special.bessel_j0(x)

    own: Any = None


def test_two_exports_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if PyTorch's exporters run in two threads at the same time, which they can't, or if nothing is printed
    after the exports, because they restored the streams of the process in the wrong order."""

    def export(number: int) -> bool:
        model, x = nn.Sequential(nn.Linear(4 + number, 8), nn.Tanh()), torch.randn(3, 4 + number)
        made = accel.export(model, example=(x,), out=tmp_path / f"{number}.onnx", use_cache=False)
        with accel.load(made) as session:
            return torch.allclose(session(x), model(x), atol=1e-5)

    own = sys.stdout, sys.stderr
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(export, range(4))) == [True] * 4
    assert (sys.stdout, sys.stderr) == own
    assert not any("Quiet" in str(one) for one in warnings.filters)
    print("after")
    print("after", file=sys.stderr)
    assert capfd.readouterr() == ("after\n", "after\n")


def test_another_thread_prints_during_an_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if an export in a thread hides what the main thread prints, or shows what the model or an exporter
    prints."""
    Meeting.own = sys.stdout

    def export() -> None:
        with pytest.raises(ExportFailed, match="bessel"):
            accel.export(Meeting(), example=(torch.ones(2, 3),), out=tmp_path / "m.onnx", use_cache=False)

    capfd.readouterr()
    with ThreadPoolExecutor(1) as threads:
        exported = threads.submit(export)
        assert Meeting.entered.wait(60)
        print("from Python")
        print("from Python", file=sys.stderr)
        sys.__stderr__.flush()  # type: ignore[union-attr]
        seen = capfd.readouterr()
        Meeting.printed.set()
        exported.result(60)
    assert seen.out.endswith("from Python\n")
    assert seen.err == "from Python\n"
    assert "IR graph" not in "".join(capfd.readouterr())


def test_a_redirection_in_another_thread_overlaps_with_an_export() -> None:
    """Fails if text or a warning is lost because another thread redirected a stream, or kept the filters of warnings,
    within an export and restored them after the export."""
    inside, leave = threading.Event(), threading.Event()

    def export() -> None:
        with quiet_export():
            inside.set()
            assert leave.wait(60)
            warnings.warn("hidden", stacklevel=1)

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        thread = threading.Thread(target=export)
        thread.start()
        assert inside.wait(60)
        with contextlib.redirect_stdout(io.StringIO()) as other, warnings.catch_warnings():
            print("redirected")
            with pytest.warns(UserWarning, match="of this thread"):
                warnings.warn("of this thread", stacklevel=1)
            leave.set()
            thread.join(60)
        print("after")
        with pytest.warns(UserWarning, match="after"):
            warnings.warn("after", stacklevel=1)
    assert other.getvalue() == "redirected\n"
    assert shown.getvalue() == "after\n"
