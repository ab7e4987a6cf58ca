"""Proves that metadata, config, statistics, repository control, settings, health and reflection work over gRPC."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.utils import InferenceServerException

import accel
from accel.serve.models.repository import Repository
from accel.serve.process import serving
from accel.serve.process.serving import ServingProcess
from accel.serve.protocol import messages as proto
from accel.serve.protocol.inference import ServeError
from tests.support.serving import Start, linear


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, mode="explicit", models=("*",))


@pytest.fixture
def client(process: Any) -> Any:
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as made:
        yield made


def ask(client: Any, rows: int = 1) -> None:
    given = triton.InferInput("x", [rows, 4], "FP32")
    given.set_data_from_numpy(np.ones((rows, 4), dtype=np.float32))
    client.infer("linear", [given])


def test_server(client: Any) -> None:
    """Checks that the server reports its liveness and lists its extensions."""
    assert client.is_server_live()
    assert client.is_server_ready()
    metadata = client.get_server_metadata()
    assert (metadata.name, metadata.version) == ("accel", accel.__version__)
    assert {"statistics", "system_shared_memory", "binary_tensor_data"} <= set(metadata.extensions)


def test_model(client: Any) -> None:
    """Fails if the metadata lacks the batch dim, if the config contains the batch dim, or if an unknown model is
    ready."""
    metadata = client.get_model_metadata("linear")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("linear", ["1"], "onnxruntime_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", "FP32", [-1, 4])]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("y", "FP32", [-1, 3])]
    config = client.get_model_config("linear").config
    assert list(config.input[0].dims) == [4]
    assert config.max_batch_size == 8
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("linear", "2")
    assert not client.is_model_ready("nothing")
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing'"):
        client.get_model_metadata("nothing")


def test_statistics_add_up(client: Any) -> None:
    """Fails if the statistics leave out a request or a row, or count a request or a row twice. Also checks that a
    refused request counts as a failure."""
    for rows in (1, 2, 3):
        ask(client, rows)
    with pytest.raises(InferenceServerException):
        ask(client, 99)
    stats = client.get_inference_statistics("linear").model_stats
    assert [(s.name, s.version) for s in stats] == [("linear", "1")]
    assert stats[0].inference_stats.success.count == 3
    assert stats[0].inference_stats.fail.count == 1
    assert stats[0].inference_stats.success.ns > stats[0].inference_stats.compute_infer.ns > 0
    assert stats[0].last_inference > 1.7e12
    assert {s.name for s in client.get_inference_statistics().model_stats} == {"linear", "pair"}


def test_every_failure_is_counted(process: Any, client: Any) -> None:
    """Checks that the statistics count a request with an error as a failure, whether the error occurs before or after
    the run."""

    def refused(x: triton.InferInput, **options: Any) -> None:
        with pytest.raises(InferenceServerException):
            client.infer("linear", [x], **options)

    def given(name: str = "x", shape: tuple[int, ...] = (1, 4), kind: Any = np.float32) -> triton.InferInput:
        made = triton.InferInput(name, list(shape), {np.float32: "FP32", np.int32: "INT32"}[kind])
        made.set_data_from_numpy(np.ones(shape, kind))
        return made

    refused(given("z"))
    refused(given(shape=(1, 5)))
    refused(given(kind=np.int32))
    refused(given(), outputs=[triton.InferRequestedOutput("nothing")])
    nowhere = triton.InferInput("x", [1, 4], "FP32")
    nowhere.set_shared_memory("nothing", 16)
    refused(nowhere)
    ask(client)
    no_room = triton.InferRequestedOutput("y")
    no_room.set_shared_memory("nothing", 12)
    refused(given(), outputs=[no_room])  # the model runs, but the response can't be written
    ask(client)
    found = process.server.repository.get("linear").statistics()
    assert (found.received, found.success.count, found.fail.count) == (8, 2, 6)
    assert found.inference_count == 3
    assert sum(found.request_times.counts) == 2
    assert min(found.request_times.counts) == 0
    assert found.success.ns > 0
    process.server.drain(1)
    refused(given())
    found = process.server.repository.get("linear").statistics()
    assert (found.received, found.success.count, found.fail.count) == (9, 2, 7)


def test_load_and_unload(client: Any, repository: Path) -> None:
    """Checks that loading and unloading have an effect, and that the index shows the effect."""
    states = {m.name: m.state for m in client.get_model_repository_index().models}
    assert states == {"linear": "READY", "pair": "READY"}
    client.unload_model("linear")
    assert not client.is_model_ready("linear")
    with pytest.raises(InferenceServerException, match="unknown model: 'linear' is not found") as caught:
        ask(client)
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert {m.name: m.state for m in client.get_model_repository_index().models}["linear"] == "UNAVAILABLE"
    linear(repository / "later" / "1")
    client.load_model("later")
    client.load_model("linear")
    assert {m.name for m in client.get_model_repository_index().models if m.state == "READY"} == {
        "linear", "pair", "later",
    }  # fmt: skip
    ask(client)


def says(call: Any) -> str:
    """Returns the status code of the error that ``call`` raises, without the prefix "StatusCode."."""
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode.")


@pytest.mark.parametrize("name", ["../outside", "..", "../models/linear", "/outside", "linear/1", "linear/../linear"])
def test_names_that_lead_out_of_the_repository(client: Any, repository: Path, name: str) -> None:
    """Fails if a path in place of a model name loads, reaches or unloads a model, or gets the wrong code."""
    linear(repository.parent / "outside" / "1")
    x = triton.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    assert says(lambda: client.load_model(name)) == "INVALID_ARGUMENT"
    for call in (
        lambda: client.unload_model(name),
        lambda: client.infer(name, [x]),
        lambda: client.get_model_metadata(name),
        lambda: client.get_model_config(name),
        lambda: client.get_inference_statistics(name),
    ):
        assert says(call) == "NOT_FOUND"
    assert not client.is_model_ready(name)
    assert {m.name for m in client.get_model_repository_index().models} == {"linear", "pair"}
    ask(client)


@pytest.mark.parametrize("version", ["..", "../1", "../../outside/1", "1/../1", "/1"])
def test_versions_that_lead_out_of_the_model(client: Any, repository: Path, version: str) -> None:
    """Fails if a path in place of a version reaches a model, or gets the wrong code."""
    linear(repository.parent / "outside" / "1")
    x = triton.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    for call in (
        lambda: client.infer("linear", [x], model_version=version),
        lambda: client.get_model_metadata("linear", version),
        lambda: client.get_model_config("linear", version),
        lambda: client.get_inference_statistics("linear", version),
        lambda: client.is_model_ready("linear", version),
    ):
        assert says(call) == "INVALID_ARGUMENT"


def test_a_model_that_is_not_there(client: Any) -> None:
    """Fails if loading or unloading a missing model returns the wrong code."""
    assert says(lambda: client.load_model("nothing")) == "INTERNAL"
    assert says(lambda: client.unload_model("nothing")) == "NOT_FOUND"


def test_load_with_another_config(client: Any) -> None:
    """Checks that the config in a load request is used until the next load."""
    client.load_model("linear", config='{"max_batch_size": 2}')
    assert client.get_model_config("linear").config.max_batch_size == 2
    with pytest.raises(InferenceServerException, match="batch-size must be <= 2"):
        ask(client, 3)
    with pytest.raises(InferenceServerException, match="can't read the config"):
        client.load_model("linear", config="{")
    client.load_model("linear")
    assert client.get_model_config("linear").config.max_batch_size == 8
    with pytest.raises(InferenceServerException, match="--allow-model-upload"):
        client.load_model("linear", config="{}", files={"file:1/model.onnx": b"x"})


def test_settings(client: Any) -> None:
    """Checks that each setting is stored, that a model's setting leaves other models unchanged, and that invalid
    settings are refused."""
    assert client.get_trace_settings().settings["trace_level"].value == ["OFF"]
    client.update_trace_settings("linear", {"trace_rate": "7"})
    assert client.get_trace_settings("linear").settings["trace_rate"].value == ["7"]
    assert client.get_trace_settings().settings["trace_rate"].value == ["1000"]
    client.update_trace_settings("linear", {"trace_rate": None})
    assert client.get_trace_settings("linear").settings["trace_rate"].value == ["1000"]
    for settings in ({"trace_rate": "-7"}, {"nothing": "1"}, {"trace_level": "LOUD"}):
        with pytest.raises(InferenceServerException):
            client.update_trace_settings(settings=settings)
    client.update_log_settings({"log_verbose_level": 1})
    assert client.get_log_settings().settings["log_verbose_level"].uint32_param == 1
    for settings in ({"log_file": "/tmp/x"}, {"nothing": True}, {"log_format": "poem"}):
        with pytest.raises(InferenceServerException):
            client.update_log_settings(settings)


def test_cuda_memory_as_without_a_gpu(client: Any) -> None:
    """Checks that a server without a GPU refuses to register CUDA memory, and lists no CUDA memory in the status."""
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 8)
    client.unregister_cuda_shared_memory()


def test_every_method_is_there() -> None:
    """Fails if the server lacks a method of the protocol."""
    from accel.serve.transports.grpc.servicer import Servicer

    assert len(proto.methods()) == 20
    assert all(callable(getattr(Servicer, name)) for name in proto.methods())


def test_health(process: Any) -> None:
    """Fails if the standard health probe reports a wrong state while the server runs or drains."""
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = health_pb2.HealthCheckResponse
        assert stub.Check(health_pb2.HealthCheckRequest()).status == status.SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(service=proto.SERVICE)).status == status.SERVING
        process.server.drain(0.1)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == status.NOT_SERVING


def test_who_watches_the_health(repository: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a client that watches the server's health gets SERVING while models still load. Also checks that the
    client gets a new status when loading ends and when the server drains. With strict readiness, a broken model also
    has to change the status."""
    released = threading.Event()
    real = Repository.start

    def slowly(self: Repository) -> None:
        assert released.wait(60)
        real(self)

    monkeypatch.setattr(Repository, "start", slowly)
    found: queue.Queue[str] = queue.Queue()
    names = health_pb2.HealthCheckResponse.ServingStatus

    def watch(port: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                for said in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120):
                    found.put(names.Name(said.status))
            except grpc.RpcError:
                found.put("end")

    real_listen = ServingProcess._listen

    def listen(self: ServingProcess) -> None:
        real_listen(self)
        threading.Thread(target=watch, args=(self.ports["grpc"],), daemon=True).start()
        found.put(found.get(timeout=60))  # the first status arrives before the models load
        released.set()

    monkeypatch.setattr(ServingProcess, "_listen", listen)
    monkeypatch.setattr(serving, "_LAST_ANSWERS", 0.2)  # a client that watches never ends its call
    process = start(repository, mode="explicit", models=("*",), strict_readiness=True)
    assert [found.get(timeout=60) for _ in range(2)] == ["NOT_SERVING", "SERVING"]
    (repository / "broken" / "1").mkdir(parents=True)
    with pytest.raises(ServeError):
        process.server.repository.load("broken")
    assert found.get(timeout=60) == "NOT_SERVING"
    process.server.repository.unload("broken")
    assert found.get(timeout=60) == "SERVING"
    process.server.drain(0.1)
    assert found.get(timeout=60) == "NOT_SERVING"
    process.stop()
    assert found.get(timeout=60) == "end"


def test_reflection(process: Any) -> None:
    """Checks that a tool like grpcurl can list the services and read their messages."""
    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest
        asked = [request(list_services=""), request(file_containing_symbol=proto.SERVICE)]
        listed, described = stub.ServerReflectionInfo(iter(asked))
        names = {s.name for s in listed.list_services_response.service}
        assert {proto.SERVICE, "grpc.health.v1.Health"} <= names
        assert described.file_descriptor_response.file_descriptor_proto
