"""Infers the shapes of outputs for which an ONNX file declares none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# onnx calls a dim that it can't infer "unk__0", "unk__1"...
_UNKNOWN = "unk__"


def without_shape(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the outputs that are tensors without a declared shape."""
    return [
        value.name
        for value in model.graph.output
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")
    ]


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
