"""Proves that the CPU kernels stay within their buffers, and that they are built once for each state of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from accel.api.doctor import doctor
from accel.cli.kernels import command
from accel.errors import BuildFailed, UnsupportedHere
from accel.kernels.native.cpu import build
from accel.kernels.native.cpu.library import CpuLibrary

SCRIPT = Path(__file__).with_name("sanitized_products.py")


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_products_under_sanitizers(tmp_path: Path) -> None:
    """Fails if a kernel reads or writes outside a buffer, or overflows an integer: the sanitizers then end the
    process."""
    made = build.build_for_cpu(sanitize="address,undefined", cache=tmp_path)
    assert build.find_cpu_library(tmp_path) is None, "a library for tests is never used"
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, made.path], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "150 products\n", done.stderr[-2000:]


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_command_builds_once_and_doctor_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a second build compiles again, changed sources use an old library, or doctor tells something else."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor()["kernels"][0]["build"] == "accel kernels build --cpu"
    for cached in ("false", "true"):
        result = CliRunner().invoke(command, ["build", "--cpu", "--json", "-q"])
        assert result.exit_code == 0, result.output
        assert f'"cached": {cached}' in result.output
    assert doctor()["kernels"][0]["build"] is None
    changed = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, changed)
    (changed / "pool.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(build, "SOURCES", changed)
    assert build.find_cpu_library() is None
    with pytest.raises(BuildFailed, match=r"g\+\+ failed: .*error"):
        build.build_for_cpu()


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a machine without g++ gets a traceback, or doctor gives it a command that can't work."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    with pytest.raises(UnsupportedHere, match=r"g\+\+ is not installed here; install it"):
        build.build_for_cpu()
    assert all(row["build"].startswith("install g++, then run accel kernels build") for row in doctor()["kernels"])


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    """Fails if a truncated or foreign library is loaded."""
    file = tmp_path / build.LIBRARY
    for content in (b"", b"no library", Path(sys.executable).resolve().read_bytes()[:20000]):
        file.write_bytes(content)
        with pytest.raises(BuildFailed, match="run accel kernels build --cpu again"):
            CpuLibrary(file)
