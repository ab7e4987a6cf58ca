"""Converts TFLite files to ONNX, with tf2onnx in the TensorFlow process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.sources.tensorflow.source import TensorFlowSpec

from .conversion import Converted, OpNotConverted, Tf2OnnxConfig, convert
from .layout import converted


@dataclass(frozen=True, kw_only=True)
class OnnxFromTfliteConfig(Tf2OnnxConfig):
    """The options are ``opset`` and ``layout``, as in every conversion by tf2onnx."""


def onnx_from_tflite(src: Artifact, config: OnnxFromTfliteConfig, out: Path) -> Artifact:
    """Converts ``src`` (kind ``tflite``) to ``out``. Inputs and outputs get the names in the signature of ``src``.

    Raises ``OpNotConverted`` with the operators that have no ONNX translation, and ``ExportFailed`` for other failures.
    """
    return convert(src, config, out, "accel.converters.from_tensorflow.onnx_from_tflite:from_tflite")


def from_tflite(spec: TensorFlowSpec, opset: int, layout: str) -> Converted:
    """Converts the file with tf2onnx. Runs in the TensorFlow process."""
    import tensorflow as tf

    from accel.sources.tensorflow.tflite import operators, tensor_names

    path = Path(spec.path)
    if "DENSIFY" in operators(path):
        raise OpNotConverted(
            f"{path} stores sparse weights (the operator DENSIFY), which tf2onnx can't write as ONNX; "
            "convert the model to TFLite again without sparsity"
        )
    inputs, outputs = tensor_names(path)
    names = {"input_names": list(inputs.values()), "output_names": list(outputs.values())}
    with tf.device("/cpu:0"):
        model, turned = converted(layout, None, opset=opset, tflite_path=str(path), **names)
    return model, turned, inputs, outputs
