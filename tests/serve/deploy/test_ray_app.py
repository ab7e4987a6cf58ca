"""Proves in Ray's local mode, without a cluster, that the Ray Serve application answers gRPC and HTTP requests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from accel.errors import MissingExtra, UsageError
from accel.serve.deploy import ray_app
from accel.serve.process.options import ServeOptions
from accel.serve.protocol import messages as proto
from tests.support.serving import WEIGHTS, linear

X = np.ones((2, 4), np.float32)


class Call:
    """Imitates Ray's context of a gRPC call."""

    def __init__(self, token: str | None = None) -> None:
        self.metadata = [("authorization", f"Bearer {token}")] if token else []
        self.code: Any = None
        self.details = ""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, text: str) -> None:
        self.details = text


def message(name: str = "linear") -> bytes:
    request = proto.message("ModelInferRequest")(model_name=name)
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    request.raw_input_contents.append(X.tobytes())
    made: bytes = request.SerializeToString()
    return made


def checked(response: Any) -> None:
    found = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, 3)
    np.testing.assert_allclose(found, X @ WEIGHTS, rtol=1e-5)


@pytest.fixture
def replica(tmp_path: Path) -> ray_app.Replica:
    """Makes a replica of the Ray application without starting Ray."""
    linear(tmp_path / "models" / "linear" / "1")
    options = ServeOptions(repository=str(tmp_path / "models"), grpc_port=None, http_port=None)
    return ray_app.Replica(options.to_text(), 4)


def test_a_replica_answers_grpc(replica: ray_app.Replica) -> None:
    """Checks that each service method has the name that Ray calls, and parses the request's bytes. Also fails if an
    error reaches the client without its code."""

    def ask(name: str, body: bytes, context: Call | None = None) -> Any:
        return asyncio.run(getattr(replica, name)(body, grpc_context=context))

    checked(ask("ModelInfer", message()))
    assert ask("ServerReady", b"").ready
    named = proto.message("ModelMetadataRequest")(name="linear").SerializeToString()
    assert ask("ModelMetadata", named).inputs[0].name == "x"
    statistics = proto.message("ModelStatisticsRequest")(name="linear").SerializeToString()
    assert ask("ModelStatistics", statistics).model_stats[0].inference_count == 2
    for body, code in ((message("nothing"), grpc.StatusCode.NOT_FOUND), (b"\xff", grpc.StatusCode.INVALID_ARGUMENT)):
        context = Call()
        with pytest.raises(ray_app.ServeError) as caught:
            ask("ModelInfer", body, context)
        assert context.code is code
        assert context.details
        there = pickle.loads(pickle.dumps(caught.value))  # Ray pickles each error that it sends to the client
        assert (there.code, str(there)) == (caught.value.code, str(caught.value))


def test_a_replica_answers_http(replica: ray_app.Replica) -> None:
    """Checks that a Ray replica answers REST v2 requests correctly, and refuses unknown models and unsupported
    routes."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": X.ravel().tolist()}]}
    status, _, text = replica._http("POST", "/v2/models/linear/infer", {}, json.dumps(body).encode())
    assert status == 200
    np.testing.assert_allclose(json.loads(text)["outputs"][0]["data"], (X @ WEIGHTS).ravel(), rtol=1e-5)
    assert replica._http("GET", "/v2/health/ready", {}, b"")[0] == 200
    found = json.loads(replica._http("GET", "/v2/models/linear/versions/1", {}, b"")[2])
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert json.loads(replica._http("GET", "/v2/models/linear/config", {}, b"")[2])["name"] == "linear"
    for method, path, says in (
        ("GET", "/v2/models/nothing", "unknown model"),
        ("GET", "/v2/models/linear/infer", "not served here"),
        ("POST", "/v2/repository/models/linear/unload", "not served here"),
    ):
        with pytest.raises(ray_app.ServeError, match=says):
            replica._http(method, path, {}, b"")


def test_tokens_hold_there_too(tmp_path: Path) -> None:
    """Fails if the Ray application answers a request without a token although the options require tokens."""
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "a"\ntoken = "secret"\n')
    linear(tmp_path / "models" / "linear" / "1")
    options = ServeOptions(
        repository=str(tmp_path / "models"), tokens=str(tmp_path / "tokens.toml"), grpc_port=None, http_port=None
    )
    replica = ray_app.Replica(options.to_text(), 4)
    context = Call()
    with pytest.raises(ray_app.ServeError):
        asyncio.run(replica.ModelInfer(message(), grpc_context=context))  # type: ignore[attr-defined]
    assert context.code is grpc.StatusCode.UNAUTHENTICATED
    checked(asyncio.run(replica.ModelInfer(message(), grpc_context=Call("secret"))))  # type: ignore[attr-defined]
    with pytest.raises(ray_app.ServeError, match="requires a known token"):
        replica._http("GET", "/v2/models/linear", {}, b"")
    assert replica._http("GET", "/v2/models/linear", {"authorization": "Bearer secret"}, b"")[0] == 200


def test_ray_needs_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error for a missing Ray package names the extra to install."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"accel-toolchain\[ray\]"):
        ray_app.app({"repository": "models"})


@pytest.fixture
def serve() -> Any:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not in [dev]; run: make ray")
    from ray import serve

    return serve


@pytest.mark.filterwarnings("ignore")  # ignores warnings from Ray itself
def test_in_rays_local_mode(serve: Any, tmp_path: Path) -> None:
    """Checks that Ray can build the application, and that the application supports Ray's calls."""
    linear(tmp_path / "models" / "linear" / "1")
    arguments = {"repository": str(tmp_path / "models"), "concurrency": "4", "cpus": "0.5"}
    handle = serve.run(ray_app.app(arguments), _local_testing_mode=True)
    checked(handle.ModelInfer.remote(message()).result())
    assert handle.ServerLive.remote(b"").result().live


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "give repository=FOLDER"),
        ({"repository": "m", "mode": "explicit"}, "gets no commands"),
        ({"repository": "m", "replicas": "many"}, "is not a number"),
        ({"repository": "m", "port": "1"}, "no argument 'port'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, str], says: str) -> None:
    """Checks that a wrong argument raises an error when the application is built, before any replica starts."""
    with pytest.raises(UsageError, match=says):
        ray_app.app(arguments)
