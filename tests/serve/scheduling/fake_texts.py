"""Defines a session for texts of many lengths, makes its requests and checks its answers."""

from __future__ import annotations

import numpy as np

from accel.serve.protocol.inference import InferenceRequest, InferenceResponse
from accel.serve.scheduling.options import LengthBatching
from accel.signature import DimRange, Feeds, Signature, TensorSpec
from tests.support.fake_sessions import Caller, FakeSession

TEXT = Signature(
    (
        TensorSpec("ids", "int64", ("batch", "length"), (0, 99)),
        TensorSpec("mask", "int64", ("batch", "length")),
        TensorSpec("scale", "float32", ("batch", 1)),
    ),
    (TensorSpec("sum", "float32", ("batch",)), TensorSpec("each", "float32", ("batch", 2, "length"))),
    {"batch": DimRange(1, 1, 8), "length": DimRange(1, 8, 64)},
)
LENGTHS = LengthBatching(dim="length", mask="mask", pad={"ids": 77})


class TextSession(FakeSession):
    """A session that records its inputs. The output ``sum`` is the sum of the unmasked ids, and the output ``each``
    contains each id twice. Padding without a mask would change the sum."""

    def __init__(self) -> None:
        super().__init__(TEXT)
        self.feeds: list[Feeds] = []

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self.feeds.append(dict(feeds))
        ids, mask = feeds["ids"], feeds["mask"]
        assert ids.shape == mask.shape
        each = np.stack([ids, ids], axis=1).astype(np.float32)
        return {"sum": ((ids * mask).sum(1) * feeds["scale"][:, 0]).astype(np.float32), "each": each}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [feeds["ids"].shape for feeds in self.feeds]


def text(number: int, length: int, rows: int = 1, *, mask: bool = False) -> InferenceRequest:
    """Makes a request whose ids depend on ``number``. If ``mask`` is true, the request has a mask that hides the first
    id of each row."""
    rng = np.random.default_rng(number)
    inputs = {
        "ids": rng.integers(1, 99, (rows, length)),
        "scale": np.full((rows, 1), number + 1, np.float32),
    }
    if mask:
        inputs["mask"] = np.ones((rows, length), np.int64)
        inputs["mask"][:, 0] = 0
    return InferenceRequest(model="m", id=str(number), inputs=inputs)


def check(caller: Caller) -> None:
    """Asserts that the answer is computed from this caller's ids."""
    assert isinstance(caller.answer, InferenceResponse)
    inputs = caller.request.inputs
    ids, mask = inputs["ids"], inputs.get("mask", np.ones_like(inputs["ids"]))
    np.testing.assert_allclose(caller.answer.outputs["sum"], (ids * mask).sum(1) * inputs["scale"][:, 0])
    np.testing.assert_array_equal(caller.answer.outputs["each"], np.stack([ids, ids], axis=1))
