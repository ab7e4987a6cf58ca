"""Finds the outputs that an ONNX graph computes from integers alone."""

from __future__ import annotations

from pathlib import Path

from .file import read_without_weights

# These operators read only the shape of their input.
_OF_SHAPES = frozenset({"Shape", "Size"})


def integers_alone(path: Path) -> frozenset[str]:
    """Returns the names of the outputs that hold integers or bools, and that the graph in ``path`` computes without a
    float. No rounding changes these outputs. A tensor of unknown type counts as a float, and so does the result of a
    node with a subgraph."""
    import onnx
    from onnx import TensorProto

    whole = {
        getattr(TensorProto, name)
        for name in ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
    }
    graph = onnx.shape_inference.infer_shapes(read_without_weights(path)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    made = {name for node in graph.node for name in node.output}
    exact = {name for name, dtype in types.items() if dtype in whole and name not in made}
    for node in graph.node:
        inner = any(attribute.type in (attribute.GRAPH, attribute.GRAPHS) for attribute in node.attribute)
        clean = all(name in exact for name in node.input if name) or node.op_type in _OF_SHAPES
        if clean and not inner:
            exact |= {name for name in node.output if types.get(name) in whole}
    return frozenset(value.name for value in graph.output) & exact
