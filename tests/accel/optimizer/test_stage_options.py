"""Proves that the options of ``--quantize`` and ``--cast`` are parsed, passed to the stages and recorded, or refused
with a fix."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact
from accel.cli.optimize import command
from accel.converters.quantize.stage import FORMS, QuantizeConfig
from accel.errors import BadInputSpec, UsageError
from accel.optimizer.calibration import samples_to_calibrate, usual_samples
from accel.optimizer.recipes.candidates import recipes
from accel.optimizer.recipes.recipe import RecipeRequest
from accel.optimizer.stage_options import (
    OPTIONS_BY_MODE,
    options_of_mode,
    parse_cast_options,
    parse_quantize_options,
)
from accel.sources.onnx.file import open_onnx
from accel.tables.target import Target

QUANTIZE = [
    "calibration=entropy", "samples=40", "smooth=0.5", "per-channel=no", "ops=MatMul, Gemm", "keep=a/*", "keep=b,Conv",
    "block-size=64", "smallest=1000",
]  # fmt: skip


def test_every_option_is_read() -> None:
    """Checks that accel parses each option correctly, and joins the items of a repeated list option. Also checks that
    an option's name may have underscores instead of hyphens."""
    found = parse_quantize_options(QUANTIZE)
    assert found == {
        "calibration": "entropy", "samples": 40, "smooth": 0.5, "per_channel": False, "ops": ("MatMul", "Gemm"),
        "keep": ("a/*", "b", "Conv"), "block_size": 64, "smallest": 1000,
    }  # fmt: skip
    QuantizeConfig(**found)
    assert parse_quantize_options(["percentile=99.9"]) == {"calibration": "percentile", "percentile": 99.9}
    assert parse_quantize_options(["per_channel=yes"]) == {"per_channel": True}
    assert parse_cast_options(["keep-fp32=Softmax", "keep_fp32=/head/*", "keep-io=no"]) == {
        "keep_fp32": ("Softmax", "/head/*"), "keep_io": False,
    }  # fmt: skip
    weights = QuantizeConfig(mode="int4-weights")
    assert set(options_of_mode(weights, found)) == {"keep", "block_size", "smallest"}
    assert set(options_of_mode(QuantizeConfig(mode="dynamic"), found)) == {"per_channel", "ops", "keep"}


def test_every_mode_says_which_options_it_reads() -> None:
    """Checks that every quantization mode has a row in the table of options, and that the rows only name fields of
    QuantizeConfig."""
    assert set(OPTIONS_BY_MODE) == {mode for form in FORMS.values() for mode in form.runs}
    known = {field.name for field in fields(QuantizeConfig)}
    assert all(known.issuperset(names) for names in OPTIONS_BY_MODE.values())


@pytest.mark.parametrize(
    "text",
    [
        "", "keep", "keep=", "keep=a,,b", "calibration=best", "percentile=nan", "percentile=101", "smooth=2",
        "samples=0", "samples=x", "per-channel=maybe", "block-size=24", "block-size=8", "speed=11",
    ],
)  # fmt: skip
def test_options_that_are_none(text: str) -> None:
    """Checks that an unreadable option gives an error that shows the right form."""
    with pytest.raises(BadInputSpec, match=r"can't read quantize .*; write"):
        parse_quantize_options([text])
    with pytest.raises(BadInputSpec, match=r"can't read cast .*; write"):
        parse_cast_options([text])


@pytest.fixture
def src(tmp_path: Path) -> Artifact:
    """Makes a model of two layers."""
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal((32, 32)) / 6).astype(np.float32) for name in ("w1", "w2")}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="second"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 32]) for name in "xy"]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(tmp_path / "m.onnx"))
    return open_onnx(tmp_path / "m.onnx", probe=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32))
    return tmp_path / "d.npz"


def made(src: Artifact, target: str, precision: str, data: Path, **options: Any) -> dict[str, Any]:
    request = RecipeRequest(
        targets=(Target.get(target),), precisions=(precision,), data=data, samples=8, threads=1, **options
    )
    found, left_out = recipes(src, request)
    return {recipe.name: recipe for recipe in found} | {item.name: item.reason for item in left_out}


def test_they_reach_the_stages(src: Artifact, data: Path) -> None:
    """Checks that each stage gets its options, and that a target only gets calibration methods that the target
    supports. Also checks that accel reports an option that no candidate reads."""
    found = made(src, "ort-cpu", "int8", data, quantize=parse_quantize_options(QUANTIZE))
    static = next(config for name, config, _ in found["ort-cpu int8 static"].stages if name == "quantize")
    assert (static.calibration, static.smooth, static.per_channel, static.keep) == (
        "entropy", 0.5, False, ("a/*", "b", "Conv"),
    )  # fmt: skip
    dynamic = next(config for name, config, _ in found["ort-cpu int8 dynamic"].stages if name == "quantize")
    assert (dynamic.mode, dynamic.ops, dynamic.calibration) == ("dynamic", ("MatMul", "Gemm"), "minmax")
    found = made(src, "openvino", "int8", data, quantize={"calibration": "mse"})
    assert "minmax or percentile, not mse" in found["openvino int8"]
    found = made(src, "tensorrt-rtx", "fp16", data, cast={"keep_fp32": ("Gemm",)})
    casts = [config for name, config, _ in found["tensorrt-rtx fp16"].stages if name == "cast"]
    assert [config.keep_fp32 for config in casts] == [("Gemm",)]
    for option in ({"quantize": {"smooth": 0.5}}, {"cast": {"keep_io": False}}):
        with pytest.raises(UsageError, match=f"{next(iter(option))}= has no effect; leave out"):
            made(src, "openvino", "fp32", data, **option)


def test_the_command_records_them(cli: Any, src: Artifact, data: Path, tmp_path: Path) -> None:
    """Checks that the command accepts the options, and that the manifest and the report's command record the options.
    Also checks that accel warns if it calibrates on fewer samples than requested, and if the option smooth has no
    effect."""
    pytest.importorskip("tensorrt_rtx_bindings")
    words = ["--target", "tensorrt-rtx", "--precision", "int8", "--compute-capability", "8.6", "--data", data]
    mine = ["--quantize", "percentile=99.9", "--quantize", "samples=100000", "--quantize", "keep=second"]
    mine += ["--quantize", "smooth=0.5", "--cast", "keep-fp32=second"]
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words, *mine, "--max-drop", "0.1", "--json")
    assert done.code == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "model.engine.manifest.json").read_text())
    options = {stage["name"]: stage["options"] for stage in manifest["stages"]}
    assert (options["quantize"]["calibration"], options["quantize"]["percentile"]) == ("percentile", 99.9)
    assert options["quantize"]["keep"] == ["second"]
    assert options["cast"]["keep_fp32"] == ["second"]
    body = json.loads(done.stdout)
    assert any("calibrated on 32 samples, not 100000" in note for note in body["notes"])
    assert any("--quantize smooth has no effect" in line for line in done.stderr.splitlines())
    asked = command.make_context("optimize", shlex.split(body["command"])[2:]).params
    assert (asked["quantize"], asked["cast"]) == (tuple(mine[1:8:2]), ("keep-fp32=second",))


def test_a_name_that_is_none(cli: Any, src: Artifact, data: Path, tmp_path: Path) -> None:
    """Checks that an unknown node name gives an error that says how to list the node names."""
    words = ["--target", "ort-cpu", "--precision", "int8", "--data", data]
    done = cli("optimize", src.path, "-o", tmp_path / "out", *words, "--quantize", "keep=nowhere")
    assert done.code == 2
    assert "nowhere" in done.stderr
    assert "accel inspect" in done.stderr


@pytest.mark.parametrize(
    ("count", "asked", "apart", "read"),
    [
        (1000, None, False, 128),
        (100, None, True, 50),
        (1000, 600, False, 500),
        (1000, 600, True, 600),
        (1, None, False, 1),
    ],
)
def test_the_samples_that_calibrate(count: int, asked: int | None, apart: bool, read: int) -> None:
    """Fails if calibration reads the wrong number of samples. By default, calibration reads 128 samples. If 128 samples
    are more than half of the data, calibration reads half of the data, but at least one sample. If the user requests a
    number and the judge has data of its own, calibration may read more than half of the data."""
    assert samples_to_calibrate(count, asked, apart=apart) == read


@pytest.mark.parametrize("precisions", [None, ("int8",)])
def test_without_data_every_calibrated_candidate_is_listed(
    src: Artifact, data: Path, precisions: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that accel lists the int8 candidates that need calibration data if the user gives no data. The reason must
    name ``data``, the option to pass. Also fails if accel leaves out a candidate although the user gave calibration
    data."""
    monkeypatch.setattr("accel.optimizer.recipes.openvino.cpu_has_bf16", lambda: True)
    targets = (Target.get("ort-cpu"), Target.get("openvino"))
    request = RecipeRequest(targets=targets, precisions=precisions, data=None, samples=8, threads=1)
    made, left_out = recipes(src, request)
    assert [item.name for item in left_out] == ["ort-cpu int8 static", "openvino int8", "openvino int8+bf16"]
    assert {item.reason for item in left_out} == {"int8 needs data to calibrate on; pass data="}
    every, none = recipes(src, replace(request, data=data))
    assert none == []
    assert {recipe.name for recipe in every} == {recipe.name for recipe in made} | {item.name for item in left_out}


@pytest.mark.parametrize(("megabytes", "samples"), [(0.1, 128), (90.0, 128), (200.0, 64), (440.0, 32), (9000.0, 32)])
def test_large_models_are_calibrated_on_fewer_samples(megabytes: float, samples: int) -> None:
    """Fails if a search with a time limit spends all its time on calibrating a large model, or if a small model is
    calibrated on fewer samples than it may have."""
    assert usual_samples(megabytes) == samples
