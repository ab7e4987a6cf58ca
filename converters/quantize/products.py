"""Products with constant weights: which of them a graph has, and how their weights lie."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")

_FLOAT = 1  # TensorProto.FLOAT


def layers_to_quantize(model: onnx.ModelProto, excluded: Collection[str], ops: tuple[str, ...]) -> list[onnx.NodeProto]:
    """The products among ``ops`` with constant float32 weights that aren't ``excluded`` by name."""
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == _FLOAT}
    return [
        node
        for node in model.graph.node
        if node.op_type in ops and node.op_type in PRODUCTS and node.input[1] in weights and node.name not in excluded
    ]


def channel_axis(node: onnx.NodeProto) -> int:
    """The axis of the weights that has one entry for each output channel."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return 1


def drop_unread(model: onnx.ModelProto) -> None:
    """Leave out the weights that nothing reads any more."""
    read = _read(model.graph) | {value.name for value in model.graph.output}
    left = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(left)


def _read(graph: onnx.GraphProto) -> set[str]:
    """What nodes read, in graphs inside them too."""
    inner = (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs))
    found = {name for node in graph.node for name in node.input}
    return found.union(*(_read(g) | {value.name for value in g.output} for g in inner))
