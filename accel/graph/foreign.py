"""Represents graphs of formats other than ONNX in one form that can be counted and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from accel.signature import Signature, TensorSpec, numpy_dtype

from .cost import GraphCost, NodeCost, Shape

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation. ``kind`` is the operator's name in its format. ``inputs`` and ``outputs`` are names of values and
    constants.

    ``shape`` is the shape of the first output. ``product`` and ``quantized`` mean the same as in ``NodeCost``.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shape: Shape | None
    flops: int | None
    parameters: int = 0
    product: bool = False
    quantized: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ForeignGraph:
    """The operations of a graph in the order in which they run.

    ``inputs`` and ``outputs`` map the names of the graph's inputs and outputs to their specs. ``constants`` holds the
    dtype and shape of each weight. ``weight_bytes`` holds the bytes of the weights by dtype.
    """

    operations: tuple[Operation, ...]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    parameters: int = 0
    constants: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def cost(self, signature: Signature, sizes: Mapping[str, int]) -> GraphCost:
        """Returns the counts as a ``GraphCost``, in the same form as for an ONNX graph."""
        nodes = tuple(
            NodeCost(
                name=op.name,
                operator=op.kind,
                flops=op.flops,
                shape=op.shape,
                parameters=op.parameters,
                product=op.product,
                quantized=op.quantized,
            )
            for op in self.operations
        )
        unknown = [node for node in nodes if node.flops is None]
        warnings = list(self.warnings)
        if unknown:
            warnings.append(f"{len(unknown)} operations aren't counted: no known shape, the first is {unknown[0].name}")
        return GraphCost(
            sizes=dict(sizes),
            nodes=nodes,
            parameters=self.parameters,
            weight_bytes=dict(Counter(dict(self.weight_bytes)).most_common()),
            warnings=tuple(warnings),
            dynamic_dims=signature.dynamic_dims,
        )

    def drawn(self) -> onnx.ModelProto:
        """Returns the nodes and edges as an ONNX model, which the page draws. The model can't run."""
        from onnx import ModelProto, helper

        model = ModelProto()
        graph = model.graph
        for specs, values in ((self.inputs, graph.input), (self.outputs, graph.output)):
            for name, spec in specs.items():
                values.append(helper.make_tensor_value_info(name, _element(spec.dtype), list(spec.shape)))
        for name, (dtype, shape) in self.constants.items():
            graph.initializer.add(name=name, dims=shape, data_type=_element(dtype))
        for op in self.operations:
            node = helper.make_node(op.kind, list(op.inputs), list(op.outputs), op.name)
            node.attribute.extend(helper.make_attribute(name, text) for name, text in op.attributes.items())
            graph.node.append(node)
        return model


def _element(dtype: str) -> int:
    from onnx import TensorProto, helper

    try:
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(numpy_dtype(dtype))))
    except (KeyError, TypeError, ValueError):  # ONNX has no type number for some dtypes
        return int(TensorProto.UNDEFINED)
