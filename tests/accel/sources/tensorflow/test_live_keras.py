"""Proves that sessions of live Keras and TensorFlow models take and return the same values as the models, in the same
order."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# All models run in one child process, because importing TensorFlow takes seconds. The process of the tests must not
# import TensorFlow, because TensorFlow's LLVM and Triton's LLVM can't be loaded together.
SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf
import accel

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.drop = keras.layers.Dense(3), keras.layers.Dropout(0.5)
    def call(self, x, training=False):
        return self.drop(self.dense(x), training=training)

class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.reshape(tf.range(12.0), (4, 3)))
    def __call__(self, x):
        return tf.nn.relu(x @ self.w)

a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
outputs = [keras.layers.Subtract(name="less")([a, b]), keras.layers.Dense(2, name="dense")(b)]
A = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
B = 10 * A
cases = {
    "not yet called": (Subclassed(), (A,), (A,)),
    "called": (keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), None, (tf.constant(A),)),
    "inputs in a list": (keras.Model([b, a], outputs), None, ([B, A],)),
    "inputs in a dict": (keras.Model({"b": b, "a": a}, {"out": outputs[0]}), None, ({"a": A, "b": B},)),
    "module": (Module(), (A,), (tf.constant(A),)),
}
for name, (model, example, args) in cases.items():
    with accel.load(accel.export(model, example=example, out=sys.argv[1] + f"/{name}.onnx")) as session:
        found, wanted = session(*args), model(*args)
    assert tf.is_tensor(found) == tf.is_tensor(args[0]), (name, type(found))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=name)
# Outputs have the names of their layers, in the order in which the model returns them.
names = [spec.name for spec in accel.Source(cases["inputs in a list"][0]).open().signature.outputs]
assert names == ["less", "dense"], names

class Two(tf.Module):
    def __call__(self, x, y):
        return tf.reduce_mean(x, 1) + tf.reduce_mean(y, 1)

example = (np.ones((4, 12), np.float32), np.ones((4, 6), np.float32))
for dynamic, named in (({"y": {1: "n"}}, [0, 0, 1]), ({"y": {0: "rows"}, "x": {0: "rows"}}, [0, 0])):
    shapes = [spec.shape for spec in accel.Source(Two(), example=example, dynamic=dynamic).open().signature.inputs]
    found = [axis for shape in shapes for axis, dim in enumerate(shape) if isinstance(dim, str)]
    assert found == named, shapes
class Fed(keras.Model):
    def call(self, batch):
        return tf.reduce_mean(batch["x"], 1) + tf.reduce_mean(batch["y"], 1)

fed = ({"x": example[0], "y": example[1]},)
for dynamic in ({"batch": {"y": {1: "n"}}}, {"y": {1: "n"}}):
    opened = accel.Source(Fed(), example=fed, dynamic=dynamic).open()
    axes = {s.name: [i for i, dim in enumerate(s.shape) if isinstance(dim, str)] for s in opened.signature.inputs}
    assert axes == {"x": [0], "y": [0, 1]}, axes
try:
    accel.load(Subclassed())
except accel.AccelError as error:
    assert "pass example arguments with example=" in str(error), error
else:
    raise AssertionError("a model without known inputs was opened")
# A message names the class of the model, not the file in the cache.
hashing = keras.Sequential([keras.Input((4,), dtype="int64"), keras.layers.Hashing(10)])
try:
    accel.export(hashing, out=sys.argv[1] + "/hashing.onnx")
except accel.AccelError as error:
    assert str(error).startswith("Sequential uses the operator"), error
    assert "pass the part of the model without it" in str(error), error
else:
    raise AssertionError("a model without an ONNX translation was exported")
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_live_models(tmp_path: Path) -> None:
    """Checks that each model can be exported, keeps the order of inputs and outputs, and returns tensors of the inputs'
    framework."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
