"""Proves that requests of different sizes share a batch if the config marks an input as ragged."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.runtimes.base import BaseSession
from tests.support import onnx_builder as build
from tests.support.serving import FLOAT, Start, assert_refused, client, tensor, until

RAGGED = """
max_batch_size: 16
input {{ name: "x" data_type: TYPE_FP32 dims: {dims} allow_ragged_batch: {ragged} }}
dynamic_batching {{ max_queue_delay_microseconds: 300000 }}
"""


def squares(folder: Path, *dims: str) -> None:
    """Writes a model that computes ``y = x * x``. ``dims`` are the dims after the batch."""
    folder.mkdir(parents=True)
    shape = ["batch", *dims]
    node = build.node("Mul", "x x", "y")
    build.artifact(folder / "model.onnx", [node], {"x": (FLOAT, shape)}, {"y": (FLOAT, shape)})


def hold_first_run(monkeypatch: pytest.MonkeyPatch, model: Any, rows: int, waiting: int) -> None:
    """Makes the next run of a session last until ``waiting`` requests are in the queue of ``model``. A run with more
    than ``rows`` rows isn't delayed, because its batch already contains several requests."""
    run = BaseSession.run
    held = threading.Lock()

    def held_run(self: BaseSession, feeds: Any) -> Any:
        if held.acquire(blocking=False) and len(feeds["x"]) <= rows:
            until(lambda: model.statistics().queue_depth == waiting)
        return run(self, feeds)

    monkeypatch.setattr(BaseSession, "run", held_run)


@pytest.mark.parametrize("ragged", [True, False])
def test_a_ragged_input(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, ragged: bool) -> None:
    """Checks that requests of different lengths run together if the config allows ragged batches. Without ragged
    batches, requests of different lengths must not run together, because padding could change the answers of a model
    without a mask. Also checks that each output is cut to the length of its input."""
    squares(tmp_path / "square" / "1", "length")
    config = RAGGED.format(dims="[-1]", ragged=str(ragged).lower())
    (tmp_path / "square" / "config.pbtxt").write_text(config)
    process = start(tmp_path)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1 + n % 2, n)).astype(np.float32) for n in range(1, 11)]
    answers: queue.Queue[Any] = queue.Queue()
    hold_first_run(monkeypatch, process.server.repository.get("square"), len(inputs[0]), len(inputs) - 1)
    with client(process.ports["grpc"]) as made:
        assert made.get_model_config("square").config.input[0].allow_ragged_batch is ragged
        made.start_stream(lambda result, error: answers.put((result, error)))
        for number, x in enumerate(inputs):
            made.async_stream_infer("square", [tensor("x", x, "FP32")], request_id=str(number))
        for _ in inputs:
            result, error = answers.get(timeout=60)
            assert error is None
            x = inputs[int(result.get_response().id)]
            np.testing.assert_array_equal(result.as_numpy("y"), x * x)
        made.stop_stream()
        [counted] = made.get_inference_statistics("square").model_stats
    assert counted.inference_count == sum(len(x) for x in inputs)
    assert (counted.execution_count < len(inputs)) is ragged
    lengths = process.server.repository.get("square").scheduling.lengths
    assert (lengths.dim if lengths else None) == ("length" if ragged else None)


def test_which_dim_is_ragged(tmp_path: Path, start: Start) -> None:
    """Checks that the server doesn't guess which of two dynamic dims is ragged, and that the error names the missing
    parameter. Also checks that the model is served after the parameter is added."""
    squares(tmp_path / "models" / "square" / "1", "height", "width")
    config = tmp_path / "models" / "square" / "config.pbtxt"
    config.write_text(RAGGED.format(dims="[-1, -1]", ragged="true"))
    assert_refused(tmp_path / "models", "'square': name the ragged dim in the parameter length_dim")
    config.write_text(config.read_text() + 'parameters { key: "length_dim" value { string_value: "width" } }')
    process = start(tmp_path / "models")
    assert process.server.repository.get("square").scheduling.lengths.dim == "width"
    x = np.full((1, 2, 3), 3, np.float32)
    with client(process.ports["grpc"]) as made:
        np.testing.assert_array_equal(made.infer("square", [tensor("x", x, "FP32")]).as_numpy("y"), x * x)
