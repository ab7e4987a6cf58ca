"""Writes the weights of an exported program from the memory of the module, without a copy in a protobuf message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel.sources.onnx.file import SMALL_BYTES
from accel.sources.onnx.weights import held_in_memory

if TYPE_CHECKING:
    import onnx


@contextmanager
def with_weights_in_memory(program: Any) -> Iterator[onnx.ModelProto]:
    """Yields the model of ``program`` (a ``torch.onnx.ONNXProgram``). The model's large weights are detached, and refer
    to the arrays in memory until the ``with`` block ends."""
    import onnx_ir

    values = [value for value in program.model.graph.initializers.values() if _is_large(value.const_value)]
    tensors = [value.const_value for value in values]
    with held_in_memory([tensor.numpy() for tensor in tensors]) as locations:
        try:
            for value, tensor, location in zip(values, tensors, locations, strict=True):
                value.const_value = onnx_ir.ExternalTensor(
                    location,
                    0,
                    tensor.nbytes,
                    tensor.dtype,
                    shape=tensor.shape,
                    name=tensor.name,
                    doc_string=tensor.doc_string,
                    metadata_props=dict(tensor.metadata_props),
                )
            model = program.model_proto
        finally:
            for value, tensor in zip(values, tensors, strict=True):
                value.const_value = tensor
        yield model


def _is_large(tensor: Any) -> bool:
    """Tells whether numpy has the dtype of a weight, and the weight is large."""
    return tensor is not None and tensor.dtype.bitwidth >= 8 and tensor.nbytes > SMALL_BYTES
