"""Proves that clients can use an ensemble of a repository like a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.support.onnx_builder import artifact, node
from tests.support.serving import ENSEMBLE, FLOAT, INT64, WEIGHTS, Start, linear


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.pbtxt").write_text(ENSEMBLE)
    linear(root / "linear" / "1")
    (root / "relu" / "1").mkdir(parents=True)
    shape = ["batch", 3]
    artifact(root / "relu" / "1" / "model.onnx", [node("Relu", "x", "z")], {"x": (FLOAT, shape)}, {"z": (FLOAT, shape)})
    return root


def test_an_ensemble(models: Path, start: Start) -> None:
    """Checks that the steps run one after the other, on the versions that are served now. Also checks that a client can
    use the metadata and the statistics of an ensemble in the same way as for a model."""
    process = start(models, mode="explicit", models=("*",))
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    given = triton.InferInput("image", [2, 4], "FP32")
    given.set_data_from_numpy(x)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        found = client.infer("both", [given]).as_numpy("score")
        np.testing.assert_allclose(found, np.maximum(x @ WEIGHTS, 0), rtol=1e-5)
        metadata = client.get_model_metadata("both")
        assert (metadata.platform, list(metadata.inputs[0].shape)) == ("ensemble", [-1, 4])
        linear(models / "linear" / "1", scale=2.0)
        client.load_model("linear")
        found = client.infer("both", [given]).as_numpy("score")
        np.testing.assert_allclose(found, np.maximum(2 * x @ WEIGHTS, 0), rtol=1e-5)
        client.unload_model("relu")
        with pytest.raises(InferenceServerException, match="relu"):
            client.infer("both", [given])
        assert client.get_inference_statistics("both").model_stats[0].inference_stats.success.count == 2


def test_one_number_a_row(models: Path, start: Start) -> None:
    """Checks that an ensemble can return an output with only the batch dim, such as a class number or a score."""
    (models / "relu" / "1" / "model.onnx").unlink()
    artifact(
        models / "relu" / "1" / "model.onnx",
        [node("ArgMax", "x", "z", axis=1, keepdims=0)],
        {"x": (FLOAT, ["batch", 3])},
        {"z": (INT64, ["batch"])},
    )
    (models / "both" / "config.pbtxt").write_text(ENSEMBLE.replace("TYPE_FP32 dims: [3]", "TYPE_INT64"))
    process = start(models)
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    given = triton.InferInput("image", [5, 4], "FP32")
    given.set_data_from_numpy(x)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        found = client.infer("both", [given]).as_numpy("score")
    np.testing.assert_array_equal(found, (x @ WEIGHTS).argmax(1))


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_unloading_an_ensemble(models: Path, start: Start, face: str) -> None:
    """Checks that unloading an ensemble unloads the models of its steps only on request. Also fails if unloading an
    ensemble unloads other models."""
    linear(models / "other" / "1")
    process = start(models, mode="explicit", models=("*",), http_port=0)
    module = triton if face == "grpc" else triton_http
    with module.InferenceServerClient(f"127.0.0.1:{process.ports[face]}") as client:

        def loaded() -> set[str]:
            return {name for name in ("both", "linear", "relu", "other") if client.is_model_ready(name)}

        client.unload_model("both")
        assert loaded() == {"linear", "relu", "other"}
        client.load_model("both")
        client.unload_model("linear", unload_dependents=True)  # this model isn't an ensemble
        assert loaded() == {"both", "relu", "other"}
        client.load_model("linear")
        client.unload_model("both", unload_dependents=True)
        assert loaded() == {"other"}
