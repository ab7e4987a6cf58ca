"""Proves that clients may omit inputs that have a default in the model. In ONNX, the default is an initializer with the
name of the input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from tests.support import onnx_builder as build
from tests.support.serving import Start, assert_refused

X = np.array([[1, 4, 2, 3], [8, 5, 7, 6]], np.float32)


def model(folder: Path, node: onnx.NodeProto, name: str, default: np.ndarray, shape: list[Any], ir: int = 10) -> None:
    """Writes a model with the inputs ``x`` (batch, 4) and ``name``. The input ``name`` has a default, and ``node``
    computes the output ``y`` from both inputs."""
    kind = helper.np_dtype_to_tensor_dtype(default.dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info(name, kind, shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "columns"])],
        [numpy_helper.from_array(default, name)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=ir)
    folder.mkdir(parents=True)
    onnx.save(made, str(folder / "model.onnx"))


def largest(folder: Path, ir: int = 10) -> None:
    """Writes a model that returns the ``k`` largest values of each row. The default of ``k`` is 2."""
    model(folder, build.node("TopK", "x k", "y places"), "k", np.array([2]), [1], ir)


def scaled(folder: Path) -> None:
    """Writes a model that multiplies each row by ``scale``. The default of ``scale`` is 3."""
    model(folder, build.node("Mul", "x scale", "y"), "scale", np.full((1, 1), 3, np.float32), ["batch", 1])


class Asking:
    """Triton's client, over gRPC or HTTP."""

    def __init__(self, process: Any, face: str) -> None:
        self._module = triton if face == "grpc" else triton_http
        self.client = self._module.InferenceServerClient(f"127.0.0.1:{process.ports[face]}")
        self._options = {"as_json": True} if face == "grpc" else {}

    def infer(self, name: str, **arrays: np.ndarray) -> np.ndarray:
        given = []
        for key, value in arrays.items():
            kind = "FP32" if value.dtype == np.float32 else "INT64"
            given.append(self._module.InferInput(key, list(value.shape), kind))
            given[-1].set_data_from_numpy(value)
        found: np.ndarray = self.client.infer(name, given).as_numpy("y")
        return found

    def inputs(self, name: str) -> tuple[list[str], list[str]]:
        """Returns the inputs in the metadata, and the inputs that the config marks as optional."""
        found = self.client.get_model_config(name, **self._options)
        config = found.get("config", found)
        metadata = self.client.get_model_metadata(name, **self._options)
        listed = [tensor["name"] for tensor in metadata["inputs"]]
        return sorted(listed), [tensor["name"] for tensor in config["input"] if tensor.get("optional")]


@pytest.fixture(params=["grpc", "http"])
def asking(request: pytest.FixtureRequest, tmp_path: Path, start: Start) -> Any:
    largest(tmp_path / "models" / "named" / "1")
    (tmp_path / "models" / "named" / "config.pbtxt").write_text('input { name: "k" optional: true }')
    largest(tmp_path / "models" / "unnamed" / "1")
    scaled(tmp_path / "models" / "scaled" / "1")
    (tmp_path / "models" / "scaled" / "config.pbtxt").write_text(
        'max_batch_size: 8 dynamic_batching {} response_cache { enable: true } input { name: "scale" optional: true }'
    )
    made = Asking(start(tmp_path / "models", http_port=0), request.param)
    yield made
    made.client.close()


def test_the_default_and_what_is_given(asking: Any) -> None:
    """Checks that the model uses the default of an optional input only if the request omits the input. Also fails if a
    client's value reaches the next request, if the input is hidden from clients, or if a request without a required
    input is accepted."""
    assert asking.inputs("named") == (["k", "x"], ["k"])
    for k in (None, 3, None, 1):
        found = asking.infer("named", x=X, **({} if k is None else {"k": np.array([k])}))
        np.testing.assert_array_equal(found, np.sort(X)[:, ::-1][:, : k or 2])
    for wrong in ({"k": np.array([3])}, {"x": X, "k": np.array([1, 1])}, {"x": X, "k": np.ones(1, np.float32)}):
        with pytest.raises(InferenceServerException) as caught:
            asking.infer("named", **wrong)
        assert caught.value.status() in ("StatusCode.INVALID_ARGUMENT", "400")
    np.testing.assert_array_equal(asking.infer("named", x=X), np.sort(X)[:, ::-1][:, :2])


def test_one_that_the_config_does_not_name(asking: Any) -> None:
    """Some exporters list a model's weights among the model's inputs. Fails if clients see a weight as an input."""
    assert asking.inputs("unnamed") == (["x"], [])
    np.testing.assert_array_equal(asking.infer("unnamed", x=X), np.sort(X)[:, ::-1][:, :2])
    with pytest.raises(InferenceServerException, match="unexpected inference input 'k'"):
        asking.infer("unnamed", x=X, k=np.array([3]))


def test_beside_the_batch(asking: Any) -> None:
    """Fails if requests with and without the optional input are mixed up in a batch or in the response cache."""
    assert asking.inputs("scaled") == (["scale", "x"], ["scale"])
    scale = np.array([[5], [7]], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(asking.infer("scaled", x=X), 3 * X)
        np.testing.assert_array_equal(asking.infer("scaled", x=X, scale=scale), scale * X)
        np.testing.assert_array_equal(asking.infer("scaled", x=X[:1]), 3 * X[:1])


def test_many_at_once(tmp_path: Path, start: Start) -> None:
    """Fails if a request gets a wrong value because requests with and without the optional input share a run."""
    scaled(tmp_path / "models" / "scaled" / "1")
    (tmp_path / "models" / "scaled" / "config.pbtxt").write_text(
        'max_batch_size: 8 input { name: "scale" optional: true } '
        "dynamic_batching { max_queue_delay_microseconds: 20000 }"
    )
    process = start(tmp_path / "models")
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        pending = []
        for number in range(64):
            arrays = {"x": np.full((1, 4), number, np.float32)}
            if number % 2:
                arrays["scale"] = np.full((1, 1), number, np.float32)
            given = [triton.InferInput(name, list(value.shape), "FP32") for name, value in arrays.items()]
            for tensor, value in zip(given, arrays.values(), strict=True):
                tensor.set_data_from_numpy(value)
            pending.append(given)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda given: client.infer("scaled", given).as_numpy("y"), pending))
    for number, found in enumerate(answers):
        np.testing.assert_array_equal(found, np.full((1, 4), number * (number if number % 2 else 3), np.float32))


@pytest.mark.parametrize(
    ("config", "ir", "says"),
    [
        ('input { name: "k" }', 10, "the model has a default for the input; write optional: true"),
        ('max_batch_size: 8 input { name: "k" optional: true }', 10, "first dim is not the batch.*max_batch_size to 0"),
        ('input { name: "k" optional: true }', 3, "has no input 'k'; write one of these in the config: x"),
        ('input { name: "z" optional: true }', 10, "has no input 'z'; write one of these in the config: x"),
        (
            'input { name: "k" data_type: TYPE_FP32 optional: true }',
            10,
            "config has the data type TYPE_FP32, but the model has TYPE_INT64",
        ),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, config: str, ir: int, says: str) -> None:
    """Checks that a config that contradicts the model is refused, and that the error names the fix."""
    largest(tmp_path / "one" / "1", ir)
    (tmp_path / "one" / "config.pbtxt").write_text(config)
    assert_refused(tmp_path, says)
