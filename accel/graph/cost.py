"""Counts the FLOPs and weights of each node of an ONNX graph, at given sizes of its dynamic dims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accel.errors import one_line
from accel.signature import Signature

if TYPE_CHECKING:
    import onnx

Shape = tuple[int, ...]

_FREE = frozenset(
    {
        "Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape", "Size", "Transpose", "Concat",
        "Split", "Slice", "Gather", "GatherElements", "GatherND", "Expand", "Tile", "Cast", "Pad", "ConstantOfShape",
        "Range", "Dropout",
    }
)  # fmt: skip

# For each operator that needs several floating-point operations per output element, gives the number of operations. For
# example, Softmax needs an exp, a sum and a division.
_ELEMENT = {"Softmax": 5, "LogSoftmax": 6, "LayerNormalization": 8, "Gelu": 8, "Sigmoid": 4, "Tanh": 4, "Erf": 8}
_QUANTIZED = frozenset(
    {"MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "QGemm", "QAttention", "DynamicQuantizeLSTM"}
)
# The number of gates of each recurrent layer. ONNX and ncnn use the same names for these layers.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", *GATES, *_QUANTIZED})


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """The cost of one node. ``flops`` counts a multiply-add as two operations, and is None if a shape isn't known.
    ``product`` is True for a matrix product, a convolution or a recurrent layer. ``quantized`` is True if the node's
    inputs are integers or come from DequantizeLinear.
    """

    name: str
    operator: str
    flops: int | None
    shape: Shape | None
    parameters: int
    product: bool = False
    quantized: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """The cost of a graph at ``sizes``. ``weight_bytes`` holds the bytes of the weights by dtype. ``dynamic_dims``
    lists the names of the inputs' dynamic dims."""

    sizes: Mapping[str, int]
    nodes: tuple[NodeCost, ...]
    parameters: int
    weight_bytes: Mapping[str, int]
    warnings: tuple[str, ...] = ()
    dynamic_dims: tuple[str, ...] = field(default=())

    @property
    def flops(self) -> int:
        """Returns the FLOPs of all nodes whose shapes are known."""
        return sum(node.flops or 0 for node in self.nodes)

    @property
    def by_operator(self) -> dict[str, int]:
        """Returns the FLOPs of each operator, the largest first."""
        found: Counter[str] = Counter()
        for node in self.nodes:
            found[node.operator] += node.flops or 0
        return {name: count for name, count in found.most_common() if count}

    @property
    def quantized_share(self) -> float:
        """Returns the share of FLOPs that are quantized, among all matrix products, convolutions and recurrent
        layers."""
        products = [node for node in self.nodes if node.product and node.flops]
        total = sum(node.flops or 0 for node in products)
        return sum(node.flops or 0 for node in products if node.quantized) / total if total else 0.0

    def most_expensive(self, count: int = 10) -> list[NodeCost]:
        """Returns the nodes with the most FLOPs."""
        return sorted((n for n in self.nodes if n.flops), key=lambda n: -(n.flops or 0))[:count]

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "flops": self.flops,
            "flops_by_operator": self.by_operator,
            "most_expensive": [asdict(node) for node in self.most_expensive()],
            "dynamic_dims": list(self.dynamic_dims),
            "quantized_share": round(self.quantized_share, 4),
            "weight_bytes": dict(self.weight_bytes),
            "warnings": list(self.warnings),
        }


def graph_cost(model: onnx.ModelProto, signature: Signature, sizes: Mapping[str, int] | None = None) -> GraphCost:
    """Returns the cost of ``model`` at ``sizes``, by default the usual sizes of the dynamic dims. Doesn't change the
    model.

    A convolution takes 2 * output elements * kernel elements * input channels / groups FLOPs. A product of [m,k] and
    [k,n] takes 2 * m * k * n FLOPs. A recurrent layer takes 2 * steps * batch * directions * gates * hidden * (input +
    hidden) FLOPs. Other operators take one or a few FLOPs for each element of the output. Operators that only move data
    take no FLOPs.
    """
    from onnx import TensorProto

    at = signature.sizes(**(sizes or {}))
    shapes, inferred = _shapes(model, at)
    constants = {t.name: t for t in model.graph.initializer}
    given = set(constants)
    # Constants that hold axes or sizes don't count as weights.
    sizes_and_flags = (TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING)
    parameters = sum(math.prod(t.dims) for t in constants.values() if t.data_type not in sizes_and_flags)
    weights: Counter[str] = Counter()
    for tensor in constants.values():
        weights[TensorProto.DataType.Name(tensor.data_type).lower()] += _bytes(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                given.add(node.output[0])
                constants[node.output[0]] = attribute.t
                count = math.prod(attribute.t.dims)
                if (
                    attribute.t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
                    and count > 1
                ):
                    parameters += count
                    weights[TensorProto.DataType.Name(attribute.t.data_type).lower()] += _bytes(attribute.t)
    restored = {o for node in model.graph.node if node.op_type == "DequantizeLinear" for o in node.output}
    costs = []
    for index, node in enumerate(model.graph.node):
        own = sum(math.prod(constants[name].dims) for name in node.input if name in constants)
        costs.append(
            NodeCost(
                name=node.name or f"{node.op_type}_{index}",
                operator=node.op_type,
                flops=_flops(node, shapes),
                shape=shapes.get(node.output[0]) if node.output else None,
                parameters=own,
                product=_kind(node) in _PRODUCTS,
                quantized=node.op_type in _QUANTIZED or sum(name in restored for name in node.input[:2]) == 2,
            )
        )
    return GraphCost(
        sizes=at,
        nodes=tuple(costs),
        parameters=parameters,
        weight_bytes=dict(weights.most_common()),
        warnings=tuple(_warnings(model, costs, inferred)),
        dynamic_dims=signature.dynamic_dims,
    )


def _bytes(tensor: onnx.TensorProto) -> int:
    """Returns the size of a tensor in bytes. The tensor's values may be in another file."""
    import onnx

    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    count: int = math.prod(tensor.dims)
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _shapes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> tuple[dict[str, Shape], str]:
    """Returns the shapes of all values at ``sizes``, and the reason if shape inference failed."""
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]
    constants = {t.name: tuple(int(d) for d in t.dims) for t in fixed.graph.initializer}
    for value in fixed.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                own = dim.dim_param if dim.dim_param not in ("", "?") else f"{value.name}_{axis}"
                default = constants.get(value.name)  # an input that is left out has the size of its default
                dim.dim_value = sizes.get(own, 1) if default is None else default[axis]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    problem = ""
    try:
        fixed = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    except Exception as error:
        problem = one_line(error, 160)
    found = dict(constants)
    for value in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") and d.dim_value >= 0 for d in dims):
            found[value.name] = tuple(int(d.dim_value) for d in dims)
    return found, problem


def _kind(node: onnx.NodeProto) -> str:
    """Returns the operator of a node, or MatMul or Conv for a fused operator of accel."""
    fused = {"FusedGemm": "MatMul", "FusedConv2d": "Conv"} if node.domain == "accel" else {}
    return fused.get(node.op_type.partition("_")[0], node.op_type)


def _flops(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int | None:
    kind = _kind(node)
    if kind in _FREE or not node.output:
        return 0
    out = shapes.get(node.output[0])
    ins = [shapes.get(name) for name in node.input]
    if kind in ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
        kernel = ins[3 if kind == "QLinearConv" else 1]
        positions = ins[0] if kind == "ConvTranspose" else out
        if kernel is None or positions is None:
            return None
        return 2 * math.prod(positions) * math.prod(kernel[1:])
    if kind in ("MatMul", "MatMulInteger", "QLinearMatMul", "Gemm"):
        left = ins[0]
        if out is None or left is None or not left:
            return None
        inner = left[0] if kind == "Gemm" and _attribute(node, "transA") else left[-1]
        return 2 * math.prod(out) * inner
    if kind in GATES:
        x, weight = ins[0], ins[1]
        if x is None or weight is None or len(x) != 3:
            return None
        hidden = weight[1] // GATES[kind]
        return 2 * x[0] * x[1] * weight[0] * GATES[kind] * hidden * (x[2] + hidden)
    if kind.startswith(("Reduce", "GlobalAverage", "GlobalMax", "ArgM")):
        return math.prod(ins[0]) if ins and ins[0] is not None else None
    if kind in ("MaxPool", "AveragePool"):
        window = next((math.prod(a.ints) for a in node.attribute if a.name == "kernel_shape"), 1)
        return None if out is None else math.prod(out) * window
    return None if out is None else math.prod(out) * _ELEMENT.get(kind, 1)


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), 0)


def _warnings(model: onnx.ModelProto, costs: Sequence[NodeCost], inferred: str) -> list[str]:
    from accel.sources.onnx.file import opset_of

    found = []
    if inferred:
        found.append(f"the declared shapes contradict the graph ({inferred})")
    unknown = [n for n in costs if n.flops is None]
    if unknown:
        found.append(f"{len(unknown)} nodes have no known shape and aren't counted, the first is {unknown[0].name}")
    if random := sorted({n.operator for n in costs if n.operator.startswith(("Random", "Bernoulli", "Multinomial"))}):
        found.append(f"random operators: {', '.join(random)}; outputs differ from run to run")
    if (opset := opset_of(model)) < 13:
        found.append(f"opset {opset} is old; accel export FILE --opset 20 brings it up")
    foreign = sorted({n.domain for n in model.graph.node if n.domain not in ("", "ai.onnx")})
    if foreign:
        found.append(f"operators outside of ONNX: {', '.join(foreign)}")
    inner = sum(1 for n in model.graph.node for a in n.attribute if a.HasField("g"))
    if inner:
        found.append(f"{inner} subgraphs (If, Loop, Scan) whose insides aren't counted")
    return found
