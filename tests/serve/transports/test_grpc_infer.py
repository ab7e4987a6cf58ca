"""Proves that Triton's own client gets correct inference results over gRPC."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from onnx import TensorProto
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from accel.serve.process.serving import ServingProcess
from accel.serve.protocol.tensors import DATATYPES
from tests.support.serving import WEIGHTS, Start, identity, linear

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


@pytest.fixture
def process(repository: Path, start: Start) -> ServingProcess:
    return start(repository, grpc_threads=64)  # more than the 32 calls that a test sends at once


@pytest.fixture
def client(process: ServingProcess) -> Any:
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as made:
        yield made


@pytest.fixture
def stub(process: ServingProcess) -> Any:
    """Returns a stub for protocol messages that Triton's client never sends."""
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        yield GRPCInferenceServiceStub(channel)


def tensor(name: str, value: np.ndarray, kind: str | None = None) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), kind or triton.np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def refused(call: Any) -> tuple[str, str]:
    """Returns the code and the text of the error that ``call`` raises."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


def test_infer(client: Any) -> None:
    """Fails if the numbers, the request id, the model's version or the wire format (raw, one entry per output) are
    wrong."""
    result = client.infer("linear", [tensor("x", X)], request_id="7")
    np.testing.assert_allclose(result.as_numpy("y"), X @ WEIGHTS, rtol=1e-5)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "linear", "1")
    assert len(response.raw_output_contents) == 1
    assert not response.outputs[0].HasField("contents")


def test_strings_and_several_inputs(client: Any) -> None:
    """Fails if strings change, or if inputs or outputs are mixed up."""
    a, b = np.array([[1, 2], [3, 4]]), np.array([[10, 20], [30, 40]])
    text = np.array([["é"], [""]], dtype=object)
    result = client.infer("pair", [tensor("text", text), tensor("b", b), tensor("a", a)])
    np.testing.assert_array_equal(result.as_numpy("total"), a + b)
    assert [v.decode() for v in result.as_numpy("same").ravel()] == ["é", ""]


def test_only_what_was_asked_for_comes_back_in_that_order(client: Any) -> None:
    """Fails if an output that wasn't requested is sent, or if the outputs come in the model's order instead of the
    requested order."""
    one = np.ones((1, 2), dtype=np.int64)
    inputs = [tensor("a", one), tensor("b", one), tensor("text", np.array([["t"]], dtype=object))]
    asked = [triton.InferRequestedOutput("same"), triton.InferRequestedOutput("total")]
    response = client.infer("pair", inputs, outputs=asked).get_response()
    assert [o.name for o in response.outputs] == ["same", "total"]
    response = client.infer("pair", inputs, outputs=asked[:1]).get_response()
    assert [o.name for o in response.outputs] == ["same"]


KINDS = {
    "BOOL": TensorProto.BOOL, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32, "UINT64": TensorProto.UINT64, "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE, "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip


@pytest.fixture
def kinds(tmp_path: Path, start: Start) -> int:
    """Returns the port of a server with a model for each datatype. Each model returns its input of three elements
    unchanged."""
    assert set(KINDS) == set(DATATYPES)
    for kind, number in KINDS.items():
        identity(tmp_path / "kinds" / kind / "1", number, [3])
    return start(tmp_path / "kinds").ports["grpc"]


def test_every_datatype(kinds: int) -> None:
    """Fails if values of a datatype come back changed."""
    with triton.InferenceServerClient(f"127.0.0.1:{kinds}") as client:
        for kind in sorted(set(KINDS) - {"BYTES"}):
            values = np.array([0, 1, 1]).astype(DATATYPES[kind].numpy)
            given = triton.InferInput("x", [3], kind)
            given.set_data_from_numpy(values)
            response = client.infer(kind, [given]).get_response()
            assert response.outputs[0].datatype == kind
            assert response.raw_output_contents[0] == values.tobytes(), kind


# Each entry has a datatype, its typed field in gRPC's messages, some valid values, and some values outside the
# datatype's range.
TYPED: dict[str, tuple[str, list[Any], list[Any]]] = {
    "BOOL": ("bool_contents", [True, False, True], []),
    "INT8": ("int_contents", [-128, 127, 0], [128, -129]),
    "INT16": ("int_contents", [-32768, 32767, 0], [32768, -32769]),
    "INT32": ("int_contents", [-(1 << 31), (1 << 31) - 1, 0], []),
    "INT64": ("int64_contents", [-(1 << 63), (1 << 63) - 1, (1 << 53) + 1], []),
    "UINT8": ("uint_contents", [255, 1, 0], [256]),
    "UINT16": ("uint_contents", [65535, 1, 0], [65536]),
    "UINT32": ("uint_contents", [(1 << 32) - 1, 1, 0], []),
    "UINT64": ("uint64_contents", [(1 << 64) - 1, (1 << 53) + 1, 0], []),
    "FP32": ("fp32_contents", [-1.5, float("inf"), 1e-45], []),
    "FP64": ("fp64_contents", [0.1, -1e308, 5e-324], []),
    "BYTES": ("bytes_contents", ["é".encode(), b"", b"a\0b"], [b"\xff"]),
}


def test_typed_contents_of_every_datatype(kinds: int) -> None:
    """Fails if values in the typed field of a datatype change. Also fails if values in another field, or values that
    don't fit, are accepted. Also fails if FP16 or BF16, which have no typed field, is read from a typed field."""

    def request(kind: str, field: str, values: list[Any]) -> Any:
        made = service_pb2.ModelInferRequest(model_name=kind)
        getattr(made.inputs.add(name="x", datatype=kind, shape=[3]).contents, field).extend(values)
        return made

    fields = {field: values for field, values, _ in TYPED.values()}
    with grpc.insecure_channel(f"127.0.0.1:{kinds}") as channel:
        stub = GRPCInferenceServiceStub(channel)

        def says(asked: Any, text: str) -> None:
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(asked)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, asked
            assert text in caught.value.details()

        for kind, (field, values, beyond) in TYPED.items():
            response = stub.ModelInfer(request(kind, field, values))
            assert response.outputs[0].datatype == kind
            [raw] = response.raw_output_contents
            if kind == "BYTES":
                assert raw == b"".join(len(value).to_bytes(4, "little") + value for value in values)
            else:
                assert raw == np.array(values, DATATYPES[kind].numpy).tobytes(), kind
            for other in fields.keys() - {field}:
                says(request(kind, other, fields[other]), f"datatype {kind}, but its contents are in the field {other}")
            for value in beyond:
                says(request(kind, field, [value, *values[1:]]), "'x'")
        for kind in KINDS.keys() - TYPED:
            assert kind in ("FP16", "BF16")
            for field, values in fields.items():
                says(request(kind, field, values), f"'x' has datatype {kind}; send its data in raw_input_contents")


def test_classification(tmp_path: Path, start: Start) -> None:
    """Checks that a classification begins with the largest value, and has the right values, indices and labels."""
    linear(tmp_path / "linear" / "1")
    (tmp_path / "linear" / "labels.txt").write_text("cat\ndog\nbird\n")
    (tmp_path / "linear" / "config.pbtxt").write_text(
        'max_batch_size: 8 output { name: "y" label_filename: "labels.txt" }'
    )
    process = start(tmp_path)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        x = np.array([[1, 0, 0, 0], [-1, 0, 0, 0]], dtype=np.float32)
        asked = [triton.InferRequestedOutput("y", class_count=2)]
        found = client.infer("linear", [tensor("x", x)], outputs=asked).as_numpy("y")
    assert found.tolist() == [[b"0.200000:2:bird", b"0.100000:1:dog"], [b"0.000000:0:cat", b"-0.100000:1:dog"]]


@pytest.mark.parametrize(
    ("name", "inputs", "options", "code", "says"),
    [
        ("nothing", [("x", X)], {}, "NOT_FOUND", "Request for unknown model: 'nothing' is not found"),
        ("linear", [("x", X)], {"model_version": "9"}, "NOT_FOUND", "'linear' version 9 is not found"),
        ("linear", [("x", X)], {"model_version": "../1"}, "INVALID_ARGUMENT", "specified version string '../1'"),
        ("../linear", [("x", X)], {}, "NOT_FOUND", "unknown model: '../linear'"),
        ("linear", [("z", X)], {}, "INVALID_ARGUMENT", "unexpected inference input 'z' for model 'linear'"),
        ("linear", [], {}, "INVALID_ARGUMENT", "expected 1 inputs but got 0 inputs for model 'linear'"),
        ("linear", [("x", X), ("x", X)], {}, "INVALID_ARGUMENT", "input 'x' already exists"),
        ("linear", [("x", X.astype(np.float64))], {}, "INVALID_ARGUMENT", "data-type is 'FP64', but model 'linear'"),
        ("linear", [("x", X[:, :3])], {}, "INVALID_ARGUMENT", "Expected [-1,4], got [2,3]"),
        ("linear", [("x", X[0])], {}, "INVALID_ARGUMENT", "Expected [-1,4], got [4]"),
        ("linear", [("x", np.zeros((9, 4), np.float32))], {}, "INVALID_ARGUMENT", "batch-size must be <= 8 for"),
        ("linear", [("x", np.zeros((0, 4), np.float32))], {}, "INVALID_ARGUMENT", "batch-size must be >= 1 for"),
        ("linear", [("x", X)], {"outputs": ["q"]}, "INVALID_ARGUMENT", "unexpected inference output 'q'"),
        (
            "pair",
            [("a", np.ones((1, 2), np.int64)), ("b", np.ones((2, 2), np.int64)), ("text", np.array([["t"]], object))],
            {},
            "INVALID_ARGUMENT",
            "input 'b' batch size does not match other inputs for 'pair'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_and_how(
    client: Any, process: ServingProcess, name: str, inputs: Any, options: Any, code: str, says: str
) -> None:
    """Fails if a wrong request runs or stays pending. Also fails if the error's code or text differs from Triton's."""
    if "outputs" in options:
        options = {"outputs": [triton.InferRequestedOutput(o) for o in options["outputs"]]}
    status, text = refused(lambda: client.infer(name, [tensor(n, v) for n, v in inputs], **options))
    assert status == f"StatusCode.{code}"
    assert says in text
    assert process.server.under_way == 0


def test_typed_contents(stub: Any) -> None:
    """Fails if typed contents are misread, or if typed contents are accepted in the wrong field or together with raw
    contents."""
    request = service_pb2.ModelInferRequest(model_name="linear")
    given = request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    given.contents.fp32_contents.extend(X.ravel().tolist())
    response = stub.ModelInfer(request)
    found = np.frombuffer(response.raw_output_contents[0], dtype=np.float32).reshape(2, 3)
    np.testing.assert_allclose(found, X @ WEIGHTS, rtol=1e-5)

    def says(text: str) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in caught.value.details()

    request.raw_input_contents.append(X.tobytes())
    says("contents field must not be specified when using raw_input_contents")
    given.ClearField("contents")
    request.raw_input_contents.append(b"more")
    says("expected one entry of raw_input_contents")
    del request.raw_input_contents[:]
    given.contents.int_contents.extend([1] * 8)
    says("its contents are in the field int_contents")
    given.contents.ClearField("int_contents")
    given.contents.fp32_contents.extend([1] * 7)
    says("Expected 8, got 7")
    given.contents.fp32_contents.append(1)
    request.parameters["triton_anything"].int64_param = 1
    says("parameter keys starting with 'triton_' are reserved")


def test_the_callback_client(client: Any) -> None:
    """Fails if asynchronous calls lose, repeat or mix up answers."""
    found: queue.Queue[Any] = queue.Queue()
    for i in range(32):
        x = np.full((1, 4), i, dtype=np.float32)
        client.async_infer(
            "linear", [tensor("x", x)], lambda result, error: found.put((result, error)), request_id=str(i)
        )
    answers = {}
    for _ in range(32):
        result, error = found.get(timeout=30)
        assert error is None, str(error)
        answers[result.get_response().id] = result.as_numpy("y")
    assert len(answers) == 32
    for i in range(32):
        np.testing.assert_allclose(answers[str(i)], np.full((1, 4), i, dtype=np.float32) @ WEIGHTS, rtol=1e-5)


def test_the_asyncio_client(process: ServingProcess) -> None:
    """Fails if the asyncio client gets wrong answers."""

    async def ask() -> np.ndarray:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
            assert await client.is_server_live()
            many = await asyncio.gather(*(client.infer("linear", [tensor("x", X)]) for _ in range(8)))
            return np.stack([result.as_numpy("y") for result in many])

    np.testing.assert_allclose(asyncio.run(ask()), np.stack([X @ WEIGHTS] * 8), rtol=1e-5)


def test_a_stream(client: Any) -> None:
    """Fails if the answers of a stream come in the wrong order, if an error ends the stream, or if the final flag is
    missing."""
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    for i in range(20):
        name = "nothing" if i == 7 else "linear"
        client.async_stream_infer(name, [tensor("x", np.full((1, 4), i, dtype=np.float32))], request_id=str(i))
    for i in range(20):
        result, error = found.get(timeout=30)
        if i == 7:
            assert "unknown model: 'nothing'" in str(error)
            continue
        assert error is None
        assert result.get_response().id == str(i)
        assert result.get_response().parameters["triton_final_response"].bool_param
        np.testing.assert_allclose(result.as_numpy("y"), np.full((1, 4), i, dtype=np.float32) @ WEIGHTS, rtol=1e-5)
    client.stop_stream()
