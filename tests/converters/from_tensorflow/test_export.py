"""Proves that `accel export` converts, checks or refuses TensorFlow, Keras and TFLite models of each format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import accel
from accel.errors import BadData, BadInputSpec, BadSource, ExportFailed, GateFailed, InvalidModel, UsageError


def names(specs: Any) -> list[str]:
    return [spec.name for spec in specs]


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


@pytest.mark.proof
def test_the_commands_as_written(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if `accel export` refuses a source format, prints TensorFlow's log, or fixes the batch size."""
    for words in (
        ["sequential"],
        ["sequential.keras"],
        ["sequential.h5"],
        ["float.tflite"],
        ["frozen.pb", "--inputs", "x:0", "--outputs", "logits:0"],
        ["checkpoint/model.meta", "--inputs", "x", "--outputs", "logits"],
        ["tf1"],
    ):
        out = tmp_path / "model.onnx"
        ran = cli("export", tensorflow_models / words[0], *words[1:], "-o", out, "--json", "-q")
        assert ran.code == 0, f"{words}: {ran.stderr}"
        assert ran.stderr == "", words  # stderr must contain no line of TensorFlow's log
        body = json.loads(ran.stdout)
        assert body["signature"]["inputs"][0]["shape"][0] == "batch", words
        assert body["gates"], words
        assert all(gate["passed"] for gate in body["gates"])
        assert onnx.load(str(out)).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_what_tensorflow_logs_is_not_shown(tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if a log line of TensorFlow, tf2onnx or Keras reaches the command's stdout or stderr. The test runs the
    command in a new process, because an in-process run doesn't capture the stderr of native code."""
    command = [sys.executable, "-m", "accel", "export", str(tensorflow_models / "sequential.keras")]
    command += ["-o", str(tmp_path / "m.onnx"), "--no-cache"]
    noisy = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    ran = subprocess.run(command, capture_output=True, text=True, env=noisy, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    assert any(line.startswith("accel: onnx_from_tensorflow") for line in lines), lines
    assert [line for line in lines if not line.startswith("accel: ")] == []
    first, *rest = ran.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'm.onnx'}: opset 20")
    assert [line for line in rest if not re.match("  (in|out|dim|gate) ", line)] == []


@pytest.mark.proof
def test_numbers_that_tensorflow_wrote_down(tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if the ONNX outputs of a frozen graph or a checkpoint differ from the outputs that TF1 computed before
    freezing. The gate compares the ONNX file only with the model that accel loads. This test compares the ONNX file
    with the outputs of the original run."""
    wanted = arrays(tensorflow_models / "frozen.pb.npz")
    for name in ("frozen.pb", "checkpoint/model.meta"):
        made = accel.export(
            tensorflow_models / name, out=tmp_path / "m.onnx", graph_inputs=["x:0"], graph_outputs=["logits:0"]
        )
        with accel.load(made) as session:
            np.testing.assert_allclose(session.run({"x": wanted["x"]})["logits"], wanted["logits"], atol=1e-6)


def test_names_and_dims_of_a_functional_model(tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if two outputs of the same shape are swapped. Also fails if a name, the dynamic length or the embedding's
    index range is lost. Also fails if the error for an index outside the embedding suggests options instead of naming
    the data."""
    made = accel.export(tensorflow_models / "functional.keras", out=tmp_path / "f.onnx")
    (ids,) = made.signature.inputs
    assert (ids.name, ids.shape, ids.values) == ("ids", ("batch", "length"), (0, 49))
    assert names(made.signature.outputs) == ["zeta", "alpha"]
    with accel.load(made) as onnx_session, accel.load(tensorflow_models / "functional.keras") as native:
        feeds = native.example_inputs(batch=3, length=29)
        found, wanted = onnx_session.run(feeds), native.run(feeds)
    assert set(found) == set(wanted) == {"zeta", "alpha"}
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-5)
    assert np.abs(wanted["zeta"] - wanted["alpha"]).max() > 1e-2
    # The error must name the bad data, not options that the caller hasn't passed. The index -1 is valid, because
    # negative indices count from the end.
    (folder := tmp_path / "data").mkdir()
    for name, ids in (("a", [[1, -1, 3]]), ("b", [[7, 62, 5]])):
        np.savez(folder / f"{name}.npz", ids=np.array(ids, np.int32))
    said = r"b\.npz: 'ids' holds 62, outside 0\.\.49, and the model fails on it \(.*62.*\); correct it or leave it out$"
    for pair in ((tensorflow_models / "functional.keras", made), (made, tensorflow_models / "functional.keras")):
        with pytest.raises(BadData, match=said):
            accel.verify(*pair, data=folder)
    with pytest.raises(BadData, match=said):
        accel.bench([made], data=folder / "b.npz", rounds=5, budget_seconds=0)
    with pytest.raises(BadData, match=said):
        accel.optimize(tensorflow_models / "functional.keras", data=folder / "b.npz", out=tmp_path / "out")
    assert accel.verify(tensorflow_models / "functional.keras", made, data=folder / "a.npz").passed


def test_a_dim_that_two_inputs_share(tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if two dynamic lengths that must be equal become two independent dims. The gate would then fail."""
    made = accel.export(tensorflow_models / "two.keras", out=tmp_path / "two.onnx")
    assert [spec.shape for spec in made.signature.inputs] == [("batch", "length", 4)] * 2


def test_the_user_names_dims_and_fixes_them(tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that the declaration of an input can rename or fix a dynamic dim. Also fails if accel accepts a
    declaration whose dtype or name differs from the model's input."""
    source = tensorflow_models / "functional.keras"
    made = accel.export(source, inputs=["ids:int32[n,7]{0..9}"], out=tmp_path / "f.onnx")
    assert str(made.signature.inputs[0]) == "ids:int32[n,7]{0..9}"
    with pytest.raises(UsageError, match="correct inputs="):
        accel.export(source, inputs=["ids:float32[n,7]"], out=tmp_path / "f.onnx")
    with pytest.raises(UsageError, match="has no input 'x'"):
        accel.export(source, inputs=["x:int32[n,7]"], out=tmp_path / "f.onnx")


def test_a_factory_of_a_keras_model(tensorflow_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if export rejects a function that returns a Keras model or a tf.function. Also fails if an earlier export
    to the same folder changes the result. If the function's source has changed, export must not reuse the old ONNX
    file."""
    accel.export(tensorflow_models / "functional.keras", out=tmp_path / "earlier.onnx")
    monkeypatch.chdir(tmp_path)
    code = Path("my_keras.py")
    code.write_text(
        "import keras\nimport tensorflow as tf\n\n"
        "def make():\n    keras.utils.set_random_seed(0)\n"
        "    return keras.Sequential([keras.Input((3,), name='x'), keras.layers.Dense(2, name='y')])\n\n"
        "@tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name='a')])\n"
        "def function(a):\n    return {'sum': tf.reduce_sum(a, 1), 'half': a / 2}\n"
    )
    made = accel.export(f"{code}:make", out=tmp_path / "m.onnx")
    assert (names(made.signature.inputs), names(made.signature.outputs)) == (["x"], ["y"])
    code.write_text(code.read_text().replace("'y'", "'z'"))
    made = accel.export(f"{code}:make", out=tmp_path / "m.onnx")
    assert names(made.signature.outputs) == ["z"]
    made = accel.export(f"{code}:function", out=tmp_path / "f.onnx")
    with accel.load(made) as session:
        found = session.run({"a": np.float32([[1, 2, 3]])})
    assert found["sum"].tolist() == [6]
    assert found["half"].tolist() == [[0.5, 1, 1.5]]


@pytest.mark.proof
def test_what_a_function_makes_is_what_is_exported(tmp_path: Path) -> None:
    """Fails if the ONNX file of one function is reused for another function with the same inputs and outputs. Also
    fails if export reuses an ONNX file although a file that the function reads has changed."""
    (tmp_path / "both.py").write_text(
        "import pathlib\nimport tensorflow as tf\n\n"
        "def make(factor):\n"
        "    spec = tf.TensorSpec([None, 3], tf.float32, name='x')\n"
        "    return tf.function(lambda x: {'y': x * factor}).get_concrete_function(spec)\n\n"
        "def two():\n    return make(2.0)\n\n"
        "def three():\n    return make(3.0)\n\n"
        f"def read():\n    return make(float(pathlib.Path({str(tmp_path / 'factor')!r}).read_text()))\n"
    )

    def of_ones(name: str) -> list[float]:
        made = accel.export(f"{tmp_path / 'both.py'}:{name}", out=tmp_path / "m.onnx")
        with accel.load(made) as session:
            return list(session.run({"x": np.ones((1, 3), np.float32)})["y"][0])

    assert of_ones("two") == [2, 2, 2]
    assert of_ones("three") == [3, 3, 3]
    for factor in (4, 5):
        (tmp_path / "factor").write_text(str(factor))
        assert of_ones("read") == [factor] * 3


def test_the_signature_is_chosen_by_name(tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that export uses the requested signature. If a model has several signatures and none is requested, export
    must fail instead of choosing one."""
    source = tensorflow_models / "two_signatures"
    made = accel.export(source, signature="square", out=tmp_path / "m.onnx")
    with accel.load(made) as session:
        assert session.run({"x": np.float32([[1, 2, 3]])})["squared"].tolist() == [[2, 8, 18]]
    with pytest.raises(BadSource, match="choose a signature with signature=: double, square"):
        accel.export(source, out=tmp_path / "m.onnx")


@pytest.mark.proof
@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_the_opset_asked_for(tensorflow_models: Path, tmp_path: Path, opset: int) -> None:
    """Checks that the exported file has the requested opset. (tf2onnx itself supports no opset above 18.)"""
    made = accel.export(tensorflow_models / "functional.keras", out=tmp_path / "m.onnx", opset=opset)
    assert made.properties["opset"] == opset


ENDS = {"graph_inputs": ["x"], "graph_outputs": ["y"]}
BAD = {
    "noise.pb": (BadSource, "random_normal", {**ENDS, "graph_outputs": ["noise"], "strip_training_ops": True}),
    "frozen.pb": (BadSource, r"pass tensors of the graph, e.g. graph_inputs=\['x:0'\], graph_outputs=\['log", {}),
    "strings": (ExportFailed, "StringLength", {}),
    "no_signatures": (BadSource, "has no signatures", {}),
    "only.weights.h5": (InvalidModel, "only weights", {}),
    "lambda.keras": (InvalidModel, "Lambda", {}),
    "unbuilt.keras": (BadInputSpec, "doesn't know its inputs; pass inputs=", {}),
    "gelu_int8.tflite": (ExportFailed, "GELU", {}),
    "sequential": (UsageError, "leave out signature=|has no signature 'other'", {"signature": "other"}),
    "missing.keras": (BadSource, "does not exist", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_exported(tensorflow_models: Path, tmp_path: Path, name: str) -> None:
    """Checks that a source that can't be exported raises the right error with a message of one line, and leaves no file
    behind."""
    kind, words, options = BAD[name]
    with pytest.raises(kind, match=words) as caught:
        accel.export(tensorflow_models / name, out=tmp_path / "m.onnx", **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert list(tmp_path.iterdir()) == []


ENDS_OF_NO = ["--inputs", "x:0", "--outputs", "y:0"]
ENDS_OF_DROPOUT = ["--inputs", "x:0", "--outputs", "logits:0"]


@pytest.mark.parametrize(
    ("name", "code", "wrong", "fix", "words"),
    [
        ("strings", 1, "the operator StringLength", "export a FILE.py:FUNCTION that returns the part of the model", []),
        ("lookup.keras", 1, "the operator LookupTableFindV2", "look the values up before the model", []),
        (
            "gelu_int8.tflite",
            1,
            "the operator TFL_GELU",
            "export the SavedModel or Keras file that the TFLite file was made from",
            [],
        ),
        ("no.pb", 2, "not a TensorFlow graph", "give a frozen GraphDef", ENDS_OF_NO),
        ("only.weights.h5", 2, "only weights", "export FILE.py:FUNCTION", []),
        ("no_signatures", 2, "has no signatures", "save it with tf.saved_model.save", []),
        ("dropout.pb", 2, "still holds random ops", "pass --strip-training-ops", ENDS_OF_DROPOUT),
    ],
)
def test_one_line_with_the_fix(
    cli: Any, tensorflow_models: Path, tmp_path: Path, name: str, code: int, wrong: str, fix: str, words: list[str]
) -> None:
    """Checks that the error for a file that can't be exported takes one line and names both the problem and the fix.
    Also checks that the exit code is 2 for a wrong request and 1 for a failed conversion."""
    source = tensorflow_models / name
    if name == "no.pb":
        source = tmp_path / name
        source.write_text("this is no graph")
    ran = cli("export", source, *words, "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == code
    assert len(ran.stderr.splitlines()) == 1
    assert wrong in ran.stderr
    assert fix in ran.stderr
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("name", ["m.pb", "m.keras", "m.h5", "m.hdf5", "m.tflite", "m.meta", "saved_model.pb"])
@pytest.mark.parametrize("content", [b"", b"hello", bytes(range(256)) * 40])
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    """Checks that a file whose content contradicts its suffix raises BadSource with a one-line message."""
    path = tmp_path / "source" / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(BadSource) as caught:
        accel.export(
            path,
            out=tmp_path / "m.onnx",
            **({"graph_inputs": ["x"], "graph_outputs": ["y"]} if name in ("m.pb", "m.meta") else {}),
        )
    assert "\n" not in str(caught.value)


def test_int8_tflite(tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that a fully quantized TFLite file can be exported, and that its inputs stay int8. Also fails if the
    example inputs have only a few different values."""
    made = accel.export(tensorflow_models / "int8.tflite", out=tmp_path / "m.onnx")
    assert made.signature.inputs[0].dtype == "int8"
    assert made.properties["precision"] == "int8"
    with accel.load(tensorflow_models / "int8.tflite") as native:
        feeds = native.example_inputs(batch=2)
        assert np.unique(feeds["keras_tensor"]).size > 100


def test_a_wrong_conversion_is_caught(
    tensorflow_models: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the gate accepts a conversion that swaps two outputs of the same shape."""
    from accel.converters.from_tensorflow import conversion as stage

    real = stage.in_tensorflow

    def swapped(target: str, **arguments: Any) -> Any:
        note = real(target, **arguments)
        if target.endswith("run_tf2onnx"):
            model = onnx.load(str(arguments["out"]))
            places = {"zeta": "alpha", "alpha": "zeta"}
            for node in model.graph.node:
                node.output[:] = [places.get(n, n) for n in node.output]
            onnx.save(model, str(arguments["out"]))
        return note

    monkeypatch.setattr(stage, "in_tensorflow", swapped)
    with pytest.raises(GateFailed, match="changed the output"):
        accel.export(tensorflow_models / "functional.keras", out=tmp_path / "m.onnx")


@pytest.mark.parametrize(("off", "named"), [(2e-3, True), (0.1, False)])
def test_the_limit_is_named_where_rounding_may_be_the_reason(
    tensorflow_models: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, off: float, named: bool
) -> None:
    """If the outputs' error is slightly above the limit, the message must suggest a higher limit that works. If the
    outputs are clearly wrong, the message must not suggest another limit."""
    from accel.converters.from_tensorflow import conversion as stage

    real = stage.in_tensorflow

    def scaled(target: str, **arguments: Any) -> Any:
        note = real(target, **arguments)
        if target.endswith("run_tf2onnx"):
            model = onnx.load(str(arguments["out"]))
            (last,) = (node for node in model.graph.node if "dense" in node.output)
            last.output[:] = ["before"]
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1 + off), "factor"))
            model.graph.node.append(helper.make_node("Mul", ["before", "factor"], ["dense"]))
            onnx.save(model, str(arguments["out"]))
        return note

    monkeypatch.setattr(stage, "in_tensorflow", scaled)
    source = tensorflow_models / "sequential.keras"
    with pytest.raises(GateFailed, match="changed the output") as caught:
        accel.export(source, out=tmp_path / "m.onnx")
    assert ("pass limit=0.004" in str(caught.value)) == named
    if named:
        accel.export(source, out=tmp_path / "m.onnx", limit=4e-3)


def test_the_process_that_dies(tensorflow_models: Path, tmp_path: Path, own_cache: Path) -> None:
    """Fails if a crash of TensorFlow's process kills the calling process or makes the next conversion fail."""
    from accel.errors import ChildCrashed
    from accel.sources.tensorflow.process import in_tensorflow

    with pytest.raises(ChildCrashed, match="SIGABRT"):
        in_tensorflow("os:abort")
    accel.export(tensorflow_models / "float.tflite", out=tmp_path / "m.onnx")


@pytest.mark.proof
def test_bench_against_keras(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Checks that `bench` can use a Keras file as its baseline."""
    source = tensorflow_models / "sequential.keras"
    assert cli("export", source, "-o", tmp_path / "m.onnx", "-q").code == 0
    ran = cli(
        "bench",
        tmp_path / "m.onnx",
        "--against",
        source,
        "--rounds",
        "5",
        "--block-seconds",
        "0.01",
        "--budget-seconds",
        "0",
        "--json",
        "-q",
    )
    assert ran.code == 0, ran.stderr
    rows = json.loads(ran.stdout)["results"]
    assert [row["runtime"] for row in rows] == ["tensorflow", "onnxruntime"]
    assert all(row["speedup"] for row in rows), rows
    # The peak memory shows that TensorFlow runs in the timed process itself, not in a second process.
    assert rows[0]["peak_rss_mb"] > 100


@pytest.mark.proof
def test_optimize_takes_keras(cli: Any, tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if `accel optimize` rejects a Keras file as its source."""
    words = ["--target", "ort-cpu", "--precision", "fp32", "--rounds", "5", "--fixed-session"]
    ran = cli("optimize", tensorflow_models / "sequential.keras", *words, "-o", tmp_path / "out", "-q")
    assert ran.code == 0, ran.stderr
    with accel.load(tmp_path / "out") as session:
        assert session.run(session.example_inputs(batch=2))["dense"].shape == (2, 5)
