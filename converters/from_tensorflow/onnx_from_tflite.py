"""TFLite to ONNX: converted by tf2onnx in the TensorFlow process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.artifact import Artifact
from accel.converters.tensorflow_layout import converted
from accel.converters.tf2onnx_conversion import Converted, OpNotConverted, Tf2OnnxConfig, convert
from accel.sources.tensorflow_source import TensorFlowSpec

# TFLite's int8 kernels round their activations, with dynamic scales even those of float models with int8 weights.
TFLITE_INT8_LIMIT = 5e-2


@dataclass(frozen=True, kw_only=True)
class OnnxFromTfliteConfig(Tf2OnnxConfig):
    """``opset`` and ``layout``, as of every conversion by tf2onnx."""


def onnx_from_tflite(src: Artifact, config: OnnxFromTfliteConfig, out: Path) -> Artifact:
    """Convert ``src`` (kind ``tflite``) to ``out``, inputs and outputs under the names of its signature.
    ``OpNotConverted`` names the operators that have no ONNX form, ``ExportFailed`` any other reason.
    """
    return convert(src, config, out, "accel.converters.onnx_from_tflite:from_tflite")


def from_tflite(spec: TensorFlowSpec, opset: int, layout: str) -> Converted:
    """The file as tf2onnx writes it. Runs in the TensorFlow process."""
    import tensorflow as tf

    from accel.sources.tflite_model import operators, tensor_names

    path = Path(spec.path)
    if "DENSIFY" in operators(path):
        raise OpNotConverted(
            f"{path} keeps its weights sparse (the operator DENSIFY), which tf2onnx can't write as ONNX; "
            "convert the model to TFLite again without sparsity"
        )
    inputs, outputs = tensor_names(path)
    names = {"input_names": list(inputs.values()), "output_names": list(outputs.values())}
    with tf.device("/cpu:0"):
        model, turned = converted(layout, None, opset=opset, tflite_path=str(path), **names)
    return model, turned, inputs, outputs
