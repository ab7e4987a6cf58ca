"""Proves that every error about the inputs and outputs of a frozen graph names tensors to pass instead."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ("x:3", "logits:0", "has no tensor x:3"),
        ("x:a", "logits:0", "has no tensor x:a"),
        ("q:0", "logits:0", "has no tensor q:0"),
        ("logits:0", "x:0", "the outputs x:0 of the graph"),
        ("logits:0,x:0", "x:0", "don't depend on the input logits:0; leave it out: --inputs x:0 --outputs x:0, or"),
        ("", "logits:0", "doesn't name its inputs and outputs"),
    ],
)
def test_following_the_advice(
    cli: Any, tensorflow_models: Path, tmp_path: Path, inputs: str, outputs: str, said: str
) -> None:
    """Fails if an error about the tensors of a frozen graph has no next step, or if the export with the tensors that
    the error names fails."""
    words = ["export", tensorflow_models / "frozen.pb", "-o", tmp_path / "m.onnx", "-q"]
    ran = cli(*words, "--inputs", inputs, "--outputs", outputs)
    assert ran.code == 2
    assert said in ran.stderr
    advised = re.search(r"pass tensors of the graph, e\.g\. (.*)$", ran.stderr.strip())
    assert advised, ran.stderr
    assert cli(*words, *shlex.split(advised[1])).code == 0


def test_an_operator_without_onnx_form() -> None:
    """Fails if the error for an operator in a frozen graph doesn't name the options that cut the graph."""
    from accel.converters.from_tensorflow.conversion import _not_converted
    from accel.sources.tensorflow.source import TensorFlowSpec
    from accel.spelling import on_command_line

    with on_command_line():
        said = str(_not_converted(TensorFlowSpec(form="graph", path="g.pb"), ["StringLength"]))
    assert said.endswith("name tensors behind or before it with --inputs or --outputs")
