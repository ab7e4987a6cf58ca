"""Proves that a subclassed Keras model, which declares no inputs itself, can be exported if the user declares its
inputs. Also proves that export accepts a factory whose file hides the import of TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# ``importlib`` hides Keras from code that looks for import statements in the file.
NETS = """
import importlib

def net(called):
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(0)

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.drop = keras.layers.Dense(3), keras.layers.Dropout(0.5)

        def call(self, x, scale, training=False):
            return {"y": self.drop(self.dense(x), training=training) * scale, "twice": 2 * scale}

    made = Net()
    if called:
        made(keras.ops.ones((2, 4)), keras.ops.ones((2, 1)))
    return made

def called(): return net(True)
def not_called(): return net(False)
"""
# Runs in a separate process, because calling the factory imports TensorFlow.
SCRIPT = """
import sys
import numpy as np
import accel
from accel.errors import BadInputSpec

folder = sys.argv[1]
for factory in ("called", "not_called"):
    source = f"{folder}/nets.py:{factory}"
    made = accel.export(source, inputs=["x:float32[batch,4]", "scale:float32[batch,1]"], out=f"{folder}/m.onnx")
    assert [spec.name for spec in made.signature.inputs] == ["x", "scale"]
    with accel.load(made) as session:
        found = session.run({"x": np.zeros((3, 4), np.float32), "scale": np.full((3, 1), 5, np.float32)})
    assert found["y"].shape == (3, 3)
    np.testing.assert_allclose(found["twice"], np.full((3, 1), 10))
for inputs, words in ((None, "doesn't know its inputs; pass inputs="), (["x:float32[batch,4]"], "; correct inputs=")):
    try:
        accel.load(source, inputs=inputs)
    except BadInputSpec as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_subclassed_models(tmp_path: Path) -> None:
    """Checks that a subclassed model with declared inputs can be exported before and after its first call. Also checks
    that the error for missing or wrong inputs names the option ``inputs``."""
    (tmp_path / "nets.py").write_text(NETS)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
