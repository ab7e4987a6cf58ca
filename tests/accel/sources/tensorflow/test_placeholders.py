"""Proves that accel sets a frozen graph's training placeholders, which inference doesn't need. Also proves that accel
asks the user for the values of other placeholders. Training placeholders are keep probabilities, training switches and
standard deviations of noise."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import accel
from accel.errors import BadInputSpec, BadSource, RandomOps, UsageError

ENDS: dict[str, Any] = {"graph_inputs": ["x"], "graph_outputs": ["y"]}
WORDS = ["--inputs", "x:0", "--outputs", "y:0", "-q"]
# The outputs of these graphs depend on a placeholder, and only the user knows the right value of this placeholder.
UNKNOWN = {"scale", "scale_and_dropout", "branches", "labels"}
DEFAULTS = {"keep_prob_default_of_inference", "learning_phase"}


@pytest.fixture(scope="module")
def graphs(shared: Path, one_worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that ``frozen_graphs.py`` writes."""
    folder = shared / "frozen_graphs"
    made = folder.with_name("frozen_graphs-unfinished")
    script = Path(__file__).with_name("frozen_graphs.py")
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("t"))}
    with one_worker("frozen_graphs"):
        if not folder.exists():
            made.mkdir()
            words = [sys.executable, "-W", "ignore", str(script), str(made)]
            ran = subprocess.run(words, capture_output=True, text=True, env=environment)
            assert ran.returncode == 0, ran.stderr[-2000:]
            made.rename(folder)
    return folder


def opened(path: Path, **options: Any) -> dict[str, str]:
    """Opens a graph, checks its outputs at inference, and returns the values of the placeholders that accel set."""
    artifact = accel.Source(path, **ENDS, **options).open()
    with np.load(path.with_suffix(".npz")) as known, accel.load(artifact) as session:
        np.testing.assert_allclose(session.run({"x": known["x"]})["y"], known["y"], atol=1e-5)
    values: dict[str, str] = artifact.source["loading"].get("placeholders", {})
    return values


QUICK = {"keep_prob", "dropout_in_switch_with_keep", "norm_in_if", "stddev", "function_in_function", "scale"}


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_what_strip_training_ops_sets(graphs: Path, quick: bool) -> None:
    """Checks that accel sets every training placeholder to its value at inference. If accel doesn't know the right
    value of a placeholder, accel must ask the user. Also fails if the outputs of the opened graph differ from
    TensorFlow's outputs at inference."""
    values = json.loads((graphs / "values.json").read_text())
    for name in QUICK if quick else set(values) - QUICK:
        if name in UNKNOWN:
            with pytest.raises(BadSource, match="needs a value for the placeholder"):
                accel.Source(graphs / f"{name}.pb", **ENDS, strip_training_ops=True).open()
            continue
        right = {key: str(value) for key, value in values[name].items()}
        said = opened(graphs / f"{name}.pb", strip_training_ops=True)
        assert said.items() <= right.items(), name
        left = set(right) - set(said)
        # Accel sets no value if a placeholder's default is right, or if only a branch that never runs uses the
        # placeholder.
        assert not left or "with_keep" in name or name in DEFAULTS, name


@pytest.mark.parametrize("name", ["dropout_in_switch_with_keep", "norm_by_where", "constant_dropout_too"])
def test_export(graphs: Path, tmp_path: Path, name: str) -> None:
    """Fails if the ONNX file still holds a training op, a branch or a placeholder. Also fails if the outputs differ
    from TensorFlow's outputs with the placeholders set for inference."""
    made = accel.export(graphs / f"{name}.pb", out=tmp_path / "m.onnx", strip_training_ops=True, **ENDS)
    model = onnx.load(str(tmp_path / "m.onnx"))
    assert [value.name for value in model.graph.input] == ["x"]
    assert not {"If", "RandomUniform", "RandomUniformLike", "Where"} & {node.op_type for node in model.graph.node}
    with np.load(graphs / f"{name}.npz") as known, accel.load(made) as session:
        np.testing.assert_allclose(session.run({"x": known["x"]})["y"], known["y"], atol=1e-5)


def test_the_advice_works(cli: Any, graphs: Path, tmp_path: Path) -> None:
    """Checks that the error names each placeholder, and that both fixes in the error work. Also checks that export
    prints the values of the placeholders, and that each of two ``--outputs`` options adds an output."""
    words = ["export", graphs / "norm_and_dropout.pb", *WORDS, "--outputs", "MatMul:0", "-o", tmp_path / "m.onnx"]
    ran = cli(*words)
    assert ran.code == RandomOps.exit_code
    assert "the placeholders is_training, keep_prob" in ran.stderr
    fixes = re.findall(r"pass (.*) for inference, or (--strip-training-ops)", ran.stderr)[0]
    for fix in fixes:
        ran = cli(*words, *shlex.split(fix))
        assert ran.code == 0, ran.stderr
        assert "set the placeholders" in ran.stderr
        assert "is_training=False" in ran.stderr
    loading = json.loads((tmp_path / "m.onnx.manifest.json").read_text())["source"]["loading"]
    assert loading["placeholders"] == {"is_training": "False", "keep_prob": "1.0"}
    assert len(onnx.load(str(tmp_path / "m.onnx")).graph.output) == 2
    assert cli("reproduce", tmp_path / "m.onnx", "-q").code == 0


def test_a_placeholder_without_one_sensible_value(cli: Any, graphs: Path, tmp_path: Path) -> None:
    """Checks that the error names the placeholder. Also checks that the user can make the placeholder an input, or set
    its value."""
    words = ["export", graphs / "scale_and_dropout.pb", "--outputs", "y:0", "-q", "-o", tmp_path / "m.onnx"]
    ran = cli(*words, "--inputs", "x:0")
    assert ran.code == BadSource.exit_code
    asked = re.findall(r"pass (--inputs .*), or pass (--placeholder .*)", ran.stderr)[0]
    assert cli(*words, *shlex.split(asked[0])).code == 0
    ran = cli(*words, "--inputs", "x:0", *shlex.split(asked[1].replace("VALUE", "0.5")))
    assert ran.code == 0, ran.stderr
    with np.load(graphs / "scale_and_dropout.npz") as known, accel.load(tmp_path / "m.onnx") as session:
        np.testing.assert_allclose(session.run({"x": known["x"]})["y"], known["y"], atol=1e-5)
    with pytest.raises(BadSource, match=r"pass graph_inputs=\['x:0', 'labels:0'\]$"):
        accel.Source(graphs / "labels.pb", **ENDS).open()


def test_defaults(graphs: Path) -> None:
    """If the default value of a placeholder is right for inference, accel must keep this value, and must not ask the
    user. Also fails if accel silently uses a default value that is right only for training."""
    assert opened(graphs / "keep_prob_default_of_inference.pb") == {}
    for name in ("training_by_default", "keep_prob_default"):
        with pytest.raises(RandomOps, match="needs a value for the placeholder"):
            accel.Source(graphs / f"{name}.pb", **ENDS).open()


def test_values_that_can_not_be_set(cli: Any, graphs: Path, tmp_path: Path) -> None:
    """Checks that accel refuses a value of the wrong type, an unknown placeholder and the name of an input. The errors
    must name a fix."""
    for given, words in (
        ({"keep_prob": "much"}, r"float32 and can't take the value 'much'; pass e.g. placeholders={'keep_prob': 1.0}"),
        ({"is_training": 2}, "the dtype bool and can't take the value '2'"),
        ({"keep": 1.0}, "no placeholder 'keep'; the placeholders for .* are: is_training, keep_prob"),
        ({"x": 1.0}, "x is an input of .*; leave x out of placeholders="),
    ):
        with pytest.raises(BadInputSpec, match=words):
            accel.Source(graphs / "norm_and_dropout.pb", **ENDS, placeholders=given).open()
    with pytest.raises(RandomOps, match="still holds random ops"):
        accel.Source(graphs / "keep_prob.pb", **ENDS, placeholders={"keep_prob": 0.5}).open()
    ran = cli("export", graphs / "keep_prob.pb", *WORDS, "--placeholder", "keep_prob", "-o", tmp_path / "m.onnx")
    assert (ran.code, "write NAME=VALUE" in ran.stderr) == (BadInputSpec.exit_code, True)
    code = tmp_path / "net.py"
    code.write_text("import keras\n\ndef make():\n    return keras.Sequential()\n")
    with pytest.raises(UsageError, match=r"has no placeholders; leave out placeholders="):
        accel.Source(f"{code}:make", placeholders={"keep_prob": 1.0}).open()


def test_inspect(graphs: Path) -> None:
    """Checks that inspect accepts a graph although ``graph_inputs`` leaves out the graph's training placeholders."""
    graph = accel.inspect(graphs / "norm_and_dropout.pb", **ENDS).graph
    assert "needs a value for the placeholders" in graph["warnings"][0]


def test_a_signature_that_leaves_out_a_placeholder(cli: Any, graphs: Path, tmp_path: Path) -> None:
    """The signature of a TF1 SavedModel leaves out a keep probability. Checks that the error advises the user to pass a
    value, and that the export succeeds with this value."""
    words = ["export", graphs / "omits", "-q", "-o", tmp_path / "m.onnx"]
    ran = cli(*words)
    assert "placeholder keep_prob, left out of the signature; pass --placeholder keep_prob=1.0 for" in ran.stderr
    assert cli(*words, "--placeholder", "keep_prob=1.0").code == 0
    x = np.float32([[1, 2, 3, 4]])
    with accel.load(tmp_path / "m.onnx") as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], [[10, 10, 10]], atol=1e-5)


def test_a_branch_that_assigns_to_a_variable(graphs: Path, tmp_path: Path) -> None:
    """Checks that accel converts a SavedModel with a batch normalization that has a branch for training. If the user
    sets a placeholder that is an input, accel must raise an error."""
    made = accel.export(graphs / "assigns", out=tmp_path / "m.onnx")
    x = np.float32([[1, 2, 3, 4]])
    with accel.load(made) as session:
        wanted = (x - [0.1, 0.2, 0.3, 0.4]) / np.sqrt([1.001, 2.001, 3.001, 4.001])
        np.testing.assert_allclose(session.run({"x": x})["y"], wanted, atol=1e-5)
    with pytest.raises(BadSource, match=r"every placeholder of .* is an input; leave out placeholders="):
        accel.Source(graphs / "assigns", placeholders={"keep_prob": 1.0}).open()


def test_a_cut_at_a_tensor_that_is_no_placeholder(graphs: Path) -> None:
    """Checks that a graph can be cut at the output of an operator."""
    ends = {"graph_inputs": ["MatMul"], "graph_outputs": ["y"]}
    found = accel.Source(graphs / "norm_and_dropout.pb", **ends, strip_training_ops=True).open()
    assert [str(spec) for spec in found.signature.inputs] == ["MatMul:float32[batch,4]"]
