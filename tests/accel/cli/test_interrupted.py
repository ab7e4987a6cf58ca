"""Proves that a full disk or SIGKILL in any stage destroys no finished work, and that the same command then
continues."""

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from accel.sources.tensorflow import process as tensorflow_process
from accel.tables.stage_table import STAGES
from tests.accel.cli.hostile_files import small
from tests.support.orphans import assert_no_children
from tests.support.small_decoder import adapter_of, save_adapter, small_decoder

Cli = Callable[..., Any]

SIDE = 256  # a layer's weight takes 256 KiB in float32, and even int8 weights take more than LIMIT
LIMIT = 48 << 10
FACTORY = f"""
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, {SIDE}), torch.nn.Linear({SIDE}, {SIDE}), torch.nn.Linear({SIDE}, 4))

def twice(parts, x):
    return parts.net(parts.net(x))

def pipeline():
    import accel
    return accel.Pipeline(twice, net=make()), (torch.ones(2, 4),)

def decoder():
    from tests.support.small_decoder import small_decoder
    return small_decoder(hidden_size=64)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with a net as code, data for the net, an adapter of the decoder, and an empty cache."""
    (tmp_path / "net.py").write_text(FACTORY)
    save_adapter(tmp_path / "lora", adapter_of(small_decoder(hidden_size=64), ("q_proj",)))
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def published(here: Path) -> dict[str, bytes]:
    """Returns all of the user's files, without the cache."""
    files = (p for p in here.rglob("*") if p.is_file() and not {"cache", "__pycache__"} & set(p.parts))
    return {str(p.relative_to(here)): p.read_bytes() for p in files}


def entries_of(cache: Path, stage: str) -> list[Path]:
    """Returns the cache entries of a stage."""
    found = []
    for sidecar in (cache / "stages").glob("*/*.manifest.json"):
        stages = json.loads(sidecar.read_text())["stages"]
        if stages and stages[-1]["name"] == stage:
            found.append(sidecar.parent)
    return found


@contextmanager
def full_disk() -> Iterator[None]:
    """Simulates a full disk by limiting the size of every file that this process and its child processes write."""
    processes = [os.getpid()]
    if tensorflow_process._process is not None:  # a child process that already runs doesn't inherit the limit
        processes.append(tensorflow_process._process.pid)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # By default, Python ignores SIGXFSZ. If another test has loaded LLVM into this process, SIGXFSZ ends the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for pid in processes:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


EXPORT = ("export", "net.py:make", "--input", "x:float32[batch,4]", "-o", "m.onnx")
OPTIMIZE = ("optimize", "m.onnx", "--data", "data.npz", "--rounds", "5", "-o", "out")
INT8 = (*OPTIMIZE, "--target", "openvino", "--precision", "int8")
ENGINE = (*OPTIMIZE, "--target", "tensorrt-rtx", "--precision", "fp16")
SAVED_MODEL = ("export", "m.onnx", "--to", "saved_model", "-o", "saved")
TFLITE = ("export", "m.onnx", "--to", "tflite", "-o", "lite")
INCLUDE = os.environ.get("ACCEL_ONNXRUNTIME_INCLUDE", "")
PACKED = ("optimize", "dec", "--target", "ort-cpu", "--precision", "int4", "--quantize", "smallest=1", "--rounds", "5")
DECODER = ("export", "net.py:decoder", "--decoder")
# Maps each stage to a list of commands. The last command runs the stage.
COMMANDS = {
    "onnx_from_torch": (EXPORT,),
    "onnx_from_tensorflow": (EXPORT, SAVED_MODEL, ("export", "saved", "-o", "back.onnx")),
    "onnx_from_tflite": (EXPORT, TFLITE, ("export", "lite/model.tflite", "-o", "back.onnx")),
    "onnx_from_onnx": (EXPORT, ("export", "m.onnx", "--opset", "19", "-o", "m19.onnx")),
    "preprocess": (EXPORT, ("export", "m.onnx", "--postprocess", "softmax", "-o", "probabilities.onnx")),
    "simplify": (EXPORT,),
    "cast": (EXPORT, ENGINE),
    "quantize": (EXPORT, INT8),
    "fuse_kernels": (EXPORT, (*OPTIMIZE, "--target", "ort-cpu", "--precision", "fp32", "--kernels")),
    "fuse_decoder": (
        (*DECODER, "-o", "dec"),
        ("optimize", "dec", "--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "-o", "out"),
    ),
    "pack_weights": (
        (*DECODER, "-o", "dec"),
        ("kernels", "build", "--onnxruntime-include", INCLUDE),
        (*PACKED, "-o", "out"),
    ),
    "lower_cache": (
        (*DECODER, "-o", "dec"),
        ("optimize", "dec", "--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "-o", "out"),
    ),
    "stateful_from_onnx": ((*DECODER, "--to", "openvino", "-o", "dec-ov"),),
    "adapter_inputs": ((*DECODER, "--adapters", "lora", "--adapters-as", "inputs", "-o", "dec-lora"),),
    "fit_tensorrt": (EXPORT, ("preflight", "m.onnx", "--fix", "-o", "fixed.onnx")),
    "engine_from_onnx": (EXPORT, ENGINE),
    "openvino_from_onnx": (EXPORT, INT8),
    "ncnn_from_onnx": (EXPORT, ("export", "m.onnx", "--to", "ncnn", "-o", "net")),
    "torch_from_onnx": (EXPORT, ("export", "m.onnx", "--to", "torch", "-o", "again")),
    "pipeline_from_parts": (("export", "net.py:pipeline", "-o", "parts"),),
    "saved_model_from_onnx": (EXPORT, SAVED_MODEL),
    "tflite_from_saved_model": (EXPORT, TFLITE),
}
# TensorFlow takes ten seconds to start, and each test of a TensorFlow stage starts TensorFlow several times.
OF_TENSORFLOW = ("onnx_from_tensorflow", "onnx_from_tflite", "saved_model_from_onnx", "tflite_from_saved_model")


def test_no_stage_is_forgotten() -> None:
    """Checks that every stage is tested on a full disk. Also checks that a test kills every stage that is not in
    ``NOT_KILLED_IN``."""
    stages = {stage.name for stage in STAGES}
    assert set(COMMANDS) == stages
    assert set(KILLED_IN) & stages | set(NOT_KILLED_IN) == stages
    assert not set(KILLED_IN) & set(NOT_KILLED_IN)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one cache for all tests that simulate a full disk."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.proof
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.proof) if stage in OF_TENSORFLOW else stage for stage in COMMANDS]
)
def test_a_full_disk(cli: Cli, here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Checks that a stage that can't write gives exit code 1 and no traceback. The stage must leave no half-written
    file under a final name or in the cache, and must not remove files of an earlier run. The same command must work
    once the disk has room again."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(cache))
    if stage == "pack_weights" and (not INCLUDE or shutil.which("g++") is None):
        pytest.skip("needs g++ and ONNX Runtime's headers in $ACCEL_ONNXRUNTIME_INCLUDE")
    words = COMMANDS[stage][-1]
    for whole in COMMANDS[stage]:
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


FROM_CODE = ("optimize", "net.py:make", "--input", "x:float32[batch,4]", "--data", "data.npz", "--rounds", "5")
# Maps each target to a command and two lists. The first list holds the stages and phases in which the test kills the
# command. The second list holds the stages that are complete before the last kill.
KILLS = {
    "openvino": (
        (*FROM_CODE, "--target", "openvino", "--precision", "int8", "-o", "out"),
        ("onnx_from_torch", "simplify", "quantize", "openvino_from_onnx", "judging", "bench: round"),
        ("onnx_from_torch", "simplify", "quantize"),
    ),
    "tensorrt-rtx": (
        (*FROM_CODE, "--target", "tensorrt-rtx", "--precision", "fp16", "-o", "out"),
        ("cast", "engine_from_onnx"),
        ("onnx_from_torch", "simplify"),
    ),
}
# No command in ``KILLS`` runs the stages in ``KILLED_ALONE``. A test runs the last command in ``COMMANDS`` for each
# stage, and kills the command while the stage runs.
KILLED_ALONE = ("onnx_from_onnx", "fuse_kernels")
KILLED_IN = [*KILLED_ALONE, *(stage for _, stages, _ in KILLS.values() for stage in stages)]
_HERE = "it works in the command's own process, as cast does: nothing of it can live on, and it is over in no time"
_TENSORFLOW = "its child is an accel.child, as that of quantize, and TensorFlow takes ten seconds to start"
NOT_KILLED_IN = {
    "preprocess": _HERE,
    "fit_tensorrt": _HERE,
    "pipeline_from_parts": _HERE,
    "torch_from_onnx": _HERE,
    "fuse_decoder": _HERE,
    "lower_cache": _HERE,
    "pack_weights": _HERE,
    "adapter_inputs": _HERE,
    "stateful_from_onnx": "its child is that of openvino_from_onnx",
    **dict.fromkeys(OF_TENSORFLOW, _TENSORFLOW),
    "ncnn_from_onnx": "pnnx is over in no time: tests/converters/to_others/test_export_to.py kills one that isn't",
}


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", KILLS)
def test_killed_in_each_stage_and_resumed(cli: Cli, here: Path, target: str) -> None:
    """Checks that SIGKILL in a stage leaves no process, no half-written result and no garbage in the cache. Published
    files must stay, and the next run must reuse the stages that were complete."""
    onnx.save(small(weights=[numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")]), here / "old.onnx")
    earlier = cli("optimize", "old.onnx", "--target", target, "--rounds", "5", "-o", "out", "--precision", "fp32", "-q")
    assert earlier.code == 0, earlier.stderr
    before = published(here)
    words, stages, whole = KILLS[target]
    seen: list[str] = []
    for stage in stages:
        seen = killed_in(here, words, stage)
        assert published(here) == before, stage
    # The last run didn't repeat the stages that were complete before the last kill.
    for stage in whole:
        assert any(f"{stage}: cached" in line for line in seen), (stage, seen)
    ran = cli(*words, "-q")
    assert ran.code == 0, ran.stderr
    assert list((here / "cache" / "scratch").iterdir()) == []
    assert cli("inspect", "out", "--check", "-q").code == 0
    assert published(here) != before


@pytest.mark.slow
@pytest.mark.parametrize("stage", KILLED_ALONE)
def test_killed_in_a_stage_of_one_command(cli: Cli, here: Path, stage: str) -> None:
    """Checks that a command that gets SIGKILL in ``stage`` leaves no process and no half-written file. The same command
    must work afterwards."""
    onnx.save(small(weights=[numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")]), here / "m.onnx")
    before = published(here)
    words = COMMANDS[stage][-1]
    killed_in(here, words, stage)
    assert published(here) == before
    ran = cli(*words, "-q")
    assert ran.code == 0, ran.stderr
    assert entries_of(here / "cache", stage)
    assert list((here / "cache" / "scratch").iterdir()) == []


def killed_in(here: Path, words: tuple[str, ...], stage: str) -> list[str]:
    """Runs the command until an output line names ``stage``, and then kills the command. Returns the output lines, and
    asserts that no process of the command is left."""
    command = [sys.executable, "-m", "accel", *words]
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        begins = line.startswith(f"accel: {stage}") if stage in COMMANDS else stage in line
        if begins and "cached" not in line:
            break
    else:
        raise AssertionError(f"{stage} was never reached: {seen}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert_no_children(process.pid, f"killed in {stage}")
    return seen
