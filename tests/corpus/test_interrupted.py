"""A disk that is full in each stage, and a process that is killed in each stage: one line, nothing lost, and the same
command goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hostile_files import small
from onnx import numpy_helper
from orphans import assert_no_children

Cli = Callable[..., Any]

SIDE = 256  # a weight of 256 KiB: more than the disk has left below, whatever its precision
LIMIT = 48 << 10
FACTORY = f"""
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, {SIDE}), torch.nn.Linear({SIDE}, {SIDE}), torch.nn.Linear({SIDE}, 4))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a net as code and data for it, and a cache of its own."""
    (tmp_path / "net.py").write_text(FACTORY)
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def published(here: Path) -> dict[str, bytes]:
    """What the user has: everything but the cache."""
    files = (p for p in here.rglob("*") if p.is_file() and not {"cache", "__pycache__"} & set(p.parts))
    return {str(p.relative_to(here)): p.read_bytes() for p in files}


def entries_of(cache: Path, stage: str) -> list[Path]:
    """What the cache holds of a stage."""
    found = []
    for sidecar in (cache / "stages").glob("*/*.manifest.json"):
        stages = json.loads(sidecar.read_text())["stages"]
        if stages and stages[-1]["name"] == stage:
            found.append(sidecar.parent)
    return found


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond this, as none can on a full disk, here and in child processes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


EXPORT = ("export", "net.py:make", "--input", "x:float32[batch,4]", "-o", "m.onnx")
OPTIMIZE = ("optimize", "m.onnx", "--data", "data.npz", "--rounds", "5", "-o", "out")
COMMANDS = {
    "onnx_from_torch": EXPORT,
    "simplify": EXPORT,
    "quantize": (*OPTIMIZE, "--target", "openvino", "--precision", "int8"),
    "openvino_from_onnx": (*OPTIMIZE, "--target", "openvino", "--precision", "int8"),
    "cast": (*OPTIMIZE, "--target", "tensorrt-rtx", "--precision", "fp16"),
    "engine_from_onnx": (*OPTIMIZE, "--target", "tensorrt-rtx", "--precision", "fp16"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that the runs with a full disk share."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("stage", COMMANDS)
def test_a_full_disk(cli: Cli, here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Fails if a stage that can't write gives a traceback or a success, leaves half a file under a final name or in the
    cache, takes away what an earlier run had published, or if the same command doesn't work once there is room."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(cache))
    words = COMMANDS[stage]
    for whole in dict.fromkeys((EXPORT, words)):
        ran = cli(*whole, "-q")
        assert ran.code == 0, ran.stderr
    gone = entries_of(cache, stage)
    assert gone
    for entry in gone:
        shutil.rmtree(entry)
    before = published(here)
    with full_disk():
        ran = cli(*words, "-q")
    assert ran.code == 1, ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert re.search(r"(no space left|can't write).*; (free some|choose another)", ran.stderr), ran.stderr
    assert published(here) == before
    assert entries_of(cache, stage) == []
    assert list((cache / "scratch").iterdir()) == []
    ran = cli(*words, "-q")
    assert ran.code == 0, ran.stderr


KILLED_IN = ("onnx_from_torch", "simplify", "quantize", "openvino_from_onnx", "judging", "bench: round")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_in_each_stage_and_resumed(cli: Cli, here: Path) -> None:
    """Fails if SIGKILL in a stage leaves a process or half a result, takes away what was published before, if the next
    run begins again at the start, or if what is left in the cache is not cleared away."""
    onnx.save(small(weights=[numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")]), here / "old.onnx")
    how = ("--target", "openvino", "--rounds", "5", "-o", "out")
    earlier = cli("optimize", "old.onnx", *how, "--precision", "fp32", "-q")
    assert earlier.code == 0, earlier.stderr
    before = published(here)
    words = ("optimize", "net.py:make", "--input", "x:float32[batch,4]", "--data", "data.npz", *how)
    words = (*words, "--precision", "int8")
    seen: list[str] = []
    for stage in KILLED_IN:
        seen = killed_in(here, words, stage)
        assert published(here) == before, stage
    # What was whole before the last kill was not done again.
    for stage in ("onnx_from_torch", "simplify", "quantize"):
        assert any(f"{stage}: cached" in line for line in seen), (stage, seen)
    ran = cli(*words, "-q")
    assert ran.code == 0, ran.stderr
    assert list((here / "cache" / "scratch").iterdir()) == []
    assert cli("inspect", "out", "--check", "-q").code == 0
    assert published(here) != before


def killed_in(here: Path, words: tuple[str, ...], stage: str) -> list[str]:
    """Run until a line names ``stage``, then kill; the lines that were seen. Nothing of it is left running."""
    command = [sys.executable, "-m", "accel", *words]
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if stage in line and "cached" not in line:
            break
    else:
        raise AssertionError(f"{stage} was never reached: {seen}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert_no_children(process.pid, f"killed in {stage}")
    return seen
