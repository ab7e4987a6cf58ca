"""Proves that the TensorFlow conversion folds constants, survives native crashes, and keeps input and output names."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import accel

FUNCTIONS = """
import tensorflow as tf

@tf.function
def open_function(a, b):
    return {"sum": a + b, "difference": a - b}

def concrete():
    row = tf.TensorSpec([None, 3], tf.float32)
    return open_function.get_concrete_function(tf.TensorSpec([None, 3], tf.float32, name="left"), b=row)

def number():
    return 7
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "functions.py"
    path.write_text(text)
    return path


def test_a_concrete_function(cli: Any, tmp_path: Path) -> None:
    """Checks that a concrete function can be exported, and that the ONNX file keeps the function's input names and
    output keys."""
    code = written(tmp_path, FUNCTIONS)
    ran = cli("export", f"{code}:concrete", "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == 0, ran.stderr
    left, right = np.float32([[1, 2, 3]]), np.float32([[5, 7, 11]])
    with accel.load(tmp_path / "m.onnx") as session:
        assert [str(spec) for spec in session.signature.inputs] == ["left:float32[batch,3]", "b:float32[batch,3]"]
        found = session.run({"left": left, "b": right})
    assert {name: value.tolist() for name, value in found.items()} == {
        "sum": [[6, 9, 14]],
        "difference": [[-4, -5, -8]],
    }


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("open_function", "add an input_signature, or return a concrete function"),
        ("number", "return a Keras model or a tf.function"),
        ("nothing_like_it", "nothing_like_it"),
    ],
)
def test_functions_that_do_not_say_what_they_take(cli: Any, tmp_path: Path, name: str, fix: str) -> None:
    """Checks that the error for a wrong source takes one line and names the fix. The sources are a number, a missing
    function, and a tf.function without input_signature."""
    code = written(tmp_path, FUNCTIONS)
    ran = cli("export", f"{code}:{name}", "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == 2
    assert len(ran.stderr.splitlines()) == 1
    assert fix in ran.stderr
    assert not (tmp_path / "m.onnx").exists()


CRASHES = """
import ctypes

import tensorflow as tf
from tf2onnx.handler import tf_op

@tf_op("Digamma")
class Crash:
    @classmethod
    def version_1(cls, ctx, node, **words):
        ctypes.string_at(0)

@tf.function(input_signature=[tf.TensorSpec([2, 3], tf.float32, name="x")])
def function(x):
    return tf.math.digamma(tf.exp(x), name="here") + 1.0
"""


def test_a_native_crash_names_its_operator(cli: Any, tmp_path: Path) -> None:
    """Fails if a segmentation fault during a conversion kills the calling process or breaks the next conversion. Also
    checks that the error takes one line and names the operator, and that no file is left behind."""
    code = written(tmp_path, FUNCTIONS)
    assert cli("export", f"{code}:number", "-o", tmp_path / "m.onnx", "-q").code == 2
    code.write_text(CRASHES)
    ran = cli("export", f"{code}:function", "-o", tmp_path / "m.onnx", "-q")
    assert ran.code == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "SIGSEGV" in ran.stderr
    at = r"it was at the operator Digamma \(\S*here\), export a FILE.py:FUNCTION that returns the part "
    at += "of the model without it$"
    assert re.search(at, ran.stderr.strip())
    assert "number" not in ran.stderr  # the message must not repeat the error of the earlier export
    assert not list(tmp_path.glob("m.onnx*"))
    code.write_text(FUNCTIONS)
    assert cli("export", f"{code}:concrete", "-o", tmp_path / "m.onnx", "-q").code == 0


@pytest.mark.parametrize("name", ["foldable", "foldable.pb"])
def test_constants_are_folded(tensorflow_models: Path, tmp_path: Path, name: str) -> None:
    """Fails if the ONNX graph still computes constants at run time. Of the ten operators, only one matrix product may
    remain. ONNX lacks two of the folded operators. The test turns onnxsim off, because onnxsim would also fold some
    operators."""
    named: dict[str, Any] = {"graph_inputs": ["x"], "graph_outputs": ["y"]} if name.endswith(".pb") else {}
    there = accel.inspect(tensorflow_models / name, **named).graph["operators"]
    assert {"MatrixInverse", "Lgamma"} <= set(there)
    made = accel.export(tensorflow_models / name, out=tmp_path / "m.onnx", simplify=False, **named)
    assert computing(made.path) == ["MatMul"]
    table = np.arange(16.0).reshape(4, 4)
    weight = np.linalg.inv(table + 2 * np.eye(4)) @ np.vectorize(math.lgamma)(table + 1) / 15
    x = np.float32([[1, -2, 3, 0.5]])
    with accel.load(made) as session:
        (found,) = session.run({"x": x}).values()
    np.testing.assert_allclose(found, x @ weight, rtol=1e-4)


@pytest.mark.proof
def test_constants_of_a_tflite_file_are_folded(tensorflow_models: Path, tmp_path: Path) -> None:
    """Fails if the ONNX graph of a TFLite file with 16-bit weights converts these weights to float32 at each run."""
    there = accel.inspect(tensorflow_models / "foldable.tflite").graph["operators"]
    assert there["DEQUANTIZE"] >= 2
    made = accel.export(tensorflow_models / "foldable.tflite", out=tmp_path / "m.onnx", simplify=False)
    plain = accel.export(tensorflow_models / "float.tflite", out=tmp_path / "p.onnx", simplify=False)
    assert computing(made.path) == computing(plain.path)
    assert not {"Cast", "DequantizeLinear"} & set(computing(made.path))


def computing(path: Path) -> list[str]:
    """Returns the operators of an ONNX file except Constant and Identity."""
    return [node.op_type for node in onnx.load(str(path)).graph.node if node.op_type not in ("Constant", "Identity")]


GELU = """
import keras

def make():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,), name="x"), keras.layers.Activation("gelu", name="y")])
"""


def test_the_gelu_of_keras(tmp_path: Path) -> None:
    """Checks that a net with the gelu activation of Keras can be exported, and that the ONNX outputs match the gelu
    formula. ONNX lacks the operator that TensorFlow uses to compute this gelu."""
    code = written(tmp_path, GELU)
    made = accel.export(f"{code}:make", out=tmp_path / "m.onnx")
    x = np.float32([[-6, -1, -0.1, 0], [0.1, 1, 3, 8]])
    with accel.load(made) as session:
        found = session.run({"x": x})["y"]
    wanted = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    np.testing.assert_allclose(found, wanted, atol=1e-6)


BUCKETS = """
import tensorflow as tf

def taking(dtype):
    @tf.function(input_signature=[tf.TensorSpec([None, 5], dtype, name="x")])
    def function(x):
        return {"y": tf.raw_ops.Bucketize(input=x, boundaries=[-1.5, 0.1, 2.0])}
    return function

floats, doubles, integers = map(taking, (tf.float32, tf.float64, tf.int64))
"""


@pytest.mark.parametrize(("name", "dtype"), [("floats", "float32"), ("doubles", "float64"), ("integers", "int64")])
def test_values_are_put_into_buckets(tmp_path: Path, name: str, dtype: str) -> None:
    """Fails if a value that equals a boundary gets into the lower bucket, if NaN isn't in the last bucket, or if a
    double is compared with another boundary than TensorFlow's float32."""
    code = written(tmp_path, BUCKETS)
    made = accel.export(f"{code}:{name}", out=tmp_path / "m.onnx")
    x = np.array([[-1.5, -1.6, 2, 1.9, 5], [0.1, np.float32(0.1), 0, 0.2, 1 if dtype == "int64" else np.nan]], dtype)
    with accel.load(made) as session:
        found = session.run({"x": x})["y"]
    wanted = np.searchsorted(np.float32([-1.5, 0.1, 2]).astype(np.float64), x.astype(np.float64), side="right")
    np.testing.assert_array_equal(found, wanted)


DIVIDED = """
import tensorflow as tf

@tf.function(input_signature=[tf.TensorSpec([None], tf.int32, name="a"), tf.TensorSpec([None], tf.int32, name="b")])
def function(a, b):
    b = 2 * b + 1  # not 0
    wide = tf.cast(a, tf.int64), tf.cast(b, tf.int64)
    floats = tf.cast(a, tf.float32) / 3, tf.cast(b, tf.float32)
    pairs = {"i": (a, b), "l": wide, "f": floats}
    return {f"{name}{end}": made for name, (x, y) in pairs.items() for end, made in (("d", x // y), ("m", x % y))}
"""


RANGES = ["a:int32[n]{-99..99}", "b:int32[n]{-9..9}"]


def test_quotients_are_rounded_down(tmp_path: Path) -> None:
    """Fails if a quotient of negative integers is rounded towards zero, as ONNX's Div does, or if a remainder has the
    sign of the dividend."""
    made = accel.export(
        f"{written(tmp_path, DIVIDED)}:function",
        inputs=RANGES,
        out=tmp_path / "m.onnx",
    )
    a, b = map(np.ravel, np.meshgrid(np.int32([-99, -7, -6, -1, 0, 1, 6, 7]), np.int32([-3, -2, 1, 2])))
    with accel.load(made) as session:
        found = session.run({"a": a, "b": b})
    b = 2 * b + 1
    for kind, dtype in (("i", "int32"), ("l", "int64")):
        np.testing.assert_array_equal(found[f"{kind}d"], a.astype(dtype) // b.astype(dtype))
        np.testing.assert_array_equal(found[f"{kind}m"], a.astype(dtype) % b.astype(dtype))
    np.testing.assert_array_equal(found["fd"], np.floor_divide(a.astype(np.float32) / 3, b.astype(np.float32)))


NEAREST = """
import tensorflow as tf

@tf.function(input_signature=[tf.TensorSpec([None, None, None, 2], tf.float32, name="x")])
def function(x):
    return {str(size): tf.image.resize(x, [size, size], method="nearest") for size in (3, 7, 12, 18)}
"""


@pytest.mark.proof
def test_nearest_neighbours(tmp_path: Path) -> None:
    """Fails if nearest-neighbor resizing is exported with a coordinate mode that opset 13 removed. ONNX Runtime only
    warns about the removed mode, but other runtimes refuse it. Also fails if ONNX Runtime picks other pixels than
    TensorFlow."""
    code = written(tmp_path, NEAREST)
    made = accel.export(f"{code}:function", out=tmp_path / "m.onnx")
    nodes = [node for node in onnx.load(str(made.path)).graph.node if node.op_type == "Resize"]
    modes = {a.s for node in nodes for a in node.attribute if a.name == "coordinate_transformation_mode"}
    assert (len(nodes), modes) == (4, {b"half_pixel"})
    x = np.arange(2 * 6 * 9 * 2, dtype=np.float32).reshape(2, 6, 9, 2)
    with accel.load(made) as session:
        found = session.run({"x": x})
    for size in (3, 7, 12, 18):
        # According to TensorFlow's documentation, a new pixel gets the value of the source pixel in which the center of
        # the new pixel lies.
        rows, columns = (((2 * np.arange(size) + 1) * n // (2 * size)) for n in (6, 9))
        np.testing.assert_array_equal(found[str(size)], x[:, rows][:, :, columns])


GROUPS = """
import keras

def make():
    keras.utils.set_random_seed(0)
    x = keras.layers.Conv2D(6, 3, groups=3, name="y", bias_initializer="random_normal")
    return keras.Sequential([keras.Input((8, 8, 6), name="x"), x])
"""


@pytest.mark.proof
def test_convolutions_in_groups(tmp_path: Path) -> None:
    """Checks that a grouped convolution can be exported. Keras compiles a grouped convolution with XLA, and the graph
    then contains a function call."""
    code = written(tmp_path, GROUPS)
    made = accel.export(f"{code}:make", out=tmp_path / "m.onnx")
    (node,) = (node for node in onnx.load(str(made.path)).graph.node if node.op_type == "Conv")
    assert [a.i for a in node.attribute if a.name == "group"] == [3]
    assert made.history[0]["gates"][0]["passed"]
