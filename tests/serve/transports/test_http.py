"""Proves that REST v2 works with Triton's own HTTP client and with plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from accel.serve.protocol.tensors import DATATYPES
from tests.support.serving import WEIGHTS, Start, identity, linear, plain, routes

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    identity(repository / "half" / "1", TensorProto.FLOAT16, [3])
    return start(repository, mode="explicit", models=("*",), http_port=0, max_message=1 << 20)


@pytest.fixture
def client(process: Any) -> Any:
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['http']}") as made:
        yield made


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_infer(client: Any, binary_in: bool, binary_out: bool | None) -> None:
    """Fails if a combination of JSON and binary tensors gives wrong numbers, or if an output lacks the requested
    format."""
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(X, binary_data=binary_in)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer("linear", [given], outputs=outputs, request_id="9")
    np.testing.assert_allclose(result.as_numpy("y"), X @ WEIGHTS, rtol=1e-5)
    response = result.get_response()
    assert (response["id"], response["model_version"]) == ("9", "1")
    assert ("data" in response["outputs"][0]) is (binary_out is False)


@pytest.mark.parametrize("binary", [True, False])
def test_strings(client: Any, binary: bool) -> None:
    """Fails if strings or integers change in transit."""
    text = np.array([["é"], [""]], dtype=object)
    inputs = []
    for name, value, kind in (("a", np.array([[1, 2], [3, -4]]), "INT64"), ("text", text, "BYTES")):
        inputs.append(triton.InferInput(name, list(value.shape), kind))
        inputs[-1].set_data_from_numpy(value, binary_data=binary)
    inputs.append(triton.InferInput("b", [2, 2], "INT64"))
    inputs[-1].set_data_from_numpy(np.array([[10, 20], [30, 40]]), binary_data=binary)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("same", "total")]
    result = client.infer("pair", inputs, outputs=outputs)
    assert result.as_numpy("total").tolist() == [[11, 22], [33, 36]]
    found = [v.decode() if isinstance(v, bytes) else v for v in result.as_numpy("same").ravel()]
    assert found == ["é", ""]


def test_half_precision_is_binary(client: Any, process: Any) -> None:
    """Fails if FP16 in JSON, which would lose bits, is accepted or returned."""
    given = triton.InferInput("x", [3], "FP16")
    given.set_data_from_numpy(np.array([1, 2, 3], dtype=np.float16))
    assert client.infer("half", [given]).as_numpy("y").tolist() == [1, 2, 3]
    body = {"inputs": [{"name": "x", "datatype": "FP16", "shape": [3], "data": [1, 2, 3]}]}
    status, text = plain(process, "/v2/models/half/infer", json.dumps(body).encode())
    assert status == 400
    assert b"not supported" in text
    half = np.array([1, 2, 3], np.float16).tobytes()
    body["inputs"][0] = {"name": "x", "datatype": "FP16", "shape": [3], "parameters": {"binary_data_size": len(half)}}
    head = json.dumps(body).encode()
    status, text = plain(process, "/v2/models/half/infer", head + half, Inference_Header_Content_Length=str(len(head)))
    assert status == 400  # a client that asked for JSON can't read binary data
    assert b"sending FP16 data via JSON is not supported" in text


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("INT64", [[1, 2], [3, 4]]),
        ("INT64", [[1], [2, 3], 4]),
        ("INT64", [1, [2, [3, [4]]]]),
        ("BYTES", [["a"], "b"]),
    ],
)
def test_nested_data(process: Any, kind: str, data: list[Any]) -> None:
    """Fails if data that is nested in other rows than the shape has is refused, although Triton takes it."""
    text = {"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": data if kind == "BYTES" else ["a", "b"]}
    numbers = data if kind == "INT64" else [1, 2, 3, 4]
    rows = [{"name": name, "datatype": "INT64", "shape": [2, 2], "data": numbers} for name in "ab"]
    status, body = plain(process, "/v2/models/pair/infer", json.dumps({"inputs": [*rows, text]}).encode())
    assert status == 200, body
    found = {row["name"]: row["data"] for row in json.loads(body)["outputs"]}
    assert found == {"total": [2, 4, 6, 8], "same": ["a", "b"]}


def test_data_that_is_nested_too_deep(process: Any) -> None:
    """Fails if deeply nested data ends in an internal error."""
    data: Any = [1, 2]
    for _ in range(200):
        data = [data, 1]
    status, body = plain(process, "/v2/models/linear/infer", good(data=data))
    assert (status, b"nesting depth exceeds maximum allowed limit (100)" in body) == (400, True), body


def test_the_rest_of_the_client(client: Any) -> None:
    """Checks that Triton's client can parse the answer to a call that isn't an inference call."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "accel"
    assert client.get_model_metadata("linear")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = client.get_model_config("linear")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (8, [4])
    assert client.get_inference_statistics("linear")["model_stats"][0]["inference_count"] == 0
    assert {m["name"]: m["state"] for m in client.get_model_repository_index()}["linear"] == "READY"
    client.unload_model("linear")
    assert not client.is_model_ready("linear")
    client.load_model("linear", config='{"max_batch_size": 2}')
    assert client.get_model_config("linear")["max_batch_size"] == 2
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing'"):
        client.get_model_config("nothing")


def good(**changes: Any) -> bytes:
    row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]} | changes
    return json.dumps({"inputs": [{k: v for k, v in row.items() if v is not None}]}).encode()


@pytest.mark.parametrize(
    ("path", "body", "length", "status", "says"),
    [
        ("linear", b"{", None, 400, "failed to parse the request JSON"),
        ("linear", b"[1]", None, 400, "has to be a JSON object"),
        ("linear", b"[" * 100_000, None, 400, "failed to parse"),
        ("linear", good(data=[1]), None, 400, "Expected 4, got 1"),
        ("linear", good(data="x"), None, 400, "Expected 4, got 1"),
        ("linear", good(data=[[1, 2], [3]]), None, 400, "Expected 4, got 3"),
        ("linear", good(shape="x"), None, 400, "list of integers"),
        ("linear", good(shape=[1, -4]), None, 400, "Expected [-1,4], got [1,-4]. NOTE: -1 stands for any size"),
        ("linear", good(data=None), None, 400, "needs exactly one of"),
        ("linear", good(data=None, parameters={"binary_data_size": 16}), None, 400, "the body has only 0 bytes left"),
        ("linear", good(), "9999", 400, "invalid Inference-Header-Content-Length"),
        ("linear", good() + b"more", str(len(good())), 400, "unexpected additional"),
        ("nothing", good(), None, 404, "unknown model: 'nothing'"),
        ("nothing", b"{", None, 404, "unknown model: 'nothing'"),
        ("nothing", good(), "9999", 404, "unknown model: 'nothing'"),
        ("..%2Flinear", good(), None, 404, "unknown model"),
        ("linear/versions/x", good(), None, 400, "specified version string 'x'"),
        ("linear", b"x" * ((1 << 20) + 1), None, 413, ""),
    ],
)  # fmt: skip
def test_what_is_refused(process: Any, path: str, body: bytes, length: str | None, status: int, says: str) -> None:
    """Fails if a request with an invalid body gets the wrong status or no explanation, or stays pending."""
    headers = {"Inference_Header_Content_Length": length} if length else {}
    found, text = plain(process, f"/v2/models/{path}/infer", body, **headers)
    assert found == status
    assert says in json.loads(text)["error"]
    assert process.server.under_way == 0


NUMBERS = ("FP32", "FP64", "INT8", "INT32", "INT64", "UINT8", "UINT64", "BOOL")


REFUSED = [
    *((kind, value, f"'x' holds {value}, but {kind} takes") for kind in NUMBERS for value in ("null", '"1"')),
    *((kind, "true", f"'x' holds true, but {kind} takes") for kind in NUMBERS if kind != "BOOL"),
    *((kind, "1.5", f"'x' holds 1.5, but {kind} takes") for kind in NUMBERS if not kind.startswith("FP")),
    ("FP32", "1e39", "'x' holds 1e+39, but FP32 takes numbers up to 3.4e+38"),
    ("FP32", "-1e400", "'x' holds a number that is too large, but FP32 takes"),
    ("FP64", "1e400", "'x' holds a number that is too large, but FP64 takes"),
    ("BOOL", "2", "'x' holds 2, but BOOL takes true and false"),
    ("BOOL", "1.0", "'x' holds 1.0, but BOOL takes true and false"),
    ("INT8", "-129", "'x' holds -129, but INT8 takes integers from -128 to 127"),
    ("UINT64", "18446744073709551616", "'x' holds 18446744073709551616, but UINT64 takes"),
]
TAKEN = [
    ("FP32", "[1,2.5,3.4028234e38,-1e-46]", [1, 2.5, 3.4028234663852886e38, 0]),
    ("FP32", "[1180591620717411303424,NaN,Infinity,-Infinity]", [2.0**70, np.nan, np.inf, -np.inf]),
    ("FP64", "[[1e308],[-5e-324]]", [1e308, -5e-324]),
    ("INT64", "[9223372036854775807,[-9223372036854775808]]", [(1 << 63) - 1, -(1 << 63)]),
    ("UINT64", "[18446744073709551615,1]", [(1 << 64) - 1, 1]),
    ("BOOL", "[true,[false]]", [True, False]),
    ("BOOL", "[1,0]", [True, False]),
]


def test_json_values_of_every_datatype(tmp_path: Path, start: Start) -> None:
    """Fails if NumPy makes another number of a JSON value, such as NaN of null, in any form of the list. Also fails if
    a good value is refused or changed."""
    for kind in NUMBERS:
        identity(tmp_path / kind / "1", helper.np_dtype_to_tensor_dtype(DATATYPES[kind].numpy))
    process = start(tmp_path, http_port=0)

    def ask(kind: str, size: int, data: str) -> tuple[int, bytes]:
        row = f'{{"name":"x","datatype":"{kind}","shape":[{size}],"data":{data}}}'
        text = f'{{"inputs":[{row}],"parameters":{{"binary_data_output":true}}}}'
        return plain(process, f"/v2/models/{kind}/infer", text.encode())

    for kind, value, says in REFUSED:
        for form in ("[{}]", "[1,{}]", "[{},1]", "[[1],[{}]]", *(["[0.5,{}]"] if kind.startswith("FP") else [])):
            status, body = ask(kind, form.count(",") + 1, form.format(value))
            assert status == 400, (kind, form, value, body)
            assert says in json.loads(body)["error"], (kind, form, value)
    for kind, data, wanted in TAKEN:
        status, body = ask(kind, len(wanted), data)
        assert status == 200, (kind, data, body)
        expected = np.array(wanted, DATATYPES[kind].numpy)
        np.testing.assert_array_equal(np.frombuffer(body[-expected.nbytes :], expected.dtype), expected)


@pytest.mark.parametrize(
    "name", ["..%2Foutside", "%2e%2e%2Foutside", "..%2Fmodels%2Flinear", "linear%2F1", "%2Foutside"]
)
def test_names_that_lead_out_of_the_repository(process: Any, repository: Path, name: str) -> None:
    """Fails if a path in place of a model name loads, reaches or unloads a model, or gets the wrong status."""
    linear(repository.parent / "outside" / "1")
    control = f"/v2/repository/models/{name}"
    found = {
        path: plain(process, path, body)[0]
        for path, body in (
            (f"{control}/load", b"{}"), (f"{control}/unload", b"{}"), (f"/v2/models/{name}/infer", good()),
            (f"/v2/models/{name}", None), (f"/v2/models/{name}/config", None), (f"/v2/models/{name}/stats", None),
            (f"/v2/models/{name}/ready", None),
        )
    }  # fmt: skip
    assert list(found.values()) == [400, 404, 404, 404, 404, 404, 400]
    assert plain(process, "/v2/models/linear/infer", good())[0] == 200


@pytest.mark.parametrize("version", ["..%2F1", "%2e%2e%2F1", "..%2F..%2Foutside%2F1", "1%2F..%2F1"])
def test_versions_that_lead_out_of_the_model(process: Any, repository: Path, version: str) -> None:
    """Fails if a path in place of a version reaches a model, or gets the wrong status."""
    linear(repository.parent / "outside" / "1")
    model = f"/v2/models/linear/versions/{version}"
    assert plain(process, f"{model}/infer", good())[0] == 400
    paths = {path.partition("{version}")[2] for method, path in routes() if method == "GET" and "{version}" in path}
    assert paths >= {"", "/config"}
    for path in paths:
        assert plain(process, f"{model}{path}")[0] == 400, path


@pytest.mark.parametrize(
    "path", ["/v2/models/../outside", "/v2/models/linear/versions/../../../outside", "/../etc/passwd"]
)
def test_dots_in_the_path_itself(process: Any, repository: Path, path: str) -> None:
    """Fails if a URL path with ".." reaches a model."""
    linear(repository.parent / "outside" / "1")
    for tail, body in (("", None), ("/config", None), ("/infer", good())):
        assert plain(process, f"{path}{tail}", body)[0] == 404


@pytest.mark.parametrize("binary", [True, False])
def test_classification(tmp_path: Path, start: Start, binary: bool) -> None:
    """Checks that a classification, as JSON or binary, begins with the largest value, and has the right values, indices
    and labels."""
    linear(tmp_path / "linear" / "1")
    (tmp_path / "linear" / "labels.txt").write_text("cat\ndog\nbird\n")
    (tmp_path / "linear" / "config.pbtxt").write_text(
        'max_batch_size: 8 output { name: "y" label_filename: "labels.txt" }'
    )
    process = start(tmp_path, http_port=0)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['http']}") as client:
        given = triton.InferInput("x", [2, 4], "FP32")
        given.set_data_from_numpy(np.array([[1, 0, 0, 0], [-1, 0, 0, 0]], dtype=np.float32))
        asked = [triton.InferRequestedOutput("y", binary_data=binary, class_count=2)]
        result = client.infer("linear", [given], outputs=asked)
    [output] = result.get_response()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    found = [v.decode() if isinstance(v, bytes) else v for v in result.as_numpy("y").ravel()]
    assert found == ["0.200000:2:bird", "0.100000:1:dog", "0.000000:0:cat", "-0.100000:1:dog"]


def test_metrics(client: Any, process: Any) -> None:
    """Checks that Prometheus can parse the metrics, and that the metrics match the statistics."""
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(X)
    for _ in range(3):
        client.infer("linear", [given])
    status, text = plain(process, "/metrics")
    assert status == 200
    found = {f.name: f for f in text_string_to_metric_families(text.decode())}
    samples = {
        s.name.removesuffix("_total"): s.value
        for f in found.values()
        for s in f.samples
        if s.labels.get("model") == "linear"
    }
    assert samples["nv_inference_request_success"] == 3
    assert samples["nv_inference_count"] >= 3
    assert samples["nv_inference_request_failure"] == 0
    assert 'nv_inference_request_success{model="linear",version="1"} 3.0' in text.decode()  # named as in Triton
    assert found["nv_inference_request_success"].type == "counter"
    for what in ("request", "queue", "compute"):
        rows = [s for s in found[f"accel_{what}_duration_seconds"].samples if s.labels.get("model") == "linear"]
        buckets = [s.value for s in rows if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert len(buckets) == 17
        [(count, total)] = zip(
            *([s.value for s in rows if s.name.endswith(end)] for end in ("_count", "_sum")), strict=True
        )
        assert buckets[-1] == count == 3
        spent = (
            samples[f"nv_inference_{what}_duration_us"]
            if what != "compute"
            else sum(samples[f"nv_inference_compute_{part}_duration_us"] for part in ("input", "infer", "output"))
        )
        assert total * 1e6 == pytest.approx(spent, abs=3)
    assert samples["nv_inference_pending_request_count"] == 0


def test_probes_while_it_ends(process: Any) -> None:
    """Fails if a server that is ending still reports to a load balancer that the server is ready."""
    assert plain(process, "/v2/health/ready")[0] == 200
    process.server.drain(0.1)
    assert plain(process, "/v2/health/ready")[0] == 503
    assert plain(process, "/v2/health/live")[0] == 200
    status, text = plain(process, "/v2/models/linear/infer", good())
    assert status == 503
    assert "Server is stopping" in text.decode()
