"""Proves that export strips or refuses training ops in TensorFlow models: dropout, random ops, assigned variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import accel
from accel.errors import BadSource, UsageError


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


ENDS = {"graph_inputs": ["x"], "graph_outputs": ["noise"]}
FACTORY = """
import tensorflow as tf

class Net(tf.Module):
    def __init__(self):
        self.scale = tf.Variable([1.0, 2.0, 3.0])

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def __call__(self, x):
        return {"y": tf.nn.dropout(x, 0.5) * self.scale}

NET = Net()

def make():
    return NET.__call__
"""


@pytest.mark.parametrize("name", ["dropout.pb", "dropout_tf1.pb"])
def test_dropout_left_in_a_graph(cli: Any, tensorflow_models: Path, tmp_path: Path, name: str) -> None:
    """Checks that a graph with dropout isn't exported unchanged, and that the error names the random op. Also fails if
    the stripped graph differs from the same net without dropout."""
    words = ["export", tensorflow_models / name, "--inputs", "x:0", "--outputs", "logits:0", "-o", tmp_path / "m.onnx"]
    ran = cli(*words, "-q")
    assert ran.code == 2
    assert "RandomUniform" in ran.stderr
    assert "--strip-training-ops" in ran.stderr
    assert not (tmp_path / "m.onnx").exists()
    assert cli(*words, "-q", "--strip-training-ops").code == 0
    model = onnx.load(str(tmp_path / "m.onnx"))
    assert not {node.op_type for node in model.graph.node} & {"RandomUniform", "RandomUniformLike", "Mul", "Div"}
    wanted = arrays(tensorflow_models / f"{name}.npz")  # TensorFlow computed these outputs for the net without dropout
    with accel.load(tmp_path / "m.onnx") as session:
        np.testing.assert_allclose(session.run({"x": wanted["x"]})["logits"], wanted["logits"], atol=1e-6)


@pytest.mark.proof
def test_dropout_left_in_a_model_that_is_no_bare_graph(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that the error suggests --strip-training-ops. Also checks that --strip-training-ops works on a SavedModel
    and on a model from a Python function. Also fails if the outputs of the stripped net differ from the net's outputs
    at inference."""
    code = tmp_path / "net.py"
    code.write_text(FACTORY)
    x = np.float32([[1, 2, 3], [-4, 5, 6]])
    wanted = arrays(tensorflow_models / "dropout.npz")
    for source, feeds, name, value in (
        (tensorflow_models / "dropout", wanted["x"], "logits", wanted["logits"]),
        (f"{code}:make", x, "y", x * [1, 2, 3]),
    ):
        words = ["export", source, "-o", tmp_path / "m.onnx", "-q"]
        ran = cli(*words)
        assert ran.code == 2
        assert "pass --strip-training-ops" in ran.stderr
        ran = cli(*words, "--strip-training-ops")
        assert ran.code == 0, ran.stderr
        with accel.load(tmp_path / "m.onnx") as session:
            np.testing.assert_allclose(session.run({"x": feeds})[name], value, atol=1e-6)


def test_inspect_of_a_saved_model_with_dropout(tensorflow_models: Path) -> None:
    """Checks that a SavedModel with dropout can be inspected, and that a warning names the dropout's random op."""
    graph = accel.inspect(tensorflow_models / "dropout").graph
    assert any("StatelessRandomUniformV2" in warning for warning in graph["warnings"])
    assert graph["parameters"] == 6 * 4 + 4 + 4 * 2 + 2


@pytest.mark.parametrize(("name", "output"), [("sampler", "drawn"), ("noise.tflite", "place")])
def test_whole_numbers_that_are_random(tensorflow_models: Path, tmp_path: Path, name: str, output: str) -> None:
    """Fails if export accepts a model that returns random integers. In this test, the names of the ops don't reveal the
    randomness. Also fails if the error for a TFLite file names an option that has no effect on TFLite. (In TFLite, only
    repeated runs reveal randomness.)"""
    with pytest.raises(BadSource, match=f"the output '{output}' of .* differs from run to run") as caught:
        accel.export(tensorflow_models / name, out=tmp_path / "m.onnx")
    assert ("strip_training_ops=True" in str(caught.value)) == (name == "sampler")


@pytest.mark.parametrize(
    ("name", "kind", "words", "options"),
    [
        ("norm", BadSource, "saved for training", {}),
        ("norm", BadSource, "saved for training", {"strip_training_ops": True}),
        ("noise.tflite", UsageError, "export the SavedModel or Keras file", {"strip_training_ops": True}),
        ("noise.pb", BadSource, "found no dropout in these ops", {"strip_training_ops": True, **ENDS}),
    ],
)
def test_what_is_left_is_refused_once(
    tensorflow_models: Path, tmp_path: Path, name: str, kind: type[Exception], words: str, options: dict[str, Any]
) -> None:
    """Fails if export accepts a model that updates its batch statistics at every call. Also fails if the error suggests
    strip_training_ops to a user who already passed this option."""
    with pytest.raises(kind, match=words) as caught:
        accel.export(tensorflow_models / name, out=tmp_path / "m.onnx", **options)
    assert "pass strip_training_ops" not in str(caught.value)
    assert not (tmp_path / "m.onnx").exists()
