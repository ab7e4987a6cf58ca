"""Completes the shapes of inputs and outputs for which an ONNX file declares none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel.signature import TensorSpec

from .refusal import plain_reason

if TYPE_CHECKING:
    import onnx

# onnx calls a dim that it can't infer "unk__0", "unk__1"...
_UNKNOWN = "unk__"


def inputs_without_shape(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the inputs that are tensors without a declared shape."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in constants and _is_open(value)]


def _is_open(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def with_input_shapes(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> onnx.ModelProto:
    """Returns ``model`` after declaring the shapes of ``inputs`` for the inputs without a shape."""
    import onnx

    missing, given = set(inputs_without_shape(model)), {spec.name: spec for spec in inputs}
    for value in model.graph.input:
        if value.name in missing & given.keys():
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, list(given[value.name].shape)))
    return model


def without_shape(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the outputs that are tensors without a declared shape."""
    return [value.name for value in model.graph.output if _is_open(value)]


def with_output_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns ``model`` after declaring the shapes that onnx infers for the outputs without a shape. ONNX Runtime runs
    such a file, but the ONNX checker refuses it. An output whose shape can't be inferred stays as it is."""
    import onnx

    missing = set(without_shape(model))
    if not missing:
        return model
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
    except (onnx.shape_inference.InferenceError, ValueError):  # the checker tells the reason
        return model
    found = {value.name: value.type.tensor_type for value in inferred}
    for value in model.graph.output:
        if value.name in missing and found[value.name].HasField("shape"):
            value.type.tensor_type.shape.CopyFrom(found[value.name].shape)
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.startswith(_UNKNOWN):
                    dim.ClearField("dim_param")
    return model


def misfit(model: onnx.ModelProto) -> str:
    """Returns the reason why onnx can't infer the shapes of ``model``, or "" if it can."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        return plain_reason(error)
    return ""
