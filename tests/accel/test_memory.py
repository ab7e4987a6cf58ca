"""Proves that accel finds the available memory, and that closed models return their memory to the system."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel import machine
from accel.child import run_in_child
from accel.optimizer.judge.comparison import Judge
from accel.proof.gates import OutputGate
from accel.runtimes.base import open_session
from accel.sources.onnx.file import open_onnx

# A forked process shares memory with others, so these tests measure new interpreters.
pytestmark = pytest.mark.usefixtures("fresh_interpreters")

WIDTH, LAYERS, SIZES = 768, 28, (1, 2)
SIZE = WIDTH * WIDTH * LAYERS * 4  # in bytes


def chain(path: Path, layers: int) -> Path:
    """Makes a chain of matrix products with weights of 2 MB each, similar to a transformer."""
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 28
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(layers)],
        "g",
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(f"v{layers}", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(weight, f"w{i}") for i in range(layers)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return path


def kept_after(paths: list[Path]) -> int:
    """Opens, runs and closes the models one after another. Returns the bytes by which this process grew after the first
    model was closed. The first model is small."""
    before = 0
    for path in paths:
        with open_session(open_onnx(path)) as session:
            for batch in SIZES:
                session.run(session.example_inputs(batch=batch))
        before = before or resident()
    return resident() - before


def resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


STATISTICS = "file 900\ninactive_file 100\n"


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    4 kB\n"}, 4096),
        ({"meminfo": "MemAvailable: 4 kB\n", "memory.max": "max\n", "memory.current": "7\n"}, 4096),
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": STATISTICS}, 400),
        ({"meminfo": "MemAvailable: 4 kB\n", "memory.max": "1000\n", "memory.current": "1200\n"}, 0),
        ({"meminfo": "MemAvailable: 4 kB\n", "memory.max": "nonsense", "memory.current": ""}, 4096),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "600\n",
                "memory/memory.stat": "total_inactive_file 50\n",
            },
            450,
        ),
    ],
)
def test_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], room: int | None
) -> None:
    """Checks that accel finds a container's memory limit in control groups v1 and v2. If the system states no usable
    numbers, accel must return None."""
    monkeypatch.setattr(machine, "_MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.available_memory() == room


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="the C library that keeps freed memory is glibc")
def test_closed_models_leave_no_memory_behind(tmp_path: Path) -> None:
    """Fails if a process that opened and closed several models keeps as much memory as one of the models needs. A
    search through many candidates once took several times the memory of the largest candidate."""
    small = chain(tmp_path / "small.onnx", 2)
    large = [chain(tmp_path / f"{index}.onnx", LAYERS + index) for index in range(2)]
    kept = run_in_child(f"{__name__}:kept_after", paths=[small, *large])
    assert kept < SIZE / 2, f"{kept / SIZE:.2f} of the model's size"


WIDE = 1 << 23


def wide(path: Path) -> Path:
    """Makes a model with one output number per sample and 32 MB of inner tensors per sample."""
    graph = helper.make_graph(
        [
            helper.make_node("Tile", ["x", "times"], ["t"]),
            helper.make_node("Exp", ["t"], ["e"]),
            helper.make_node("ReduceMean", ["e", "axes"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [numpy_helper.from_array(np.array([1, WIDE]), "times"), numpy_helper.from_array(np.array([1]), "axes")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return path


def kept_after_looking(path: Path, how: str) -> int:
    """Compares a model with itself and closes the sessions. Returns the bytes by which this process grew."""
    artifact = open_onnx(path)
    with open_session(artifact) as session:
        session.run(session.example_inputs(batch=1))
    before = resident()
    if how == "gate":
        OutputGate(limit=1e-4).check(artifact, artifact)
    else:
        judge = Judge(artifact, data=None, metric=None)  # the judge keeps the source model's outputs
        judge.judge(artifact, {"threads": 1})
    return resident() - before


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="reads what the Linux kernel counts")
@pytest.mark.parametrize("how", ["gate", "judge"])
def test_outputs_that_are_kept_hold_nothing_else(tmp_path: Path, how: str) -> None:
    """A gate or the judge keeps the outputs of a closed session for a comparison. Fails if the kept outputs also keep
    the session's other memory allocated."""
    kept = run_in_child(f"{__name__}:kept_after_looking", path=wide(tmp_path / "m.onnx"), how=how)
    assert kept < WIDE * 4, f"{kept >> 20} MiB"
