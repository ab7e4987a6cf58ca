"""Proves that the server serves OpenVINO models, exported programs and engines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from torch import nn

import accel
from accel.artifact import Manifest, file_sha256, manifest_path
from accel.runtimes import base
from accel.signature import DimRange, Signature, TensorSpec
from tests.support.engine_models import NEEDS_TOOLKIT, toolkit_of_this_gpu
from tests.support.serving import WEIGHTS, Start, ask, client, linear


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def exported(folder: Path) -> tuple[nn.Module, Path]:
    """Exports ``model.pt2`` with batches of 1 to 16. Returns the module and the file."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    net = Net().eval()
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(net, (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "model.pt2")
    return net, folder / "model.pt2"


@pytest.mark.proof
def test_an_exported_program(tmp_path: Path, serve: Any) -> None:
    """Checks that an exported program is served, that its dynamic batch is detected, and that its outputs match the
    module's outputs."""
    net, _ = exported(tmp_path / "models" / "net" / "1")
    linear(tmp_path / "models" / "linear" / "1")
    served = serve(str(tmp_path / "models"), "--allow-pickle")
    port = served.wait_for("serving")["ports"]["grpc"]
    with client(port) as made:
        config = made.get_model_config("net", as_json=True)["config"]
        assert (config["platform"], config["max_batch_size"]) == ("pytorch_libtorch", 16)
        [given] = made.get_model_metadata("net").inputs
        for rows in (1, 3, 8):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
            tensor = triton.InferInput(given.name, [rows, 4], "FP32")
            tensor.set_data_from_numpy(x)
            answer = made.infer("net", [tensor])
            with torch.inference_mode():
                wanted = net(torch.from_numpy(x)).numpy()
            [output] = answer.get_response().outputs
            np.testing.assert_allclose(answer.as_numpy(output.name), wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)
    assert served.end() == 0


def test_an_openvino_model(tmp_path: Path, serve: Any) -> None:
    """Checks that a model from ``accel export --to openvino`` is served over gRPC and HTTP, and that each caller gets
    its own rows."""
    made_from = linear(tmp_path / "linear")
    accel.export(made_from, to="openvino", out=tmp_path / "models" / "linear" / "1")
    served = serve(str(tmp_path / "models"))
    ports = served.wait_for("serving")["ports"]
    with client(ports["grpc"]) as made:
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports['http']}", network_timeout=60) as made:
        x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
        tensor = triton_http.InferInput("x", [3, 4], "FP32")
        tensor.set_data_from_numpy(x)
        np.testing.assert_allclose(made.infer("linear", [tensor]).as_numpy("y"), x @ WEIGHTS, rtol=1e-4, atol=1e-6)
    assert served.end() == 0


def test_an_exported_program_whose_manifest_does_not_hold(tmp_path: Path, start: Start) -> None:
    """Fails if an exported program that differs from its manifest is served."""
    _, path = exported(tmp_path / "models" / "net" / "1")
    signature = Signature(
        (TensorSpec("x", "float32", ("batch", 4)),),
        (TensorSpec("output", "float32", ("batch", 3)),),
        {"batch": DimRange(1, 2, 16)},
    )
    Manifest(kind="torch", signature=signature, files={path.name: file_sha256(path)}).write(manifest_path(path))
    process = start(tmp_path / "models", allow_pickle=True)
    assert process.server.model_ready("net")
    Manifest(kind="torch", signature=signature, files={path.name: "0" * 64}).write(manifest_path(path))
    process = start(tmp_path / "models", allow_pickle=True)
    [row] = process.server.index()
    assert "not the file its manifest describes" in row.reason
    process = start(tmp_path / "models", allow_pickle=True, insecure=True)
    assert process.server.model_ready("net")


def engine(folder: Path) -> Path:
    """Writes a file that isn't an engine, with a manifest for an engine."""
    folder.mkdir(parents=True)
    path = folder / "model.engine"
    path.write_bytes(b"engine")
    signature = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 3)),))
    files = {path.name: file_sha256(path)}
    Manifest(kind="engine", signature=signature, files=files).write(manifest_path(path))
    return path


def test_an_engine_without_a_gpu(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the error says that a GPU is missing, and that the other models are served."""
    monkeypatch.setattr(base, "has_nvidia_gpu", lambda: False)
    engine(tmp_path / "models" / "fast" / "1")
    manifest_path(engine(tmp_path / "models" / "bare" / "1")).unlink()
    linear(tmp_path / "models" / "linear" / "1")
    process = start(tmp_path / "models")
    rows = {row.name: row for row in process.server.index()}
    assert rows["fast"].state == rows["bare"].state == "UNAVAILABLE"
    assert "needs an NVIDIA GPU and this machine has none" in rows["fast"].reason
    assert "so the engine's inputs are unknown; build the engine again" in rows["bare"].reason
    with client(process.ports["grpc"]) as made:
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)
        with pytest.raises(triton.InferenceServerException) as caught:
            ask(made, "fast")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.gpu
@pytest.mark.skipif(toolkit_of_this_gpu() is None, reason=NEEDS_TOOLKIT)
def test_an_engine(tmp_path: Path, serve: Any) -> None:
    """Checks that an engine gives the same answers as the original ONNX model for batch sizes of the engine's
    profile."""
    from accel.converters.to_tensorrt.engine_from_onnx import EngineFromOnnxConfig
    from accel.sources.onnx.file import open_onnx
    from accel.stage import run_stage

    toolkit = toolkit_of_this_gpu()
    assert toolkit is not None
    source = open_onnx(linear(tmp_path / "source"), dims={"batch": DimRange(1, 2, 8)})
    folder = tmp_path / "models" / "linear" / "1"
    folder.mkdir(parents=True)
    run_stage("engine_from_onnx", source, EngineFromOnnxConfig(toolkit=toolkit), out=folder / "model.engine")
    served = serve(str(tmp_path / "models"))
    port = served.wait_for("serving")["ports"]["grpc"]
    with client(port) as made:
        assert made.get_model_config("linear", as_json=True)["config"]["platform"] == "tensorrt_plan"
        for rows in (1, 3, 8):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
            tensor = triton.InferInput("x", [rows, 4], "FP32")
            tensor.set_data_from_numpy(x)
            np.testing.assert_allclose(made.infer("linear", [tensor]).as_numpy("y"), x @ WEIGHTS, rtol=1e-2, atol=1e-2)
        tensor = triton.InferInput("x", [9, 4], "FP32")
        tensor.set_data_from_numpy(np.zeros((9, 4), np.float32))
        with pytest.raises(triton.InferenceServerException, match="batch-size must be <= 8"):
            made.infer("linear", [tensor])
    assert served.end() == 0


@pytest.mark.skipif(find_spec("ncnn") is None, reason="ncnn is not installed")
def test_an_ncnn_net(tmp_path: Path, start: Start) -> None:
    """Fails if the metadata of an ncnn model from ``accel export`` lacks the platform, or if the model's answers are
    wrong."""
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.ones(1, 4)
    accel.export(net, example=(x,), dynamic={}, to="ncnn", out=tmp_path / "net" / "1")
    with client(start(tmp_path).ports["grpc"]) as made:
        config = made.get_model_config("net", as_json=True)["config"]
        assert (config["platform"], config["backend"]) == ("ncnn", "ncnn")
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(x.numpy())
        [name] = [output.name for output in made.get_model_metadata("net").outputs]
        found = made.infer("net", [tensor]).as_numpy(name)
    with torch.inference_mode():
        np.testing.assert_allclose(found, net(x).numpy(), rtol=1e-3, atol=1e-4)
