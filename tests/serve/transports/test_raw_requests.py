"""Proves that a body without a JSON header is taken as the tensor of the model's only input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.onnx_builder import artifact, node
from tests.support.serving import FLOAT, STRING, WEIGHTS, Start, plain

X = np.array([1, 2, 3, 4], dtype=np.float32)


def same(root: Path, name: str, dtype: int, shape: list[Any]) -> None:
    (root / name / "1").mkdir(parents=True)
    artifact(root / name / "1" / "model.onnx", [node("Identity", "x", "y")], {"x": (dtype, shape)},
             {"y": (dtype, shape)})  # fmt: skip


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    same(repository, "row", FLOAT, ["n"])
    (repository / "row" / "config.pbtxt").write_text("max_batch_size: 0")
    same(repository, "text", STRING, ["batch", 1])
    same(repository, "texts", STRING, ["batch", 2])
    same(repository, "image", FLOAT, ["batch", 3, "height", "width"])
    same(repository, "one_image", FLOAT, ["batch", 3, "height"])
    return start(repository, http_port=0)


def ask(process: Any, model: str, body: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Sends a raw request. Returns the status, the JSON and the binary data of the answer."""
    headers = {"Inference_Header_Content_Length": "0", "Content_Type": "application/octet-stream"}
    status, answer = plain(process, f"/v2/models/{model}/infer", body, **headers)
    head, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    return status, head, answer[end:]


def test_raw_tensors(process: Any) -> None:
    """Fails if the shape of a raw tensor is deduced wrongly, or the answer isn't binary."""
    status, head, raw = ask(process, "linear", X.tobytes())
    assert (status, head["outputs"][0]["shape"]) == (200, [1, 3])
    np.testing.assert_allclose(np.frombuffer(raw, np.float32), X @ WEIGHTS, rtol=1e-5)
    for model, shape in (("row", [4]), ("one_image", [1, 3, 4])):
        values = np.arange(np.prod(shape), dtype=np.float32)
        status, head, raw = ask(process, model, values.tobytes())
        assert (status, head["outputs"][0]["shape"], raw) == (200, shape, values.tobytes())
    status, head, raw = ask(process, "text", "où".encode())
    assert (status, head["outputs"][0]["shape"], raw[4:].decode()) == (200, [1, 1], "où")


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        ("pair", X.tobytes(), "Raw request must only have 1 input"),
        ("image", X.tobytes(), "more than one variable-sized dimension"),
        ("texts", b"abc", "the model must have input shape [1]"),
        ("linear", X.tobytes()[:-4], "Expected 16, got 12"),
        ("linear", b"", "Expected 16, got 0"),
        ("one_image", X.tobytes() * 4, "Expected 60, got 64"),
    ],
)
def test_a_raw_tensor_that_does_not_fit(process: Any, model: str, body: bytes, says: str) -> None:
    """Fails if a body of the wrong size is taken, or ends in an internal error."""
    status, head, _ = ask(process, model, body)
    assert (status, says in head["error"]) == (400, True), head
