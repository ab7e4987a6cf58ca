"""Proves that cancelled work ends, even if it reports no progress."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

from accel import cancel
from accel.artifact import Artifact
from accel.cache import StageCache
from accel.cancel import cancelled_by, check_cancelled, interruptible
from accel.child import Child, run_in_child, run_program
from accel.optimizer.budget import Budget, OutOfTime
from accel.progress import report
from accel.sources.onnx.file import open_onnx
from accel.stage import StageConfig, run_stage
from accel.tables.stage_table import Stage

# These tests are about the end of processes, so each process is a new interpreter.
pytestmark = pytest.mark.usefixtures("fresh_interpreters")

MODEL = '<ir_version: 10, opset_import: ["": 20]> g (float[batch, 4] x) => (float[batch, 4] y) { y = Relu (x) }'


class GivenUp(Exception):
    """Ends cancelled work."""


def soon(seconds: float = 0.3) -> Callable[[], None]:
    """Returns a function that raises GivenUp as soon as more than ``seconds`` have passed."""
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise GivenUp

    return check


def silent_for_ever(*_: object) -> None:
    """Loops forever: reports nothing, never checks for cancellation, and catches every ``Exception``."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def silent_in_a_child(*_: object) -> None:
    run_in_child("signal:pause")


def stage(function: str) -> Stage:
    return Stage(
        name="silent",
        function=f"{__name__}:{function}",
        config="accel.stage:StageConfig",
        takes=("onnx",),
        gives="onnx",
        packages=(),
    )


@pytest.mark.parametrize("function", ["silent_for_ever", "silent_in_a_child"])
def test_a_stage_that_never_reports_is_given_up_with_the_budget(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Fails if a stage that reports no progress continues after its time budget, or leaves an entry in the cache."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_cancel"])
    onnx.save(onnx.parser.parse_model(MODEL), str(tmp_path / "m.onnx"))
    src: Artifact = open_onnx(tmp_path / "m.onnx", probe=False)
    budget = Budget(1.0)
    began = time.monotonic()
    cache = StageCache()
    with pytest.raises(OutOfTime), budget.within(0.5):
        run_stage("silent", src, StageConfig(), stage=stage(function), cache=cache)
    assert time.monotonic() - began < 60
    assert list((cache.root / "scratch").iterdir()) == []
    with Budget(None).within(0.5):
        assert interruptible(lambda one: one.kind, src) == "onnx"


DEAF = """
import signal, sys
from pathlib import Path
from accel.cancel import on_interrupt
from accel.sources.onnx.file import open_onnx
from accel.stage import StageConfig, run_stage
from accel.tables.stage_table import Stage

def stage(src, config, out):  # swallows the error of Ctrl-C and finishes its work, as some exporters do
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        out.write_bytes(src.path.read_bytes())
    return open_onnx(out)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_interrupt)
    deaf = Stage(name="deaf", function="deaf:stage", config="accel.stage:StageConfig", takes=("onnx",), gives="onnx",
                 packages=())
    try:
        run_stage("deaf", open_onnx(Path("a.onnx")), StageConfig(), stage=deaf)
    except KeyboardInterrupt:
        sys.exit(7)
"""


def test_a_swallowed_ctrl_c_ends_the_run_after_the_stage(tmp_path: Path, own_cache: Path) -> None:
    """Checks that accel ends the run after a stage that swallows the exception of Ctrl-C, and doesn't cache the stage's
    result."""
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "a.onnx")
    (tmp_path / "deaf.py").write_text(DEAF)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "deaf.py"], cwd=tmp_path, env=environment, check=False)
    assert ran.returncode == 7
    assert not list(own_cache.rglob("*.onnx"))


def test_a_child_that_reports_nothing_is_killed() -> None:
    """Fails if the parent waits for a child after its call was cancelled, or leaves the child running."""
    child = Child()
    with pytest.raises(GivenUp), cancelled_by(soon()):
        child.call("signal:pause")
    assert not Path(f"/proc/{child.pid}").exists()
    child.close()


@pytest.mark.parametrize("start", ["a child", "a program"])
def test_a_process_that_is_being_started_is_not_left_behind(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a cancellation that comes while a process is being started leaves the process running, or leaves the
    log or the temporary folder of a child open."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def slow(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        end = time.monotonic() + 3 * cancel.INTERVAL
        while time.monotonic() < end:  # a busy machine takes long to start a process
            time.sleep(0.01)
        return started[0]

    def work() -> None:
        if start == "a child":
            run_in_child("signal:pause")
        else:
            run_program(["/bin/sleep", "600"], folder=tmp_path, timeout=600)

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(GivenUp), cancelled_by(soon()):
        interruptible(work)
    assert started[0].returncode == -signal.SIGKILL
    started.clear()
    gc.collect()  # warns about what is still open


def test_a_program_that_reports_nothing_is_killed(tmp_path: Path) -> None:
    """Fails if the parent waits for a cancelled program, or leaves the program running."""
    pid = tmp_path / "pid"
    command = ["/bin/sh", "-c", "echo $$ > new; mv new pid; exec sleep 600"]

    def check() -> None:
        if pid.exists():
            raise GivenUp

    with pytest.raises(GivenUp), cancelled_by(check):
        run_program(command, folder=tmp_path, timeout=600)
    assert not Path(f"/proc/{int(pid.read_text())}").exists()


def test_what_has_ended_is_not_interrupted() -> None:
    """Checks that a call that ends before its cancellation returns its result or raises its own error."""
    for _ in range(20):
        with cancelled_by(soon(60)):
            assert interruptible(sum, (1, 2)) == 3
    with pytest.raises(ZeroDivisionError), cancelled_by(soon(60)):
        interruptible(lambda: 1 / 0)


def test_a_swallowed_interrupt_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a function with a bare ``except:`` can't be cancelled. Such a function swallows the first interrupt."""
    monkeypatch.setattr(cancel, "AGAIN", 0.1)
    swallowed: list[BaseException] = []

    def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                silent_for_ever()
            except BaseException as error:
                swallowed.append(error)
        raise RuntimeError

    with cancelled_by(soon()), pytest.raises(GivenUp):
        interruptible(stubborn)
    assert [type(error) for error in swallowed] == [cancel.Interrupted] * 2


def test_the_outer_check_holds_inside_the_inner_one() -> None:
    """Fails if a nested cancellation check replaces the outer check, or stays active after its ``with`` block."""
    with cancelled_by(soon(-1)), pytest.raises(GivenUp), cancelled_by(soon(60)):
        check_cancelled()
    with pytest.raises(GivenUp), cancelled_by(soon(-1)):
        report("a report asks, too")
    report("nobody gives this up")
    check_cancelled()
