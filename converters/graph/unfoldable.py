"""Finds the weights that no simplification can fold, so that onnxsim doesn't have to copy them."""

from __future__ import annotations

from collections import Counter

import onnx

from accel.sources.onnx.weights import raw_bytes, raw_pieces

from .subgraphs import captured

# These operators keep a weight as it is if another operand depends on an input of the model.
_KEEP_WEIGHTS = frozenset({"Gather", "Gemm", "MatMul"})
# Smaller weights are cheap to copy.
_SMALL_BYTES = 1 << 16
# Weights that begin with the same bytes may be equal, and onnxsim keeps only one of several equal weights.
_COMPARED_BYTES = 4096


def unfoldable(model: onnx.ModelProto) -> set[str]:
    """Returns the names of the large weights that are read only by matrix products and lookups whose other operand
    depends on an input of the model. Leaves out weights that may be equal to another weight."""
    graph = model.graph
    constant = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    foldable = {value.name for value in graph.output}
    for node in graph.node:
        inner = captured(node)
        foldable.update(inner)
        if not inner and all(name in constant for name in node.input if name):
            constant.update(node.output)
            foldable.update(node.input)
        elif node.op_type not in _KEEP_WEIGHTS or node.domain not in ("", "ai.onnx"):
            foldable.update(node.input)
    found = [
        tensor
        for tensor in graph.initializer
        if raw_bytes(tensor) > _SMALL_BYTES and tensor.name in constant and tensor.name not in foldable
    ]
    begins = {
        tensor.name: (tensor.data_type, *tensor.dims, next(raw_pieces(tensor))[:_COMPARED_BYTES]) for tensor in found
    }
    count = Counter(begins.values())
    return {name for name, begin in begins.items() if count[begin] == 1}
