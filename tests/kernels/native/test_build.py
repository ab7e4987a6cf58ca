"""Proves, with a stand-in for nvcc, that interrupted, killed and parallel builds clean up after themselves.

These tests fail if Ctrl-C or SIGTERM leaves a scratch folder or a running compiler behind. The tests also fail if the
folder of a killed build is never removed, or if a build removes the folder of another running build.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from accel.cli.kernels import command
from accel.errors import UnsupportedHere
from accel.kernels.native import build
from accel.kernels.proof import check

pytest.importorskip("cutlass_library", reason="needs the extra [kernels]")

# The stand-in for nvcc writes the requested output and a scratch file. If $SLOW is set, the stand-in also runs ``sleep
# $SLOW`` and appends both process ids to $STARTED.
NVCC = """#!/bin/sh
case "$*" in *--version*) echo "a stand-in, 1.0"; exit 0;; esac
for word; do [ "$last" = -o ] && out=$word; last=$word; done
echo half > "$out"
echo aside > "$TMPDIR/aside.$$"
if [ -n "$SLOW" ]; then
  sleep "$SLOW" &
  echo "$$ $!" >> "$STARTED"
  wait
fi
"""
Start = Callable[[str], subprocess.Popen[str]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in for nvcc first on PATH and returns the cache folder of the libraries."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Returns a function that lists the process ids of the slow compilers. Kills the slow compilers after the test."""

    def found() -> list[int]:
        file = tmp_path / "started"
        return [int(word) for word in file.read_text().split()] if file.exists() else []

    yield found
    for pid in filter(alive, found()):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(cache: Path, started: Callable[[], list[int]]) -> Iterator[Start]:
    """Returns ``start("sm_90a")``, which starts `accel kernels build` in a separate process and waits until two slow
    compilers are running."""
    running: list[subprocess.Popen[str]] = []

    def begun(arch: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "accel", "kernels", "build", "--arch", arch, "--jobs", "2"]
        environment = {**os.environ, "SLOW": "300", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        running.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # A shell makes background jobs ignore SIGINT, and the child processes of a background test suite
                # inherit this setting.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        until(lambda: len(started()) == 4 or running[-1].poll() is not None)
        return running[-1]

    yield begun
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(
    how: signal.Signals, start: Start, started: Callable[[], list[int]], cache: Path
) -> None:
    process = start("sm_90a")
    assert [path.name[0] for path in cache.iterdir()] == ["."]
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted" in said
    assert list(cache.iterdir()) == []
    assert [pid for pid in started() if alive(pid)] == []


def test_the_next_build_clears_up_after_a_killed_one(start: Start, cache: Path) -> None:
    process = start("sm_90a")
    process.kill()
    process.communicate(timeout=60)
    (left,) = cache.iterdir()
    made = build.build(["sm_80"], units=())
    assert list(cache.iterdir()) == [made.path.parent]
    assert not left.exists()
    assert sorted(path.name for path in made.path.parent.iterdir()) == [build.LIBRARY, build.RECORD]
    assert build.build(["sm_80"], units=()).cached


def test_check_builds_where_dispatch_does_not_look(cache: Path) -> None:
    """Fails if dispatch loads the library that `accel kernels check` compiles, because this library has no GEMM."""
    mine = build.build(["sm_90a"], units=["sm90_fp16"])
    proof = check._hand_written(lambda _message, _fraction: None)
    assert proof.passed is False, "what the stand-in writes is no library"
    assert list(cache.glob(f"check/*/{build.LIBRARY}"))
    assert build.find_library() == mine.path
    assert build.units_in(mine.path, (9, 0)) == {"sm90_fp16"}
    assert build.units_in(mine.path, (8, 0)) == set()


def test_other_headers_are_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the build uses the cached library after an upgrade of the CUTLASS headers."""
    (tmp_path / "cutlass").mkdir()
    version = tmp_path / "cutlass" / "version.h"
    monkeypatch.setattr(build, "cutlass_includes", lambda: [tmp_path])
    paths = []
    for number in ("4.2", "4.3", "4.2"):
        version.write_text(number)
        paths.append(build.build(["sm_90a"], units=["sm90_fp16"]).path)
    assert paths[0] == paths[2] != paths[1]
    assert cache in paths[1].parents


@pytest.mark.parametrize("option", ["--onnxruntime-include", "--tensorrt-include"])
def test_missing_headers_are_said_before_anything_is_compiled(option: str, cache: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, ["build", "--arch", "sm_90a", option, str(tmp_path / "nowhere")])
    assert isinstance(ran.exception, UnsupportedHere)
    assert "nowhere has no" in str(ran.exception)
    assert not cache.exists()


def test_a_build_at_work_keeps_its_folder(start: Start, cache: Path) -> None:
    process = start("sm_90a")
    (scratch,) = cache.iterdir()
    build.build(["sm_80"], units=())
    assert list(scratch.glob("*.o"))
    assert process.poll() is None
