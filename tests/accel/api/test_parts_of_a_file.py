"""Proves that optimize, bench and verify accept the options with which ``accel export`` selects a part of a TensorFlow
file. The part can lie between given tensors of a frozen graph, be one signature of a SavedModel, or be a net without
its dropout."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.errors import BadSource, UsageError

ENDS = ["--inputs", "x:0", "--outputs", "logits:0"]
NAMED = {"graph_inputs": ["x:0"], "graph_outputs": ["logits:0"]}


@pytest.fixture(scope="module")
def frozen_onnx(tensorflow_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("frozen") / "frozen.onnx"
    accel.export(tensorflow_models / "frozen.pb", out=out, **NAMED)
    return out


def test_optimize_of_a_frozen_graph(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if `accel optimize` refuses options that `accel export` takes for a frozen graph. Also fails if the command
    in the report leaves out the options for the frozen graph."""
    words = ["--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "--fixed-session"]
    ran = cli("optimize", tensorflow_models / "frozen.pb", *ENDS, *words, "-o", tmp_path / "out", "--json", "-q")
    assert ran.code == 0, ran.stderr
    again = shlex.split(json.loads(ran.stdout)["command"])
    assert again[again.index("--inputs") + 1] == "x:0"
    assert again[again.index("--outputs") + 1] == "logits:0"
    with np.load(tensorflow_models / "frozen.pb.npz") as wanted, accel.load(tmp_path / "out") as session:
        np.testing.assert_allclose(session.run({"x": wanted["x"]})["logits"], wanted["logits"], atol=1e-6)


@pytest.mark.proof(seconds=35)
def test_bench_against_a_frozen_graph(cli: Any, tensorflow_models: Path, frozen_onnx: Path) -> None:
    """Checks that bench can compare an ONNX candidate with a frozen graph as the baseline. The options --inputs and
    --outputs must apply only to the frozen graph."""
    words = ["--rounds", "5", "--block-seconds", "0.01", "--budget-seconds", "0", "--json", "-q"]
    ran = cli("bench", frozen_onnx, "--against", tensorflow_models / "frozen.pb", *ENDS, *words)
    assert ran.code == 0, ran.stderr
    rows = json.loads(ran.stdout)["results"]
    assert [(row["runtime"], row["error"]) for row in rows] == [("tensorflow", None), ("onnxruntime", None)], rows


def test_verify_of_parts(cli: Any, tensorflow_models: Path, frozen_onnx: Path, tmp_path: Path) -> None:
    """Checks that `accel verify` compares an exported ONNX file with its source, in either order. The source is a
    frozen graph, one signature of a SavedModel, or a net with dropout. The comparison must fail for a signature that
    was not exported."""
    frozen = tensorflow_models / "frozen.pb"
    for pair in ((frozen, frozen_onnx), (frozen_onnx, frozen)):
        ran = cli("verify", *pair, *ENDS, "-q")
        assert ran.code == 0, ran.stderr
    two = tensorflow_models / "two_signatures"
    square = accel.export(two, signature="square", out=tmp_path / "square.onnx")
    assert accel.verify(two, square, signature="square").passed
    assert not accel.verify(two, square, signature="double").passed
    stripped = accel.export(tensorflow_models / "dropout", strip_training_ops=True, out=tmp_path / "d.onnx")
    assert accel.verify(stripped, tensorflow_models / "dropout", strip_training_ops=True).passed
    with pytest.raises(BadSource, match="pass strip_training_ops=True"):
        accel.verify(stripped, tensorflow_models / "dropout")


@pytest.mark.parametrize("command", ["verify", "bench", "optimize", "export"])
def test_nothing_is_named_in_vain(cli: Any, frozen_onnx: Path, tmp_path: Path, command: str) -> None:
    """Checks that the command refuses an option that doesn't apply to any of the given models."""
    words: list[Any] = {
        "verify": [frozen_onnx, frozen_onnx],
        "bench": [frozen_onnx],
        "optimize": [frozen_onnx, "-o", tmp_path / "out"],
        "export": [frozen_onnx, "--opset", "17", "-o", tmp_path / "m.onnx"],
    }[command]
    for option in (["--signature", "square"], ["--inputs", "x:0"], ["--strip-training-ops"]):
        ran = cli(command, *words, *option, "-q")
        assert ran.code == UsageError.exit_code
        assert option[0] in ran.stderr
        assert "leave" in ran.stderr
