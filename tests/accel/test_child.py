"""Proves that child processes return answers, report crashes, keep time limits, and end with their parent."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import pytest

from accel.child import Child, run_in_child, run_program
from accel.errors import ChildCrashed, MissingExtra, UnknownName
from accel.machine import collect_rarely
from accel.progress import watched_by

# These tests are about the start of a child, so each child is a new interpreter.
pytestmark = pytest.mark.usefixtures("fresh_interpreters")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:  # noqa: PTH123
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: the process ended before the read
        return False


def test_answers_and_keeps_an_object() -> None:
    """Checks that a child process can run methods of its object and functions of a module, and returns their
    results."""
    with Child("fractions:Fraction", {"numerator": 7, "denominator": 20}) as child:
        assert child.call("limit_denominator", max_denominator=3) == Fraction(1, 3)
        assert child.call("os:getpid") == child.pid != os.getpid()


def test_a_crash_is_an_error_with_the_signal() -> None:
    """Checks that a native crash in the child doesn't end this process, and that the error names the signal."""
    with pytest.raises(ChildCrashed, match="SIGABRT"):
        run_in_child("os:abort")


def test_a_crash_is_not_told_by_what_an_earlier_call_wrote() -> None:
    """Fails if the error after a crash repeats an error that an earlier call already returned."""
    with Child() as child:
        with pytest.raises(UnknownName):
            child.call("accel.tables.target:Target.get", name="toaster")
        assert "toaster" in child.output()
        with pytest.raises(ChildCrashed) as caught:
            child.call("os:abort")
    assert str(caught.value) == "the process running os:abort died (signal SIGABRT)"


def test_errors_come_back_as_they_were() -> None:
    """Fails if an AccelError or another exception loses its class or text on the way to the parent."""
    with pytest.raises(UnknownName, match="unknown target 'toaster'"):
        run_in_child("accel.tables.target:Target.get", name="toaster")
    again = pickle.loads(pickle.dumps(MissingExtra("grpc", "serve")))
    assert str(again) == str(MissingExtra("grpc", "serve"))
    with pytest.raises(ChildCrashed, match="ModuleNotFoundError: No module named 'no_such_module'"):
        run_in_child("no_such_module:thing")


def test_time_limit_kills() -> None:
    """Fails if the parent waits for a hung child, or leaves the child running."""
    child = Child()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        child.call("signal:pause", timeout=0.3)
    assert time.monotonic() - started < 10
    assert not _alive(child.pid)
    child.close()


def test_its_temporary_files_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if temporary files of a library remain after the child ends, crashes or is killed. Also fails if torch's
    compilation cache is deleted with the child's temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)  # makes tempfile forget the earlier folder
    with Child() as child:
        made = Path(child.call("tempfile:mkdtemp"))
        assert made.is_dir()
        assert made.parent.parent == tmp_path
        assert Path(child.call("os:getenv", key="TORCHINDUCTOR_CACHE_DIR")).parent == tmp_path
    with Child() as child:
        child.call("tempfile:mkdtemp")
        with pytest.raises(ChildCrashed):
            child.call("os:abort")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_forwarded() -> None:
    """Checks that the child's progress reports reach the parent's watcher."""
    seen: list[tuple[str, float | None]] = []
    with watched_by(lambda message, fraction: seen.append((message, fraction))), Child() as child:
        child.call("accel.progress:report", message="half", fraction=0.5)
    assert seen == [("half", 0.5)]


def test_pause_stops_it() -> None:
    """Fails if a paused child still uses the CPU."""
    with Child() as child:
        child.pause()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with open(f"/proc/{child.pid}/stat") as stream:  # noqa: PTH123
                state = stream.read().rpartition(")")[2].split()[0]
            if state == "T":
                break
        assert state == "T"
        child.resume()
        assert child.call("os:getpid") == child.pid


def test_dies_with_its_parent() -> None:
    """Fails if the children of a killed parent keep running."""
    code = "import sys, signal; from accel.child import Child; c = Child(); print(c.pid, flush=True); signal.pause()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)


def test_what_a_program_wrote(tmp_path: Path) -> None:
    """Checks that a program runs in the given folder, and that the caller gets its output. Also checks that a hung
    program ends at the time limit."""
    said = run_program(["/bin/sh", "-c", "pwd; echo bad >&2; exit 3"], folder=tmp_path, timeout=60)
    assert said == f"{tmp_path}\nbad\n"
    pid, hangs = tmp_path / "pid", "echo $$ > new; mv new pid; exec sleep 600"
    for timeout in (2, 10, 60):  # tries a longer timeout if the program had no time to start
        with pytest.raises(TimeoutError, match=f"sh took longer than {timeout} s"):
            run_program(["/bin/sh", "-c", hangs], folder=tmp_path, timeout=timeout)
        if pid.exists():
            break
    assert not _alive(int(pid.read_text()))


def test_a_hidden_module_cannot_be_imported() -> None:
    """Checks that the child can't import a hidden module, and can import other modules."""
    with Child(hidden=("wave",)) as child:
        assert child.call("colorsys:rgb_to_hsv", r=0, g=0, b=0) == (0.0, 0.0, 0)
        with pytest.raises(ChildCrashed, match="import of wave halted"):
            child.call("wave:open", f="a.wav")


def test_files_in_the_working_directory_replace_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a user's file in the working directory replaces a module that the child imports. Checks also that the
    child can import from the working directory if the parent can, as in a notebook."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the user')")
    (tmp_path / "own_module.py").write_text("def answer(): return 42")
    monkeypatch.chdir(tmp_path)
    with Child() as child:
        assert child.call("queue:Queue.__name__.upper") == "QUEUE"
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    assert run_in_child("own_module:answer") == 42
    (tmp_path / "accel.py").write_text("raise RuntimeError('a file of the user')")
    assert run_program([sys.executable, "-c", "print(6)"], folder=tmp_path, timeout=60).strip() == "6"


def test_a_child_searches_for_garbage_rarely() -> None:
    """Fails if the imports in a child spend a tenth of their time on searches for unreachable objects, or if
    ``collect_rarely`` makes the search of a user's process more frequent."""
    usual = gc.get_threshold()
    assert run_in_child("gc:get_threshold")[0] == 50_000
    try:
        gc.set_threshold(1_000_000)
        collect_rarely()
        assert gc.get_threshold()[0] == 1_000_000
    finally:
        gc.set_threshold(*usual)
