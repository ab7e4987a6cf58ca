"""Measures how much time the executor adds to `session.run`, with one caller at a time.

Usage:

    python benchmarks/serve_executor.py            # writes benchmarks/results/serve_executor.json.

Measures two sessions. One session runs the MLP of the load benchmark (1024-512-512-10, float32, one row) in ONNX
Runtime with one thread. The other session does nothing, to show the executor's own time. Each turn times a block of
`session.run` calls and a block of `infer(executor, ...)` calls in random order. The result is the median difference per
request over all turns. Needs a quiet machine.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from onnx import TensorProto, helper

from accel.runtimes.base import SessionOptions, get_runtime
from accel.serve.protocol.inference import InferenceRequest, infer
from accel.serve.scheduling.executor import make_executor
from accel.serve.scheduling.options import Scheduling
from accel.signature import Feeds, Signature, TensorSpec
from accel.sources.onnx.file import open_onnx
from accel.timing.environment import environment

RESULT = Path(__file__).parent / "results" / "serve_executor.json"
TURNS, BLOCK = 60, 200
WIDTHS = (1024, 512, 512, 10)


class Nothing:
    """A session that returns a fixed output without any work."""

    signature = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 4)),))
    _answer = {"y": np.zeros((1, 4), np.float32)}  # noqa: RUF012 - never changed

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:  # noqa: ARG002
        return self._answer

    def example_inputs(self, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        return self.signature.example_inputs(seed=seed, **sizes)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def mlp(path: Path) -> Path:
    """Writes the MLP as an ONNX file and returns its path."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for i, (wide, narrow) in enumerate(itertools.pairwise(WIDTHS)):
        matrix = rng.standard_normal((wide, narrow)).astype(np.float32) / wide**0.5
        weights.append(onnx.numpy_helper.from_array(matrix, f"w{i}"))
        last = i == len(WIDTHS) - 2
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], ["y" if last else f"h{i}"]))
        value = f"h{i}"
        if not last:
            nodes.append(helper.make_node("Relu", [value], [f"r{i}"]))
            value = f"r{i}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTHS[0]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTHS[-1]])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def per_call(call: Callable[[], object]) -> float:
    """Returns the mean time of a call in microseconds."""
    start = time.perf_counter()
    for _ in range(BLOCK):
        call()
    return (time.perf_counter() - start) / BLOCK * 1e6


def measure(open_session: Callable[[], Any], scheduling: Scheduling) -> dict[str, float]:
    session = open_session()
    feeds = session.example_inputs()
    executor = make_executor(session.signature, scheduling, lambda: session, name="m", version="1")
    ways = {
        "run": lambda: session.run(feeds),
        "infer": lambda: infer(executor, InferenceRequest(model="m", inputs=feeds)),
    }
    for call in ways.values():
        per_call(call)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way in random.sample(list(ways), len(ways)):
            found[way].append(per_call(ways[way]))
    over = sorted(b - a for a, b in zip(found["run"], found["infer"], strict=True))
    executor.close(1.0)
    return {
        "session_run_us": round(statistics.median(found["run"]), 2),
        "infer_us": round(statistics.median(found["infer"]), 2),
        "overhead_us": round(statistics.median(over), 2),
        "overhead_us_p10": round(over[len(over) // 10], 2),
        "overhead_us_p90": round(over[len(over) * 9 // 10], 2),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        artifact = open_onnx(mlp(Path(name) / "mlp.onnx"))
        sessions: dict[str, Callable[[], Any]] = {
            "nothing": Nothing,
            "mlp": lambda: get_runtime("onnxruntime").open(artifact, SessionOptions(threads=1)),
        }
        schedulings = {
            "plain": Scheduling(max_batch_size=32),
            "dynamic": Scheduling(max_batch_size=32, dynamic=True, max_delay_us=2000),
            "cached": Scheduling(max_batch_size=32, response_cache=True),
        }
        rows = {
            f"{model}, {kind}": measure(sessions[model], scheduling)
            for model in sessions
            for kind, scheduling in schedulings.items()
        }
    body = {"environment": environment(threads=1), "rows": rows}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")
    for label, row in rows.items():
        print(f"{label:18} session.run {row['session_run_us']:8.1f} us   overhead {row['overhead_us']:6.1f} us")


if __name__ == "__main__":
    main()
