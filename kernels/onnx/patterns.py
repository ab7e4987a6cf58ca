"""Replaces ``act(A @ W + bias) + residual`` by ``accel::FusedGemm`` in an ONNX graph.

Replaces a convolution with a bias, activation or residual by ``accel::FusedConv2d``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import onnx
from accel.errors import UnsupportedHere
from accel.spelling import option
from onnx import helper, numpy_helper

from ..catalogue.reference import act_numpy
from .function import DOMAIN, DTYPES, MIN_IR, MIN_OPSET, VERSION, FusedConv2d, FusedGemm

_POINTS = np.linspace(-6.0, 6.0, 49)
# A model may hold the constants of an activation in bf16. Rounding a constant to bf16 may change the activation's
# values at _POINTS by at most _ROUNDED.
_ROUNDED = 2e-3
_LONGEST = 12  # An activation has at most _LONGEST nodes. GELU by tanh has nine nodes.
_ARITHMETIC: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Exp": np.exp,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Erf": np.vectorize(math.erf),
}
_ACT_WITH = {"Erf": "gelu_erf", "Tanh": "gelu_tanh", "Sigmoid": "silu", "Exp": "silu"}


@dataclass(kw_only=True)
class _Match:
    """Describes a chain of nodes that can be fused, with its operation, its operands, its last value and its nodes.

    ``geometry`` has the sizes of a convolution, and is empty for a product.
    """

    product: str
    operands: list[str]
    out: str
    nodes: list[onnx.NodeProto]
    act: str = "none"
    bias: bool = False
    residual: str | None = None
    geometry: dict[str, Any] = field(default_factory=dict)

    def take(self, *nodes: onnx.NodeProto) -> None:
        self.nodes += nodes
        self.out = self.nodes[-1].output[0]


class _Graph:
    """Holds the producers, consumers, constants and shapes of the top-level graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = onnx.shape_inference.infer_shapes(model).graph
        self.nodes = list(model.graph.node)  # The list keeps the nodes alive, so that ids of nodes stay unique.
        self.gone: set[int] = set()  # The ids of the nodes that belong to a match.
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            for name in node.input:
                self.users[name].append(node)
        kept = {value.name for value in model.graph.output}
        for node in model.graph.node:
            kept |= {name for inner in _subgraphs(node) for name in _names(inner)}
        self.kept = kept  # values that are graph outputs or that subgraphs read
        self.types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}

    def only_user(self, name: str) -> onnx.NodeProto | None:
        users = self.users[name]
        if len(users) != 1 or name in self.kept or id(users[0]) in self.gone:
            return None
        return users[0]

    def scalar(self, name: str) -> float | None:
        tensor = self.constants.get(name)
        if tensor is None or math.prod(tensor.dims) != 1 or len(tensor.dims) > 1:
            return None
        return float(np.asarray(numpy_helper.to_array(tensor)).reshape(-1)[0])

    def shape(self, name: str) -> tuple[Any, ...] | None:
        kind = self.types.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        dims = tuple(d.dim_value or d.dim_param for d in kind.shape.dim)
        return dims if all(dims) else None

    def dtype(self, name: str) -> int | None:
        if name in self.constants:
            return int(self.constants[name].data_type)
        return int(self.types[name].elem_type) if name in self.types else None

    def rank(self, name: str) -> int | None:
        if name in self.constants:
            return len(self.constants[name].dims)
        shape = self.types.get(name)
        return len(shape.shape.dim) if shape is not None and shape.HasField("shape") else None


def fuse_products(model: onnx.ModelProto, *, residual: bool = True) -> list[str]:
    """Replaces every chain of nodes that can be fused in ``model``, in place. Returns the names of the functions that
    replace the chains, in graph order.

    Raises ``UnsupportedHere`` if the model's opset is below 13 or its IR version is below 8, because accel's functions
    need these versions.
    """
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset < MIN_OPSET or model.ir_version < MIN_IR:
        raise UnsupportedHere(
            f"the model has opset {opset} and IR version {model.ir_version}, but fused operators need opset "
            f"{MIN_OPSET} and IR version {MIN_IR}; export it again with {option('opset', 20)}"
        )
    graph = _Graph(model)
    functions: dict[str, onnx.FunctionProto] = {}
    replaced: dict[int, onnx.NodeProto] = {}
    order = {id(node): at for at, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if id(node) in graph.gone or (match := _start(node, graph)) is None:
            continue
        _grow(match, graph, residual)
        dtype = graph.dtype(match.operands[1])
        if len(match.nodes) == 1 and match.product in ("matmul", "conv"):
            continue  # no other node can be fused with the product
        if dtype not in DTYPES:
            continue
        fused = _function(match, dtype)
        functions.setdefault(fused.name, fused.function(opset))
        inputs = [*match.operands, *([match.residual] if match.residual else [])]
        # The new node replaces the last node of the chain, because all operands of the chain are computed before the
        # last node runs.
        last = max(match.nodes, key=lambda taken: order[id(taken)])
        replaced[id(last)] = helper.make_node(fused.name, inputs, [match.out], name=node.name, domain=DOMAIN)
        graph.gone |= {id(taken) for taken in match.nodes}
    if not replaced:
        return []
    nodes = [replaced.get(id(n), n) for n in graph.nodes if id(n) in replaced or id(n) not in graph.gone]
    made = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(made)
    model.functions.extend(functions.values())
    if all(o.domain != DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    _drop_unused_constants(model)
    still_there = {name for n in made for name in n.output} | {v.name for v in model.graph.input}
    infos = [info for info in model.graph.value_info if info.name in still_there]
    del model.graph.value_info[:]
    model.graph.value_info.extend(infos)
    return [n.op_type for n in made if n.domain == DOMAIN]


def _drop_unused_constants(model: onnx.ModelProto) -> None:
    """Removes constants that no node reads any more, such as the numbers in a fused GELU, because runtimes warn about
    unused constants."""
    used = _names(model.graph) | {value.name for value in model.graph.input}
    for held in (model.graph.initializer, model.graph.node):
        for at in reversed(range(len(held))):
            item = held[at]
            names = [item.name] if isinstance(item, onnx.TensorProto) else item.output
            if (isinstance(item, onnx.TensorProto) or item.op_type == "Constant") and used.isdisjoint(names):
                del held[at]


def _function(match: _Match, dtype: int) -> FusedGemm | FusedConv2d:
    epilogue: dict[str, Any] = {"act": match.act, "bias": match.bias, "residual": match.residual is not None}
    if match.product == "conv":
        return FusedConv2d(**match.geometry, **epilogue, dtype=dtype)
    return FusedGemm(product=match.product, **epilogue, dtype=dtype)


def _start(node: onnx.NodeProto, graph: _Graph) -> _Match | None:
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm", "Conv"):
        return None
    if node.op_type == "Conv":
        return _start_conv(node, graph)
    weight = graph.constants.get(node.input[1])
    if weight is None or len(weight.dims) != 2:
        return None
    if node.op_type == "MatMul":
        if (graph.rank(node.input[0]) or 0) < 2:
            return None
        return _Match(product="matmul", operands=list(node.input), out=node.output[0], nodes=[node])
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0 or attributes.get("transA", 0):
        return None
    transposed = bool(attributes.get("transB", 0))
    operands = [name for name in node.input if name]
    if len(operands) == 3 and not _is_bias(operands[2], weight.dims[0 if transposed else 1], graph):
        return None
    product = "gemm_nt" if transposed else "gemm_nn"
    return _Match(product=product, operands=operands, out=node.output[0], nodes=[node], bias=len(operands) == 3)


def _start_conv(node: onnx.NodeProto, graph: _Graph) -> _Match | None:
    """Starts a match if ``node`` is a 2-D convolution of one group with symmetric padding, else returns None."""
    weight = graph.constants.get(node.input[1])
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if weight is None or len(weight.dims) != 4 or attributes.get("group", 1) != 1:
        return None
    pads = attributes.get("pads", [0, 0, 0, 0])
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or pads[:2] != pads[2:] or min(pads) < 0:
        return None
    operands = [name for name in node.input if name]
    if len(operands) == 3 and not _is_bias(operands[2], weight.dims[0], graph):
        return None
    geometry = {
        "kernel": (weight.dims[2], weight.dims[3]),
        "stride": tuple(attributes.get("strides", [1, 1])),
        "padding": tuple(pads[:2]),
        "dilation": tuple(attributes.get("dilations", [1, 1])),
    }
    bias = len(operands) == 3
    return _Match(product="conv", operands=operands, out=node.output[0], nodes=[node], bias=bias, geometry=geometry)


def _grow(match: _Match, graph: _Graph, residual: bool) -> None:
    weight = graph.constants[match.operands[1]]
    after = graph.only_user(match.out)
    if match.product == "matmul" and after is not None and after.op_type == "Add":
        other = _other(after, match.out)
        if other is not None and _is_bias(other, weight.dims[1], graph):
            match.operands.append(other)
            match.bias = True
            match.take(after)
    _take_act(match, graph)
    after = graph.only_user(match.out)
    if not residual or after is None or after.op_type != "Add":
        return
    other = _other(after, match.out)
    # The shapes have to be equal, because the kernels don't broadcast the residual.
    if other is None or other in graph.constants or graph.shape(other) is None:
        return
    if graph.shape(other) == graph.shape(match.out) and graph.dtype(other) == graph.dtype(match.out):
        match.residual = other
        match.take(after)


def _take_act(match: _Match, graph: _Graph) -> None:
    x = match.out
    after = graph.only_user(x)
    if after is not None and after.op_type == "Relu":
        match.act = "relu"
        match.take(after)
    elif after is not None and after.op_type == "Gelu":
        how = {a.name: a.s for a in after.attribute}.get("approximate", b"none")
        match.act = "gelu_tanh" if how == b"tanh" else "gelu_erf"
        match.take(after)
    elif found := _written_out(x, graph):
        match.act = found[0]
        match.take(*found[1])


def _written_out(x: str, graph: _Graph) -> tuple[str, list[onnx.NodeProto]] | None:
    """Finds an activation of ``x`` that consists of arithmetic nodes. Returns the activation's name and its nodes, with
    the node of the result last.

    GELU can be written with many combinations of nodes, so the function compares computed values and not nodes.
    Computes the nodes after ``x`` until no remaining node reads an intermediate result. Compares the final result with
    one activation, such as GELU if the nodes include an Erf.
    """
    values: dict[str, Any] = {x: _POINTS}
    nodes: list[onnx.NodeProto] = []
    waiting = list(graph.users[x])
    while waiting and len(nodes) < _LONGEST:
        node = waiting.pop(0)
        if node.op_type not in _ARITHMETIC or any(node is taken for taken in nodes) or id(node) in graph.gone:
            continue
        given = [values.get(name, graph.scalar(name)) for name in node.input]
        if any(value is None for value in given):
            continue  # the value of an input is unknown, or a later node computes it
        with np.errstate(all="ignore"):
            out = _ARITHMETIC[node.op_type](*given)
        nodes.append(node)
        held = {id(taken) for taken in nodes}
        if not any(name in graph.kept or any(id(user) not in held for user in graph.users[name]) for name in values):
            act = next((_ACT_WITH[taken.op_type] for taken in nodes if taken.op_type in _ACT_WITH), "none")
            if act != "none" and np.allclose(out, act_numpy(act, _POINTS), rtol=0, atol=_ROUNDED):
                return act, nodes
        values[node.output[0]] = out
        waiting += graph.users[node.output[0]]
    return None


def _other(node: onnx.NodeProto, name: str) -> str | None:
    if len(node.input) != 2 or node.input[0] == node.input[1] or name not in node.input:
        return None
    return str(node.input[1] if node.input[0] == name else node.input[0])


def _is_bias(name: str, size: int, graph: _Graph) -> bool:
    tensor = graph.constants.get(name)
    return tensor is not None and list(tensor.dims) == [size]


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [g for a in node.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def _names(graph: onnx.GraphProto) -> set[str]:
    found = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        for inner in _subgraphs(node):
            found |= _names(inner)
    return found
