"""Describes the model before the cast: the float32 tensors, their producers and consumers, and the nodes to cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

from accel.runtimes.onnx_rounded import elem_types, tensor_types
from accel.signature import numpy_dtype
from accel.sources.onnx.functions import inlined
from accel.sources.onnx.weights import rounded

from ..graph.subgraphs import captured

FLOAT = int(TensorProto.FLOAT)
FORMATS = {"fp16": int(TensorProto.FLOAT16), "bf16": int(TensorProto.BFLOAT16)}
_NAMES = {int(TensorProto.FLOAT16): "float16", int(TensorProto.BFLOAT16): "bfloat16", FLOAT: "float32"}

# Operators that take inputs of any float dtype, so their inputs need no Cast.
_OBSERVERS = frozenset({"Cast", "Shape", "Size"})

# Operators whose output dtype is set by an attribute. The cast keeps nodes of these operators in float32. For example,
# random operators would generate different numbers in 16 bits.
_GENERATORS = frozenset(
    {
        "Bernoulli", "BlackmanWindow", "EyeLike", "HammingWindow", "HannWindow", "MelWeightMatrix", "Multinomial",
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "SequenceEmpty",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Typing:
    """The dtypes of a node after the cast. ``inputs`` and ``outputs`` map the position of each float32 input or output
    to float32 or to the 16-bit format.

    ``inputs`` has no entry for the input of a Cast, Shape or Size, which takes any dtype. ``reason`` tells why the node
    can't be 16-bit. If the model's opset is too low for 16 bits, ``least_opset`` is the first opset that allows 16
    bits.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    reason: str = ""
    least_opset: int | None = None


class Source:
    """The model before the cast, with the producers, consumers and dtypes of its tensors. Doesn't change ``model``."""

    def __init__(self, model: onnx.ModelProto, low: int) -> None:
        self.model = inlined(model)
        self.low = low
        self.nodes = list(self.model.graph.node)
        self.typed = tensor_types(self.model).graph
        self.types = elem_types(self.typed)
        self.opsets = {o.domain if o.domain != "ai.onnx" else "": int(o.version) for o in self.model.opset_import}
        self.constants = {t.name: t for t in self.model.graph.initializer if t.data_type == FLOAT}
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            if (value := constant_value(node)) is not None:
                self.constants[node.output[0]] = value
                self.types[node.output[0]] = FLOAT
            for name in filter(None, node.output):
                self.producer[name] = index
            for name in dict.fromkeys(filter(None, (*node.input, *captured(node)))):
                self.consumers.setdefault(name, []).append(index)
        self.outputs = [value.name for value in self.model.graph.output]
        self._typings = [self._typing(node) for node in self.nodes]

    def is_float(self, name: str) -> bool:
        return self.types.get(name) == FLOAT

    def is_constant_node(self, index: int) -> bool:
        return self.nodes[index].op_type == "Constant" and self.nodes[index].output[0] in self.constants

    def typing(self, index: int) -> Typing:
        """Returns the dtypes of node ``index`` after the cast, if no rule keeps the node in float32."""
        return self._typings[index]

    def castable(self, index: int) -> bool:
        typing = self._typings[index]
        return self.low in typing.inputs.values() or self.low in typing.outputs.values()

    def label(self, index: int) -> str:
        """Returns the node's name, or the operator and output of an unnamed node."""
        node = self.nodes[index]
        return node.name or f"{node.op_type} -> {next(filter(None, node.output), '')}"

    def _typing(self, node: NodeProto) -> Typing:
        floats_in = [i for i, name in enumerate(node.input) if self.is_float(name)]
        floats_out = [i for i, name in enumerate(node.output) if self.is_float(name)]
        stay = Typing(dict.fromkeys(floats_in, FLOAT), dict.fromkeys(floats_out, FLOAT))
        if node.op_type == "Constant" or not (floats_in or floats_out):
            return stay
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            return Typing(stay.inputs, stay.outputs, "it has a subgraph, which stays float32")
        if node.domain not in ("", "ai.onnx"):
            return Typing(stay.inputs, stay.outputs, f"{node.domain}.{node.op_type} is not an ONNX operator")
        if any(name and name not in self.types for name in (*node.input, *node.output)):
            return Typing(stay.inputs, stay.outputs, "one of its tensors has no known dtype")
        if node.op_type in _GENERATORS:
            return Typing(stay.inputs, stay.outputs, f"an attribute of {node.op_type} sets its dtype")
        if node.op_type == "Cast":
            to = next(a.i for a in node.attribute if a.name == "to")
            return Typing({}, {0: self.low} if to == FLOAT else {})
        if node.op_type in _OBSERVERS:
            return Typing({}, stay.outputs)
        if node.op_type == "ConstantOfShape":
            return Typing({}, dict.fromkeys(floats_out, self.low))
        return self._by_schema(node, floats_in, floats_out)

    def _by_schema(self, node: NodeProto, floats_in: list[int], floats_out: list[int]) -> Typing:
        schema = onnx.defs.get_schema(node.op_type, self.opsets[""], "")
        wanted = f"tensor({_NAMES[self.low]})"
        allowed = {c.type_param_str: wanted in c.allowed_type_strs for c in schema.type_constraints}

        def formal(formals: list[onnx.defs.OpSchema.FormalParameter], position: int) -> str:
            return formals[min(position, len(formals) - 1)].type_str

        variables = {i: formal(list(schema.inputs), i) for i in floats_in}
        low = {v for v in variables.values() if allowed.get(v)}
        # Without the attribute output_dtype, the output of DequantizeLinear has the dtype of its scale.
        follows = node.op_type == "DequantizeLinear" and not any(a.name == "output_dtype" for a in node.attribute)
        inputs = {i: self.low if v in low else FLOAT for i, v in variables.items()}
        outputs = {}
        for i in floats_out:
            variable = formal(list(schema.outputs), i)
            tied = variable in low or (follows and allowed.get(variable, False) and self.low in inputs.values())
            outputs[i] = self.low if tied else FLOAT
        if self.low in inputs.values():
            return Typing(inputs, outputs)
        return Typing(inputs, outputs, *self._refusal(node.op_type, floats_in))

    def _refusal(self, op_type: str, floats_in: list[int]) -> tuple[str, int | None]:
        """Returns why an operator takes no 16-bit inputs at the model's opset. Also returns the first opset at which
        the operator takes 16-bit inputs, or None if no opset allows 16-bit inputs."""
        name, wanted = _NAMES[self.low], f"tensor({_NAMES[self.low]})"
        for opset in range(self.opsets[""] + 1, onnx.defs.onnx_opset_version() + 1):
            schema = onnx.defs.get_schema(op_type, opset, "")
            formals = list(schema.inputs)
            variables = {formals[min(i, len(formals) - 1)].type_str for i in floats_in}
            if any(c.type_param_str in variables and wanted in c.allowed_type_strs for c in schema.type_constraints):
                return f"{op_type} takes {name} from opset {opset}, but the model has {self.opsets['']}", opset
        return f"{op_type} takes no {name}", None


def constant_value(node: NodeProto) -> TensorProto | None:
    """Returns the float32 tensor of a Constant node, or None for any other node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    attribute = node.attribute[0]
    if attribute.name == "value" and attribute.t.data_type == FLOAT:
        tensor: TensorProto = attribute.t
        return tensor
    if attribute.name == "value_float":
        return numpy_helper.from_array(np.array(attribute.f, np.float32), node.output[0])
    if attribute.name == "value_floats":
        return numpy_helper.from_array(np.array(attribute.floats, np.float32), node.output[0])
    return None


def to_low(value: np.ndarray, low: int) -> np.ndarray:
    """Returns ``value`` rounded to the format. Finite values stay finite: -1e9 becomes the lowest finite number."""
    return rounded(value, numpy_dtype(_NAMES[low]))


def largest(low: int) -> float:
    """Returns the format's largest finite number."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(_NAMES[low])).max)
