"""Proves that clients can run sequences over gRPC on a real stateful model with a ``config.pbtxt``."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from tests.support.onnx_builder import artifact, node
from tests.support.serving import FLOAT, INT64, Start, assert_refused

BOOL, INT32, STRING = TensorProto.BOOL, TensorProto.INT32, TensorProto.STRING

# The model computes total = state + x * ready. The other outputs return the control inputs and the correlation id.
CONFIG = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output [ { name: "total" data_type: TYPE_FP32 dims: [2] },
         { name: "flags" data_type: TYPE_FP32 dims: [1] },
         { name: "who" data_type: TYPE_INT64 dims: [1] } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } ] },
    { name: "ready" control [ { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } ] },
    { name: "end" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [3, 7] } ] },
    { name: "id" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } ] } ]
  state [ { input_name: "state" output_name: "new_state" data_type: TYPE_FP32 dims: [2]
            initial_state: { name: "begin" data_type: TYPE_FP32 dims: [2] data_file: "begin" } } ]
  oldest { max_candidate_sequences: 2 max_queue_delay_microseconds: 100 }
}
"""


def accumulator(folder: Path) -> None:
    """Writes a model that computes ``total = new_state = state + x * ready``, ``flags = 100 * start + end`` and ``who =
    id``."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    row = ["batch", 1]
    artifact(
        folder / "1" / "model.onnx",
        [
            node("Cast", "ready", "r", to=FLOAT),
            node("Mul", "x r", "counted"),
            node("Add", "state counted", "total"),
            node("Identity", "total", "new_state"),
            node("Mul", "start hundred", "s"),
            node("Cast", "end", "e", to=FLOAT),
            node("Add", "s e", "flags"),
            node("Identity", "id", "who"),
        ],
        {
            "x": (FLOAT, ["batch", 2]),
            "state": (FLOAT, ["batch", 2]),
            "start": (FLOAT, row),
            "ready": (BOOL, row),
            "end": (INT32, row),
            "id": (INT64, row),
        },
        {
            "total": (FLOAT, ["batch", 2]),
            "new_state": (FLOAT, ["batch", 2]),
            "flags": (FLOAT, row),
            "who": (INT64, row),
        },
        {"hundred": np.float32(100)},
    )


def configure(folder: Path, config: str = CONFIG, begin: Any = (10.0, 20.0)) -> None:
    accumulator(folder)
    (folder / "initial_state").mkdir(exist_ok=True)
    (folder / "initial_state" / "begin").write_bytes(np.asarray(begin, np.float32).tobytes())
    (folder / "config.pbtxt").write_text(config)


def step(client: Any, sequence: int, value: float, flags: str = "", name: str = "sums") -> tuple[list[float], float]:
    """Sends a request whose ``flags`` contain s for start and e for end. Returns the totals and the control inputs of
    the model."""
    given = triton.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.full((1, 2), value, np.float32))
    found = client.infer(
        name, [given], sequence_id=sequence, sequence_start="s" in flags, sequence_end="e" in flags, client_timeout=60
    )
    assert found.as_numpy("who").tolist() == [[sequence]]
    assert found.as_numpy("new_state") is None
    return found.as_numpy("total")[0].tolist(), float(found.as_numpy("flags")[0, 0])


def test_sequences(tmp_path: Path, start: Start) -> None:
    """Checks that each sequence's state begins with the values of the initial-state file, isn't lost, and stays within
    its sequence. Also checks that each control input has the value that the config requires."""
    configure(tmp_path / "models" / "sums")
    process = start(tmp_path / "models")
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        inputs = [tensor.name for tensor in client.get_model_metadata("sums").inputs]
        assert inputs == ["x"], "clients don't send the inputs that the server makes"
        assert step(client, 5, 1, "s") == ([11, 21], 103)
        assert step(client, 6, 100, "s") == ([110, 120], 103)
        assert step(client, 5, 2) == ([13, 23], 3)
        assert step(client, 6, 100, "e") == ([210, 220], 7)
        assert step(client, 5, 4, "e") == ([17, 27], 7)
        assert step(client, 5, 1, "se") == ([11, 21], 107)
        for sequence, flags, code, said in (
            (0, "s", "INVALID_ARGUMENT", "correlation ID"),
            (5, "", "INVALID_ARGUMENT", "must specify the START flag"),
        ):
            with pytest.raises(InferenceServerException, match=said) as caught:
                step(client, sequence, 1, flags)
            assert caught.value.status() == f"StatusCode.{code}"
        statistics = client.get_inference_statistics("sums").model_stats[0].inference_stats
        assert (statistics.success.count, statistics.fail.count) == (6, 2)


def test_no_more_sequences_than_the_config_says(tmp_path: Path, start: Start) -> None:
    """Fails if ``max_candidate_sequences`` is ignored, or if an ended sequence still counts."""
    configure(tmp_path / "models" / "sums")
    process = start(tmp_path / "models")
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        step(client, 1, 1, "s")
        step(client, 2, 1, "s")
        with pytest.raises(InferenceServerException, match="has 2 sequences, which is the maximum") as caught:
            step(client, 3, 1, "s")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        step(client, 2, 1, "e")
        step(client, 3, 1, "s")


def test_a_stream_of_two_sequences(tmp_path: Path, start: Start) -> None:
    """Fails if the steps of two sequences run out of order or are mixed up. The client doesn't wait for answers."""
    configure(tmp_path / "models" / "sums", CONFIG.replace("oldest { max_candidate_sequences: 2", "direct {"))
    process = start(tmp_path / "models")
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(10):
            for sequence in (1, 2):
                given = triton.InferInput("x", [1, 2], "FP32")
                given.set_data_from_numpy(np.full((1, 2), sequence, np.float32))
                client.async_stream_infer(
                    "sums", [given], sequence_id=sequence, sequence_start=number == 0, sequence_end=number == 9
                )
        totals: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(20):
            result, error = answers.get(timeout=60)
            assert error is None
            totals[int(result.as_numpy("who")[0, 0])].append(float(result.as_numpy("total")[0, 0]))
        client.stop_stream()
    assert totals == {s: [10.0 + s * (n + 1) for n in range(10)] for s in (1, 2)}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("fp32_false_true", "int32_false_true", "START uses int32_false_true, but the input 'start' has dtype float32"),
        ("[3, 7]", "[3]", "in one of: int32_false_true, fp32_false_true, bool_false_true"),
        (
            "CORRID data_type: TYPE_INT64",
            "CORRID data_type: TYPE_STRING",
            "'id' has dtype BYTES in the config and int64",
        ),
        ('name: "ready"', 'name: "nothing"', "no control input 'nothing'; choose from: x, state"),
        ("CONTROL_SEQUENCE_READY bool_false_true", "CONTROL_SEQUENCE_START bool_false_true", "START or its input"),
        ('output_name: "new_state"', 'output_name: "old"', "no state output 'old'; choose from: total"),
        (
            "data_type: TYPE_FP32 dims: [2]\n            initial",
            "data_type: TYPE_INT32 dims: [2]\n  initial",
            "has dtype INT32 in the config",
        ),
        (
            "TYPE_FP32 dims: [2]\n            initial",
            "TYPE_FP32 dims: [3]\n  initial",
            r"has dims \[3\] in the config and \[2\] in the model",
        ),
        ('dims: [2] data_file: "begin"', 'dims: [3] data_file: "begin"', r"has dims \[3\], but the model takes"),
        ('data_file: "begin"', 'data_file: "none"', "can't read the file initial_state/none"),
        ('data_file: "begin"', 'data_file: "../config.pbtxt"', "plain file name"),
        ("max_candidate_sequences: 2", "max_candidate_sequences: -2", "max_candidate_sequences is -2"),
        ("oldest { max_candidate_sequences: 2", "direct { minimum_slot_utilization: 0.5", "minimum_slot_utilization"),
        ("sequence_batching {", "sequence_batching { iterative_sequence: true", "iterative_sequence is not supported"),
        ("max_candidate_sequences: 2", "preferred_batch_size: [5]", "preferred_batch_size has to be from 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, before: str, after: str, said: str) -> None:
    """Fails if a setting that contradicts the model, or an unsupported setting, is silently accepted."""
    assert before in CONFIG
    configure(tmp_path / "sums", CONFIG.replace(before, after))
    assert_refused(tmp_path, said)


def test_a_state_of_another_size(tmp_path: Path) -> None:
    """Fails if a file of the wrong size is loaded as the initial state."""
    configure(tmp_path / "sums", begin=(1.0, 2.0, 3.0))
    assert_refused(tmp_path, "initial_state/begin doesn't fit the state 'state': .*Expected 8, got 12")
