"""Proves that runtimes use no more threads than a container's limit on CPU time allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from accel import machine
from accel.runtimes.base import BaseSession, open_session
from accel.runtimes.onnxruntime import OnnxRuntimeSession
from accel.sources.source import Source


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 0),
        ({"cpu.max": "max 100000\n"}, 0),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 0),
        ({"cpu.max": "nonsense"}, 0),
        ({"cpu.max": "100000 0"}, 0),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: Mapping[str, str], limit: int) -> None:
    """Checks that accel finds a CPU limit in control groups v1 and v2, and reports no limit if none is set."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cpu_limit() == limit
    assert machine.available_cores() == (limit or 8)


@pytest.mark.parametrize(
    ("limit", "options", "threads"), [("max", {}, 0), ("3", {}, 3), ("3", {"threads": 6}, 6), ("3", {"streams": 2}, 3)]
)
def test_a_session_takes_no_more_threads_than_the_container_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, options: dict[str, int], threads: int
) -> None:
    """Fails if a runtime starts one thread for each core although the container may use fewer cores. Also fails if a
    runtime ignores the number of threads that the caller passes."""
    (tmp_path / "cpu.max").write_text(f"{limit if limit == 'max' else int(limit) * 1000} 1000")
    value = helper.make_tensor_value_info
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [2])], [value("y", TensorProto.FLOAT, [2])])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    seen = []
    real = OnnxRuntimeSession.__init__

    def spy(self: BaseSession, artifact: object, options: object) -> None:
        seen.append(options)
        real(self, artifact, options)  # type: ignore[arg-type]

    monkeypatch.setattr(OnnxRuntimeSession, "__init__", spy)
    with open_session(Source(tmp_path / "m.onnx").open(), "onnxruntime", options) as session:
        assert session.run({"x": np.float32([-1, 1])})["y"].tolist() == [0, 1]
    assert [given.threads for given in seen] == [threads]
