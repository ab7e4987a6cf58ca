"""Proves that export finds valid sizes for the dynamic dims of TensorFlow models, or uses the sizes that the user
gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.errors import BadSource

NETS = """
import keras

L = keras.layers

def net(*layers):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((None, None, 3), name="image"), *layers, L.GlobalAveragePooling2D(name="y")])

def halves_and_puts_together():
    keras.utils.set_random_seed(0)
    image = keras.Input((None, None, 3), name="image")
    whole = L.Conv2D(4, 3, padding="same", activation="relu")(image)
    half = L.Conv2D(4, 3, padding="same", activation="relu")(L.MaxPooling2D(2)(whole))
    both = L.Concatenate()([whole, L.UpSampling2D(2)(half)])
    return keras.Model(image, L.Conv2D(2, 1, name="y")(both))

def bilinear():
    return net(L.UpSampling2D(2, interpolation="bilinear"))

def bilinear_of_fixed_size():
    x = keras.Input((6, 4, 3), name="image")
    return keras.Model(x, bilinear()(x))

def too_large_for_two():
    return net(L.Conv2D(4, 9))

def too_large_for_sixteen():
    return net(L.Conv2D(4, 9, strides=3), L.Conv2D(4, 9, strides=3))

def a_mean_over_nothing():
    return net(L.Conv2D(4, 3, padding="same"), L.MaxPooling2D(32))

def too_large_for_all():
    return net(L.Conv2D(2, 40, strides=20), L.Conv2D(2, 40, strides=20))
"""


def written(folder: Path) -> Path:
    path = folder / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "height"),
    [
        ("halves_and_puts_together", [64, 64, 128]),
        ("too_large_for_two", [16, 16, 64]),
        ("too_large_for_sixteen", [64, 64, 128]),
        ("a_mean_over_nothing", [64, 64, 128]),
    ],
)
def test_sizes_are_found(cli: Any, tmp_path: Path, name: str, height: list[int]) -> None:
    """The nets in this test reject images with sides of 2, 16 or 17 pixels. Checks that export without --dim accepts
    each net, reports the tested sizes, and tests only sizes with a non-empty output."""
    out = tmp_path / "m.onnx"
    ran = cli("export", f"{written(tmp_path)}:{name}", "-o", out, "--json", "-q")
    assert ran.code == 0, ran.stderr
    body = json.loads(ran.stdout)
    assert body["signature"]["inputs"][0]["shape"] == ["batch", "height", "width", 3]
    assert body["signature"]["dims"] == {"batch": [1, 1, 8], "height": height, "width": height}
    whole = ["batch", "height", "width", 2] if name == "halves_and_puts_together" else ["batch", 4]
    assert body["signature"]["outputs"][0]["shape"] == whole
    with accel.load(out) as session:
        (found,) = session.run(session.example_inputs(batch=2, height=height[1], width=height[2])).values()
    assert found.size
    assert np.isfinite(found).all()


@pytest.mark.proof
def test_sizes_that_the_user_says(tmp_path: Path) -> None:
    """Fails if export runs a net at sizes outside the user's ranges. If the net rejects the default sizes, the error
    must name the size and the option. Also fails if accel runs sizes for which oneDNN returns uninitialized memory."""
    source = f"{written(tmp_path)}:too_large_for_all"
    why = r"Negative dimension size caused by subtracting 40 from 16 for \S*/convolution"
    with pytest.raises(
        BadSource, match=rf"fails in TensorFlow on image \[1, 16, 16, 3\]: {why}; correct inputs= or dims=$"
    ):
        accel.export(source, out=tmp_path / "m.onnx")
    dims = {"batch": (1, 1, 2), "height": (840, 840, 860), "width": (840, 850, 860)}
    made = accel.export(source, dims=dims, out=tmp_path / "m.onnx")
    assert {d: (r.min, r.opt, r.max) for d, r in made.signature.dims.items()} == dims
    assert made.signature.outputs[0].shape == ("batch", 2)


def test_sizes_in_steps(tmp_path: Path) -> None:
    """The net in this test halves images and accepts only even sizes. Fails if export refuses a range with a step of 2,
    or runs odd sizes for this range. Also checks that the error for a range without a step names the fix."""
    source = f"{written(tmp_path)}:halves_and_puts_together"
    sizes = {"batch": (1, 1, 2), "height": (32, 48, 64), "width": (32, 32, 64)}
    fix = r"it runs at multiples of 2: pass dims={'height': '32:48:64:2', 'width': '32:32:64:2'}$"
    with pytest.raises(BadSource, match=fix):
        accel.export(source, dims=sizes, out=tmp_path / "m.onnx")
    stepped = {"batch": (1, 1, 2), "height": (32, 48, 64, 2), "width": (32, 32, 64, 2)}
    made = accel.export(source, dims=stepped, out=tmp_path / "m.onnx")
    assert made.signature.to_json()["dims"] == {name: list(sizes) for name, sizes in stepped.items()}
    assert made.signature.outputs[0].shape == ("batch", "height", "width", 2)


BYTES = """
import tensorflow as tf

@tf.function(input_signature=[tf.TensorSpec([None, 5], tf.uint8, name="pixels")])
def function(pixels):
    return {"scaled": tf.cast(pixels, tf.float32) / 255.0}
"""


def test_sizes_that_keras_wants_fixed(tmp_path: Path) -> None:
    """Keras can't trace the model in this test with a dynamic image size. Checks that the error names the dynamic size
    as the reason, ends with a complete sentence, and suggests a fix that works."""
    models = written(tmp_path)
    with pytest.raises(BadSource, match=r"can't make a graph of .* while its sizes are open") as caught:
        accel.export(f"{models}:bilinear", out=tmp_path / "no.onnx")
    assert "as a Python `bool` is not allowed); fix the sizes: export a FILE.py:FUNCTION" in str(caught.value)
    assert "x = keras.Input((SIZE, SIZE, 3), name='image')" in str(caught.value)
    made = accel.export(f"{models}:bilinear_of_fixed_size", out=tmp_path / "fixed.onnx")
    assert made.signature.inputs[0].shape == ("batch", 6, 4, 3)


def test_bytes_go_up_to_255(tmp_path: Path) -> None:
    """Checks that a model with uint8 inputs is tested with values from 0 to 255."""
    (tmp_path / "bytes.py").write_text(BYTES)
    made = accel.export(f"{tmp_path / 'bytes.py'}:function", out=tmp_path / "m.onnx")
    assert made.signature.inputs[0].values == (0, 255)
