"""Proves that the server takes models whose inputs have dims that are sums of other dims, such as past+sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from accel.serve.generate.token_loop import TokenLoop, TokenLoopSession
from accel.serve.models.model import ServedModel
from accel.serve.protocol.inference import InferenceRequest
from accel.serve.scheduling.options import Scheduling, SequenceBatching
from accel.serve.scheduling.sequence_state import ServerInputs
from accel.signature import DimRange, Feeds, Signature, TensorSpec
from tests.support import onnx_builder as build
from tests.support.fake_sessions import FakeSession
from tests.support.serving import FLOAT, Start, tensor


def _joining(folder: Path, *, first: str) -> None:
    """Writes a model that gives ``joined``, the inputs ``past`` and ``new`` one after the other, times ``weights``. The
    first dim of all tensors is ``first``."""
    folder.mkdir(parents=True)
    build.artifact(
        folder / "model.onnx",
        [build.node("Concat", "past new", "both", axis=1), build.node("Mul", "both weights", "joined")],
        {
            "past": (FLOAT, [first, "before"]),
            "new": (FLOAT, [first, "length"]),
            "weights": (FLOAT, [first, "before+length"]),
        },
        {"joined": (FLOAT, [first, "before+length"])},
    )


@pytest.mark.parametrize("config", ["", "max_batch_size: 0", "max_batch_size: 4 dynamic_batching { }"])
@pytest.mark.parametrize("first", ["batch", "rows"])
def test_a_model_with_a_sum_answers(tmp_path: Path, start: Start, config: str, first: str) -> None:
    """Fails if a model with a sum isn't loaded, if an answer is wrong, or if a size that is not the sum reaches the
    model."""
    _joining(tmp_path / "join" / "1", first=first)
    (tmp_path / "join" / "config.pbtxt").write_text(config)
    process = start(tmp_path)
    past, new = np.full((2, 3), 2, np.float32), np.full((2, 1), 5, np.float32)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:

        def ask(count: int) -> Any:
            weights = np.tile(np.arange(count, dtype=np.float32), (2, 1))
            given = [("past", past), ("new", new), ("weights", weights)]
            return client.infer("join", [tensor(name, value, "FP32") for name, value in given]).as_numpy("joined")

        assert ask(4).tolist() == [[0, 2, 4, 15]] * 2
        with pytest.raises(InferenceServerException, match=r"'before\+length' of input 'weights' has size 5, .* be 4"):
            ask(5)


def test_a_sum_in_the_first_dim_is_no_batch(opened: Any, tmp_path: Path) -> None:
    """Fails if the server takes a sum of dims for the batch, which has no range of its own."""
    folder = tmp_path / "same" / "1"
    folder.mkdir(parents=True)
    both: dict[str, tuple[int, list[Any]]] = {"x": (FLOAT, ["a+b", 2])}
    build.artifact(folder / "model.onnx", [build.node("Identity", "x", "y")], both, {"y": both["x"]})
    served: ServedModel = opened(tmp_path).get("same")
    assert served.signature.batch_dim is None
    assert not served.config.max_batch_size


STATEFUL = Signature(
    (
        TensorSpec("ids", "int64", ("batch", "new")),
        TensorSpec("mask", "float32", ("batch", "past+new")),
        TensorSpec("positions", "int64", ("batch", "new"), (0, "past+new-1")),
        TensorSpec("cache", "float32", ("batch", "past")),
        TensorSpec("window", "float32", ("batch", "past+new+1")),
    ),
    (
        TensorSpec("logits", "float32", ("batch", 4)),
        TensorSpec("cache_out", "float32", ("batch", "past+new")),
        TensorSpec("window_out", "float32", ("batch", "past+new+1")),
    ),
    {"past": DimRange(0, 4, 8)},
)
STATES = {"cache_out": "cache", "window_out": "window"}


def test_a_new_sequence_has_states_of_the_right_size() -> None:
    """Fails if a state whose dim is a sum begins with the size 0, which the model refuses."""
    inputs = ServerInputs(STATEFUL, Scheduling(), SequenceBatching(states=STATES))
    request = InferenceRequest(model="m", inputs={"ids": np.zeros((1, 3), np.int64)})
    added = inputs.added(request, None).inputs
    assert (added["cache"].shape, added["window"].shape) == ((1, 0), (1, 4))


class _Recording(FakeSession):
    """A session that keeps the feeds and gives the last states back."""

    def __init__(self) -> None:
        super().__init__(STATEFUL)
        self.feeds: list[Feeds] = []

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self.feeds.append(dict(feeds))
        rows = len(feeds["ids"])
        return {
            "logits": np.eye(4, dtype=np.float32)[[2] * rows],
            "cache_out": feeds["mask"],
            "window_out": feeds["mask"],
        }


def test_a_stream_hides_the_dims_of_its_states() -> None:
    """Fails if the signature that clients see names a dim that only the server knows, or lacks the range of a dim that
    clients send as a part of a sum. Also fails if a state begins with a wrong size."""
    loop = TokenLoop(tokens="ids", logits="logits", states=STATES, mask="mask", steps=2)
    seen = loop.offered(STATEFUL)
    assert [str(spec) for spec in seen.inputs] == ["ids:int64[batch,new]", "positions:int64[batch,new]"]
    assert set(seen.dims) == {"batch", "new"}
    sent = TokenLoop(tokens="ids", logits="logits", states=STATES, positions="positions").offered(STATEFUL)
    assert sent.dims["past"] == DimRange(0, 4, 8)
    session = _Recording()
    made = TokenLoopSession(session, loop, STATEFUL)
    feeds = {"ids": np.zeros((2, 3), np.int64), "positions": np.zeros((2, 3), np.int64)}
    assert [part["token"].tolist() for part in made.stream(feeds)] == [[[2], [2]]] * 2
    assert (session.feeds[0]["cache"].shape, session.feeds[0]["window"].shape) == ((2, 0), (2, 4))
