"""Reads the specs of an ONNX graph's inputs and outputs, and finds the inputs that a caller may leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accel.errors import BadInputSpec, InvalidModel
from accel.signature import Dim, TensorSpec
from accel.spelling import option

if TYPE_CHECKING:
    import onnx


def inputs_with_defaults(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """Returns the inputs whose default is an initializer with values. ``describe`` leaves out inputs with a default.
    Returns an empty tuple for a model with an IR version below 4, because such a model also lists its constant
    initializers as inputs.
    """
    empty = {spec.name for spec in optional_inputs(model)}
    return tuple(spec for spec in _with_initializer(model) if spec.name not in empty)


def optional_inputs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a dynamic size whose default is an empty initializer, such as the matrices of an adapter of
    rank 0. The default adds nothing to the model, so the file is made for a caller who gives the input."""
    empty = {tensor.name for tensor in model.graph.initializer if 0 in tensor.dims}
    found = (spec for spec in _with_initializer(model) if spec.name in empty)
    return tuple(spec for spec in found if any(isinstance(dim, str) for dim in spec.shape))


def _with_initializer(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    if model.ir_version < 4:
        return ()
    initializers = {t.name for t in model.graph.initializer}
    return tuple(replace(spec_of(v), optional=True) for v in model.graph.input if v.name in initializers)


def spec_of(value: onnx.ValueInfoProto, *, is_input: bool = False) -> TensorSpec:
    """Returns the name, dtype and shape of a tensor of the graph. Raises ``BadInputSpec`` for an input without a
    declared shape, and ``InvalidModel`` for any other tensor without one."""
    import onnx

    kind = value.type.tensor_type
    if is_input and value.type.HasField("tensor_type") and not kind.HasField("shape"):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        raise BadInputSpec(
            f"the input {value.name!r} has no declared shape; declare its shape with {option('inputs')}, e.g. "
            f"{option('inputs', [f'{value.name}:{dtype}[batch,3]'])} for rows of 3 numbers"
        )
    if value.type.HasField("tensor_type") and not kind.HasField("shape"):
        raise InvalidModel(
            f"tensor {value.name!r} has no declared shape, and none follows from the graph; export the model again "
            "with the shapes of its inputs and outputs"
        )
    if not value.type.HasField("tensor_type"):
        raise InvalidModel(
            f"the value {value.name!r} is a {value.type.WhichOneof('value')}, but inputs and outputs have "
            "to be tensors; export the model with tensors"
        )
    try:
        name = onnx.TensorProto.DataType.Name(kind.elem_type).lower()
    except ValueError:
        raise InvalidModel(
            f"tensor {value.name!r} has the unknown dtype {kind.elem_type}; export the model again"
        ) from None
    dtype = {"float": "float32", "double": "float64"}.get(name, name.replace("float8e", "float8_e"))
    shape: list[Dim] = []
    for axis, dim in enumerate(kind.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            shape.append(int(dim.dim_value))
        else:
            # Some exporters write "?" for every unknown dim, so two "?" may be different dims.
            shape.append(dim.dim_param if dim.dim_param not in ("", "?") else f"{value.name}_{axis}")
    return TensorSpec(value.name, dtype, tuple(shape))
