"""Proves that accel optimize compares all targets that the user names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from accel.cli import group, run
from accel.cli.optimize import command
from accel.errors import UsageError
from accel.optimizer.recipes import candidates
from accel.optimizer.recipes.candidates import targets_for
from tests.support.onnx_builder import FLOAT, artifact, node


def test_several_targets_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a repeated --target replaces the earlier target. Also fails if the command in the report lacks a
    target."""
    model = artifact(
        tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (FLOAT, ["batch", 3])}, {"y": (FLOAT, ["batch", 3])}
    )
    words = ["--target", "ort-cpu", "--target", "openvino", "--target", "ort-cpu", "--precision", "fp32"]
    line = [
        "optimize",
        str(model.path),
        *words,
        "--rounds",
        "5",
        "--fixed-session",
        "-o",
        str(tmp_path / "out"),
        "--json",
        "-q",
    ]
    assert run(group, line) == 0
    body = json.loads(capsys.readouterr().out)
    made = [row for row in body["candidates"] if row["name"] != "source"]
    assert {row["target"] for row in made} == {"ort-cpu", "openvino"}
    assert len({row["name"] for row in made}) == len(made)
    again = shlex.split(body["command"])
    assert command.make_context("optimize", again[2:]).params["target"] == ("ort-cpu", "openvino", "ort-cpu")


def test_targets_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the list of targets contradicts itself, or if a target that can't be measured here is compared with
    others."""
    assert targets_for(()) == targets_for("auto") == targets_for(("auto", "auto"))
    assert [target.name for target in targets_for(("openvino", "ort-cpu", "openvino"))] == ["openvino", "ort-cpu"]
    with pytest.raises(UsageError, match="leave out either target='auto' or the other targets"):
        targets_for(("auto", "ort-cpu"))

    class Absent:
        installed = True

        @staticmethod
        def runnable() -> bool:
            return False

    monkeypatch.setattr(candidates, "get_runtime", lambda _: Absent)
    assert [target.name for target in targets_for("tensorrt")] == ["tensorrt"]
    with pytest.raises(UsageError, match=r"ort-cpu can't run on this machine, .*; give target='ort-cpu' alone"):
        targets_for(("ort-cpu", "tensorrt"))
