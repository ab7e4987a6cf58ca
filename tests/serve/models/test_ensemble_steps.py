"""Proves that loading an ensemble checks its steps and loads the models of the steps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from accel.serve.models.repository import Repository
from tests.support.onnx_builder import artifact, node
from tests.support.serving import ENSEMBLE, FLOAT, INT64, WEIGHTS, Start, linear

CONFIG = ENSEMBLE.replace('"relu" model_version: 1', '"relu" model_version: -1')


def ensemble(root: Path, config: str = CONFIG, name: str = "both") -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)


def relu(root: Path, dtype: int = FLOAT, size: int = 3) -> None:
    (root / "relu" / "1").mkdir(parents=True, exist_ok=True)
    shape = ["batch", size]
    op = "Relu" if dtype == FLOAT else "Abs"
    artifact(root / "relu" / "1" / "model.onnx", [node(op, "x", "z")], {"x": (dtype, shape)}, {"z": (dtype, shape)})


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    ensemble(root)
    linear(root / "linear" / "1")
    relu(root)
    return root


def reason(root: Path, name: str = "both") -> str:
    """Returns the reason why a model of the repository isn't served, or "" if the model is served."""
    repository = Repository(root)
    try:
        repository.start()
        return next(row.reason for row in repository.index() if row.name == name)
    finally:
        repository.close(1.0)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"relu"', '"nothing"', "depends on 'nothing', which is not served"),
        ('"relu" model_version: -1', '"relu" model_version: 7', "'relu' version 7 is not found"),
        ('key: "y"', 'key: "other"', "maps the output 'other' of step 'linear', which has only: y"),
        ('key: "x" value: "image"', 'key: "pixels" value: "image"', "maps the input 'pixels' of step 'linear'"),
        ('input_map { key: "x" value: "raw" }', "", "maps no tensor to the input 'x' of step 'relu'"),
        ("TYPE_FP32 dims: [4]", "TYPE_FP64 dims: [4]", "the ensemble's input is FP64 .* step 'linear' takes FP32"),
        ("dims: [4]", "dims: [5]", r"\[-1,5\] and step 'linear' takes FP32 \[-1,4\]"),
        ("dims: [3]", "dims: [2]", r"step 'relu' makes FP32 \[-1,3\] and the ensemble's output is FP32 \[-1,2\]"),
        ("max_batch_size: 8", "max_batch_size: 9", "'linear' which allows maximum batch size 8"),
        (
            "max_batch_size: 8",
            "max_batch_size: 8 response_cache { enable: true }",
            "can't have the field response_cache",
        ),
        ("max_batch_size: 8", "max_batch_size: 8 instance_group { count: 2 }", "can't have the field instance_group"),
        ("dims: [4]", "dims: [4] optional: true", "the input can't be optional; remove optional"),
        ("dims: [4]", "dims: [4] reshape { shape: [2, 2] }", "'image': reshape is not supported"),
        ("dims: [4]", "dims: [-1]", ""),
    ],
)
def test_steps_that_do_not_fit(models: Path, before: str, after: str, said: str) -> None:
    """Checks that the server refuses an ensemble whose config contradicts the models of the steps. A dynamic dim in the
    config must be accepted, because its size may match."""
    assert before in CONFIG
    ensemble(models, CONFIG.replace(before, after, 1))
    found = reason(models)
    assert bool(found) == bool(said)
    assert re.search(said, found), found


def test_steps_that_disagree(models: Path) -> None:
    """Checks that the output of a step is compared with the input of the next step."""
    relu(models, INT64)
    assert "step 'linear' makes FP32 [-1,3] and step 'relu' takes INT64 [-1,3]; make the types agree" in reason(models)


def test_check_finds_a_broken_step(models: Path, cli: Any) -> None:
    """Fails if ``--check`` accepts an ensemble with a step that can't be loaded."""
    (models / "relu" / "1" / "model.onnx").write_bytes(b"nothing")
    found = cli("serve", models, "--check", "--json")
    assert found.code == 1
    rows = {row["name"]: row for row in json.loads(found.stdout)["models"]}
    assert (rows["linear"]["state"], rows["relu"]["state"], rows["both"]["state"]) == (
        "READY", "UNAVAILABLE", "UNAVAILABLE",
    )  # fmt: skip
    assert "depends on 'relu', which is not served" in rows["both"]["reason"]


def test_ensembles_of_ensembles_in_any_order(models: Path) -> None:
    """Checks that the models of the steps load before the ensemble, even if the ensemble's name comes first in the
    alphabet. Also fails if an ensemble that contains itself keeps the server from starting."""
    outer = CONFIG.replace('"linear"', '"both"').replace('key: "x" value: "image"', 'key: "image" value: "image"')
    ensemble(models, outer.replace('key: "y"', 'key: "score"'), name="a")
    ensemble(models, CONFIG.replace('"relu"', '"circle"'), name="circle")
    repository = Repository(models)
    try:
        repository.start()
        states = {row.name: row.state for row in repository.index()}
        assert states.pop("circle") == "UNAVAILABLE"
        assert set(states.values()) == {"READY"}, states
    finally:
        repository.close(1.0)


def test_a_step_that_comes_later(models: Path) -> None:
    """Checks that an ensemble with a missing step is served as soon as the step is loaded, without a change in the
    ensemble's own folder."""
    shutil.move(models / "relu", models.parent / "relu")
    repository = Repository(models, mode="poll", poll_seconds=3600)
    try:
        repository.start()
        assert repository.broken() == ["both"]
        shutil.move(models.parent / "relu", models / "relu")
        repository.poll_once()
        assert repository.broken() == []
        assert sorted(repository.loaded()) == ["both", "linear", "relu"]
    finally:
        repository.close(1.0)


def test_loading_an_ensemble_loads_its_steps(models: Path, start: Start) -> None:
    """Checks that loading an ensemble loads its steps, and doesn't reload a step that is already served. Also checks
    that the error names the step that can't be loaded."""
    process = start(models, mode="explicit", models=("linear",))
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    given = triton.InferInput("image", [2, 4], "FP32")
    given.set_data_from_numpy(x)
    serving = process.server.repository.get("linear")
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        client.load_model("both")
        np.testing.assert_allclose(client.infer("both", [given]).as_numpy("score"), np.maximum(x @ WEIGHTS, 0), 1e-5)
        assert process.server.repository.get("linear") is serving
        for name in ("both", "relu"):
            client.unload_model(name)
        (models / "relu" / "1" / "model.onnx").unlink()
        with pytest.raises(InferenceServerException, match="depends on 'relu', which is not served") as caught:
            client.load_model("both")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert not client.is_model_ready("both")


def test_a_token_needs_the_steps_too(models: Path, start: Start, tmp_path: Path) -> None:
    """Fails if loading an ensemble loads models that the caller's token may not control."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "own"\ntoken = "secret"\nmodels = ["both", "linear"]\ncontrol = true\n')
    process = start(models, mode="explicit", tokens=str(tokens))
    with (
        triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client,
        pytest.raises(InferenceServerException, match="doesn't allow model 'relu'"),
    ):
        client.load_model("both", headers={"authorization": "Bearer secret"})
    assert process.server.repository.loaded() == []
