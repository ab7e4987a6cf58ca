"""Makes model files of other exporters: ONNX files from opset 7 to opset 24, and SavedModels of TensorFlow 1 and 2."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..case import Case, NotMade

_SIDE, _LENGTH, _FEATURES = 32, 12, 16


class ModelFile(os.PathLike[str]):
    """A model file or folder that can also be called, with ``run`` as the reference."""

    def __init__(self, path: Path, run: Callable[..., Any]) -> None:
        self.path, self.run = path, run

    def __fspath__(self) -> str:
        return str(self.path)

    def __call__(self, **feeds: Any) -> Any:
        return self.run(**feeds)


class Recurrent(nn.Module):
    """Returns class scores of the last state of an LSTM with two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_FEATURES, 8, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Attending(nn.Module):
    """Computes attention by hand, with a residual connection and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, 48), nn.Linear(_FEATURES, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        return x + self.out(nn.functional.gelu(weights @ v))


class Upsampling(nn.Module):
    """Halves the image, doubles it again, and clips the result."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = torch.clamp(self.down(x), -1, 1)
        return self.up(nn.functional.interpolate(small, scale_factor=2.0, mode="nearest"))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.Softmax(-1),
    )  # fmt: skip


_NETS: dict[str, Callable[[], nn.Module]] = {
    "conv": _convolutions,
    "lstm": Recurrent,
    "attention": Attending,
    "upsample": Upsampling,
}
_LEGACY = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
_DYNAMO = (18, 19, 20, 21, 22, 23, 24)
_SAVED = ("saved-tf1", "saved-tf2-module", "saved-keras")
NAMES = (
    *(f"onnx-{net}-opset{opset}" for net in _NETS for opset in _LEGACY),
    *(f"onnx-{net}-opset{opset}-dynamo" for net in _NETS for opset in _DYNAMO),
    "onnx-conv-opset8-initializers-as-inputs",
    *_SAVED,
)


def make(name: str) -> Case:
    """Writes the file. Raises ``NotMade`` if the exporter can't write this opset."""
    folder = Path(tempfile.mkdtemp())
    if name in _SAVED:
        return _saved(name, folder)
    _, net, opset, *rest = name.split("-")
    shape = (3, _SIDE, _SIDE) if net in ("conv", "upsample") else (_LENGTH, _FEATURES)
    path = folder / "model.onnx"
    module = _NETS[net]().eval()
    words: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"], "opset_version": int(opset[5:])}
    if rest == ["dynamo"]:
        words |= {"dynamo": True, "dynamic_shapes": ({0: torch.export.Dim.AUTO},), "verbose": False}
    else:
        words |= {"dynamo": False, "dynamic_axes": {"x": {0: "N"}, "y": {0: "N"}}}
        words |= {"keep_initializers_as_inputs": True} if rest else {}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            torch.onnx.export(module, (torch.randn(2, *shape),), str(path), **words)
    except Exception as error:  # the exporter may lack an operator in an old opset
        raise NotMade(f"torch.onnx: {type(error).__name__}: {' '.join(str(error).split())[:150]}") from error
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    file = ModelFile(path, lambda x: session.run(None, {"x": x}))
    words = {"opset": 20 if opset != "opset20" else 21}  # accel exports an ONNX file only if something changes
    return Case(file, lambda batch, _: {"x": torch.randn(batch, *shape).numpy()}, is_torch=False, words=words)


def _saved(name: str, folder: Path) -> Case:
    """Writes a SavedModel of TensorFlow 1 with variables, of a ``tf.Module``, or of Keras."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    path = folder / "saved"
    tf.random.set_seed(0)
    if name == "saved-tf1":
        v1 = tf.compat.v1
        with v1.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, _FEATURES], name="x")
            weight = v1.get_variable("w", [_FEATURES, 4], initializer=v1.random_normal_initializer(seed=0))
            y = tf.nn.softmax(tf.nn.relu(x @ weight) + 0.5, name="y")
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(path), {"x": x}, {"y": y})
    elif name == "saved-tf2-module":

        class Net(tf.Module):  # type: ignore[misc]  # tensorflow has no types
            def __init__(self) -> None:
                super().__init__()
                self.weight = tf.Variable(tf.random.normal([_FEATURES, 4]))

            @tf.function(input_signature=[tf.TensorSpec([None, _FEATURES], name="x")])  # type: ignore[untyped-decorator]
            def __call__(self, x: Any) -> Any:
                return {"y": tf.nn.softmax(tf.nn.relu(x @ self.weight) + 0.5)}

        tf.saved_model.save(Net(), str(path))
    else:
        import keras

        inputs = keras.Input([_FEATURES], name="x")
        hidden = keras.layers.Dense(8, activation="relu")(inputs)
        keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(hidden)).export(str(path), verbose=False)
    loaded = tf.saved_model.load(str(path)).signatures["serving_default"]
    file = ModelFile(path, lambda x: loaded(x=tf.constant(x)))
    return Case(file, lambda batch, _: {"x": torch.randn(batch, _FEATURES).numpy()}, is_torch=False)
