"""Proves that the error for a mistyped path names the path that the user may mean, and that the error for a hub id
without an organization says how to write the id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import accel
from accel.errors import AccelError, BadSource
from accel.sources.source import Source
from tests.support import onnx_builder as build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``img_out/model.onnx``, and makes its parent the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img_out").mkdir()
    shape = (TensorProto.FLOAT, ["batch", 2])
    nodes = [build.node("Tanh", "x", "y")]
    build.artifact(tmp_path / "img_out" / "model.onnx", nodes, {"x": shape}, {"y": shape})
    (tmp_path / "net.py").write_text("import torch\nmake = torch.nn.Identity\n")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("img_outt/", "img_out"),
        ("img_ou", "img_out"),
        ("img_out/modell.onnx", "img_out/model.onnx"),
        ("nett.py:make", "net.py"),
        ("something_else/", ""),
    ],
)
def test_a_mistyped_path(folder: Path, typed: str, meant: str) -> None:
    """Fails if the error doesn't name the path with almost the same name, or names an unlike path."""
    with pytest.raises(AccelError) as failed:
        Source(typed).open()
    said = str(failed.value)
    assert typed.rpartition(":")[0] in said or typed in said  # the message repeats what the user typed, unchanged
    assert (
        (f"give {meant} if you mean that" in said or f"did you mean {meant}?" in said)
        if meant
        else ("mean" not in said)
    )


def test_following_the_advice(folder: Path, cli: Any) -> None:
    """Fails if the path that accel verify advises doesn't work."""
    data = build.save_data(folder / "d.npz", x=np.ones((2, 2), np.float32))
    ran = cli("verify", "img_out/model.onnx", "img_outt/", "--data", data)
    assert ran.code == 2
    assert "give img_out if you mean that" in ran.stderr
    assert cli("verify", "img_out/model.onnx", "img_out", "--data", data).code == 0


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("distilbert-base-uncased", "distilbert/distilbert-base-uncased"),
        ("gpt2", "openai-community/gpt2"),
        ("all-MiniLM-L6-v2", "ORGANIZATION/all-MiniLM-L6-v2"),
        ("img/out/", ""),
    ],
)
def test_a_hub_id_without_its_organization(folder: Path, spec: str, advice: str) -> None:
    """Fails if the error for a model's name without an organization doesn't say that ids need one."""
    with pytest.raises(AccelError) as failed:
        Source(spec).open()
    said = str(failed.value)
    assert (f"for a model of the Hugging Face Hub {advice}" in said) == bool(advice)


def test_a_folder_that_is_no_model(folder: Path) -> None:
    """Fails if the error for a folder without a model of its own doesn't name the models in it, if a model that the
    error names doesn't open, or if the error for a folder without models doesn't say what to give."""
    (folder / "code").mkdir()
    for empty, what in ((folder / "code", "FILE.py"), (folder / "code", str(folder / "code" / "net.py"))):
        with pytest.raises(BadSource, match="holds no model; give a model's file, ") as failed:
            accel.load(empty)
        assert f"{what}:FUNCTION for a function" in str(failed.value)
        (empty / "net.py").write_text("import torch\nmake = torch.nn.Identity\n")
    for place in (".", str(folder)):
        with pytest.raises(BadSource, match="is no model itself; give a model in it, such as ") as failed:
            accel.load(place)
        with accel.load(str(failed.value).rpartition(" such as ")[2]) as session:
            assert session.signature.inputs[0].name == "x"
    with pytest.raises(BadSource, match=r"such as .*img_out$"):
        accel.bench([folder / "img_out" / ".."])
    (folder / "own.onnx").write_bytes((folder / "img_out" / "model.onnx").read_bytes())
    with pytest.raises(BadSource, match=r"such as own\.onnx$"):
        accel.load(".")


def test_the_option_of_another_framework(folder: Path, cli: Any) -> None:
    """Fails if --inputs, which is for TensorFlow's graphs, isn't answered with the option for a PyTorch model."""
    ran = cli("export", "net.py:make", "--inputs", "x:float32[batch,2]", "-o", "x.onnx")
    assert "leave out --inputs, and declare the inputs with --input\n" in ran.stderr
    assert cli("export", "net.py:make", "--input", "x:float32[batch,2]", "-o", "x.onnx").code == 0
