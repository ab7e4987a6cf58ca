"""Defines ``Wires``: a graph whose nodes are being replaced, with the maker and the readers of each value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from accel.sources.onnx.value_spec import optional_inputs

from ..graph.subgraphs import reads

MICROSOFT = "com.microsoft"
_SHAPES = ("Identity", "Transpose", "Reshape", "Expand", "Unsqueeze", "Squeeze")


class Wires:
    """The top-level graph of ``model``. New nodes take the place of an old node, and ``finish`` writes them back."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes = list(model.graph.node)  # keeps the nodes alive, so that their ids stay unique
        given = {spec.name for spec in optional_inputs(model)}  # the default of an input is no constant
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in given}
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in reads(node):
                self.readers[name].append(node)
        self.outputs = {value.name for value in model.graph.output}
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        values = (*inferred.value_info, *inferred.input, *inferred.output)
        self._types = {value.name: value.type.tensor_type for value in values}
        self._first: list[onnx.NodeProto] = []
        self._instead: dict[int, list[onnx.NodeProto]] = {}
        self._count = 0

    def maker(self, value: str, *ops: str) -> onnx.NodeProto | None:
        """Returns the node that makes ``value`` if it is one of ``ops``, else None."""
        node = self.makers.get(value)
        return node if node is not None and node.op_type in ops and node.domain in ("", "ai.onnx") else None

    def only_reader(self, value: str) -> onnx.NodeProto | None:
        """Returns the node that reads ``value``, or None if several nodes read it or it is an output."""
        found = self.readers[value]
        return found[0] if len(found) == 1 and value not in self.outputs else None

    def scalar(self, value: str) -> float | None:
        """Returns the constant ``value`` if it is one number."""
        tensor = self.constants.get(value)
        if tensor is None or int(np.prod(tensor.dims)) != 1:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])

    def shape(self, value: str) -> list[int | str] | None:
        """Returns the dims of a value that isn't a constant, as far as shape inference knows them."""
        kind = self._types.get(value)
        if kind is None or not kind.HasField("shape"):
            return None
        return [dim.dim_value or dim.dim_param for dim in kind.shape.dim]

    def last_dim(self, value: str) -> int | None:
        """Returns the size of the last dim of ``value``, or None if it isn't fixed."""
        shape = self.shape(value)
        return shape[-1] if shape and isinstance(shape[-1], int) else None

    def up(self, value: str) -> tuple[str, float]:
        """Follows ``value`` upwards through products with one number, and returns the first other value and the
        factor."""
        factor = 1.0
        while (node := self.maker(value, "Mul", "Div")) is not None:
            numbers = [self.scalar(name) for name in node.input]
            if numbers[1] is not None:
                value, number = node.input[0], numbers[1]
            elif numbers[0] is not None and node.op_type == "Mul":
                value, number = node.input[1], numbers[0]
            else:
                break
            factor *= number if node.op_type == "Mul" else 1 / number
        return value, factor

    def up_to(self, value: str, ends: Sequence[str]) -> tuple[str, float] | None:
        """Follows ``value`` upwards through products with one number and changes of the shape, to one of ``ends``.
        Returns the end and the factor, or None if no end is reached."""
        factor = 1.0
        while value not in ends:
            found, more = self.up(value)
            factor *= more
            if found in ends:
                return found, factor
            node = self.maker(found, *_SHAPES)
            if node is None:
                return None
            value = node.input[0]
        return value, factor

    def constant(self, array: np.ndarray, name: str = "") -> str:
        """Adds a constant and returns its name."""
        name = self.name(name or "constant")
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        self.model.graph.initializer.append(tensor)
        self.constants[name] = tensor
        return name

    def name(self, about: str) -> str:
        """Returns a name that no value has."""
        self._count += 1
        name = f"fused/{about}_{self._count}"
        return name if name not in self.makers and name not in self.constants else self.name(about)

    def first(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Adds a node before all others, and returns its output."""
        node = self._node(op, inputs, [self.name(op)], "", attributes)
        self._first.append(node)
        return str(node.output[0])

    def instead(
        self,
        old: onnx.NodeProto,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Adds a node in the place of ``old``, and returns its first output."""
        node = self._node(op, inputs, outputs or [self.name(op)], domain, attributes)
        self._instead.setdefault(id(old), []).append(node)
        self.makers[node.output[0]] = node
        return str(node.output[0])

    def made(self, old: onnx.NodeProto) -> str:
        """Returns the first output of the last node in the place of ``old``."""
        return str(self._instead[id(old)][-1].output[0])

    def finish(self) -> None:
        """Writes the new nodes to the model, and removes the nodes and constants that nothing reads any more."""
        placed = [*self._first]
        for node in self.nodes:
            new = self._instead.get(id(node), [])
            made = {name for one in new for name in one.output if name}
            placed += new
            left = [name for name in node.output if name and name not in made]
            if left or not new:
                placed.append(node)
        made_anew = {name for nodes in self._instead.values() for node in nodes for name in node.output if name}
        kept: list[onnx.NodeProto] = []
        read = set(self.outputs)
        new_ids = {id(node) for nodes in (self._first, *self._instead.values()) for node in nodes}
        for node in reversed(placed):
            own = {name for name in node.output if name}
            own = own if id(node) in new_ids else own - made_anew
            if own & read:
                kept.append(node)
                read |= set(reads(node))
        del self.model.graph.node[:]
        self.model.graph.node.extend(reversed(kept))
        left_constants = [tensor for tensor in self.model.graph.initializer if tensor.name in read]
        del self.model.graph.initializer[:]
        self.model.graph.initializer.extend(left_constants)
        del self.model.graph.value_info[:]
        if all(entry.domain != MICROSOFT for entry in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))

    def _node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str, attributes: dict[str, Any]
    ) -> onnx.NodeProto:
        name = next(name for name in outputs if name)
        return helper.make_node(op, list(inputs), list(outputs), name=f"{name}/{op}", domain=domain, **attributes)
