"""Finds the nodes of an ONNX graph that TensorRT would refuse, and gives the cause and a fix for each node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import one_line
from accel.sources.onnx.file import all_nodes, read_proto
from accel.tables.precision import PRECISIONS

if TYPE_CHECKING:
    import onnx

SYMMETRIC = "quantize it symmetrically to int8 (accel optimize and accel preflight --fix do)"
NO_BIAS = "quantize it without quantizing biases (accel optimize and accel preflight --fix do)"
IN_FLOAT32 = "compute it in float32 (accel optimize and accel preflight --fix do, and compare)"
STANDARD = "rewrite it with standard ONNX operators or export with another opset"

# If a rewrite of the graph would change the outputs, the error message ends with NEEDS_FLOAT64 or NEEDS_OWN_SCALES.
NEEDS_FLOAT64 = "change the model so that float32 is enough, or use the target ort-cpu, which computes in float64"
NEEDS_OWN_SCALES = "quantize the float model again, with accel optimize --precision int8 --data"

# The first compute capability that supports each dtype.
FIRST_WITH = {"bfloat16": PRECISIONS["bf16"].min_capability, "float8": PRECISIONS["fp8"].min_capability}

# The dtypes that TensorRT lacks. TensorRT has uint8, but only for inputs and outputs of a graph.
_UNKNOWN = ("UINT16", "INT16", "UINT32", "UINT64", "STRING", "COMPLEX64", "COMPLEX128")

# TensorRT's parser is recursive. accel gives the parser a stack of at most 1 GiB, which is enough for a chain of
# LONGEST_CHAIN nodes.
LONGEST_CHAIN = 400_000

_QDQ = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Describes a node that TensorRT refuses. ``node`` is the node's name, or the first output of an unnamed node.
    ``safe`` means that ``fit_tensorrt`` rewrites the node."""

    node: str
    operator: str
    cause: str
    fix: str
    safe: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def preflight(
    path: Path,
    capabilities: Sequence[str] = (),
    supported: Mapping[str, bool] | None = None,
    read: onnx.ModelProto | None = None,
) -> list[Refusal]:
    """Returns every node of ``path`` that TensorRT refuses or silently computes in another dtype.

    ``capabilities`` lists the GPUs to build for. ``supported`` is the result of ``ask_parser``, and may be empty. If
    the caller has already loaded the model, ``read`` is this model. Raises ``InvalidModel`` if ``path`` is not an ONNX
    file.
    """
    from accel.runtimes.onnx_rounded import elem_types, tensor_types
    from accel.sources.onnx.functions import inlined

    model = inlined(read_proto(path) if read is None else read)
    graph = model.graph
    try:
        types = elem_types(tensor_types(model).graph)
    except Exception:  # onnx.checker has better error messages than the type inference
        types = elem_types(graph)
    found = [*_quantization(graph, types), *_types(graph, types, capabilities), *_operators(graph, supported or {})]
    if (depth := _depth(graph)) > LONGEST_CHAIN:
        last = graph.node[-1]
        found.append(_refusal(last, f"it ends a chain of {depth} nodes, too long for the parser's stack", "split it"))
    return found


def refused(found: Sequence[Refusal], model: str) -> str:
    """Returns one sentence about all refusals, grouped by cause."""
    groups: dict[tuple[str, str], list[Refusal]] = {}
    for row in found:
        groups.setdefault((row.cause, row.fix), []).append(row)
    parts = []
    for (cause, fix), rows in groups.items():
        names = ", ".join(f"{row.node!r} ({row.operator})" for row in rows[:4])
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        parts.append(f"{'nodes' if len(rows) > 1 else 'node'} {names}{more}: {cause}; {fix}")
    return f"TensorRT refuses of {model} " + "; ".join(parts)


def ask_parser(path: Path, toolkit: str, capabilities: Sequence[str] = ()) -> dict[str, bool]:
    """Returns a dict that maps each operator of the model to True if the toolkit's parser knows the operator.

    Must run in a child process, because the parser can crash. Raises ``UnsupportedHere`` if the toolkit can't build for
    one of ``capabilities``.
    """
    from accel.runtimes.tensorrt_toolkit import (
        Log,
        choose_capabilities,
        load_toolkit,
        make_logger,
        offered_capabilities,
    )

    trt = load_toolkit(toolkit)
    if offered := offered_capabilities(trt):  # if ``offered`` is empty, the toolkit builds only for this machine's GPU
        choose_capabilities(toolkit, offered, tuple(capabilities))
    logger = make_logger(trt, Log())
    return known_operators(trt, trt.Builder(logger), logger, read_proto(path))


def known_operators(trt: Any, builder: Any, logger: Any, model: onnx.ModelProto) -> dict[str, bool]:
    """Returns a dict that maps each operator of ``model`` to True if the toolkit's parser knows the operator. A parser
    that knows all operators may still refuse individual nodes."""
    from accel.sources.onnx.functions import inlined

    parser = trt.OnnxParser(empty_network(trt, builder), logger)
    names = {node.op_type for node in all_nodes(inlined(model).graph)}
    return {name: bool(parser.supports_operator(name)) for name in sorted(names)}


def empty_network(trt: Any, builder: Any) -> Any:
    """Returns a new network, strongly typed if this TensorRT has a flag for strong typing."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return builder.create_network(0 if flag is None else 1 << int(flag))


def _refusal(node: onnx.NodeProto, cause: str, fix: str, *, safe: bool = False) -> Refusal:
    name = node.name or next(iter(node.output), "")
    return Refusal(node=name, operator=node.op_type, cause=cause, fix=fix, safe=safe)


def _quantization(graph: onnx.GraphProto, types: Mapping[str, int]) -> Iterator[Refusal]:
    from onnx import TensorProto

    constants = constant_tensors(graph)
    for node in graph.node:
        if node.op_type not in _QDQ or node.domain not in ("", "ai.onnx"):
            continue
        kind = quantized_type(node, types)
        if kind == TensorProto.INT32 and node.op_type == "DequantizeLinear":
            safe = node.input[0] in constants
            yield _refusal(node, "it dequantizes from Int32 (a bias), which TensorRT doesn't", NO_BIAS, safe=safe)
        elif kind in (TensorProto.UINT8, TensorProto.UINT16):
            # TensorRT accepts uint8 without an error, but reads 0..255 as -128..127.
            yield _refusal(node, "TensorRT has no uint8 quantization", SYMMETRIC, safe=kind == TensorProto.UINT8)
        elif len(node.input) > 2 and _nonzero(constants.get(node.input[2])):
            yield _refusal(node, "its zero point isn't zero", SYMMETRIC, safe=True)


def quantized_type(node: onnx.NodeProto, types: Mapping[str, int]) -> int:
    """Returns the output dtype of a QuantizeLinear or the input dtype of a DequantizeLinear, or 0 if unknown."""
    from onnx import TensorProto

    if len(node.input) > 2 and node.input[2]:
        return types.get(node.input[2], 0)
    if node.op_type == "QuantizeLinear":
        # A QuantizeLinear without a zero point writes uint8. Since opset 21, the node's attribute ``output_dtype`` can
        # set another output dtype.
        return next((a.i for a in node.attribute if a.name == "output_dtype" and a.i), int(TensorProto.UINT8))
    return types.get(node.input[0], 0)


def constant_tensors(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns a dict that maps names to the tensors of initializers and Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            name = node.output[0]
            found |= {name: a.t for a in node.attribute if a.name == "value"}  # noqa: B035 - one at most
    return found


def _nonzero(tensor: onnx.TensorProto | None) -> bool:
    from onnx import TensorProto, numpy_helper

    if tensor is None or tensor.data_type not in (TensorProto.INT8, TensorProto.INT16):
        return False
    if tensor.data_location == TensorProto.EXTERNAL:
        return False
    return bool(numpy_helper.to_array(tensor).any())


def computes_in_float64(graph: onnx.GraphProto) -> bool:
    """Checks whether ``graph`` has float64 parts that ``fit_tensorrt`` can rewrite. Float64 parts can be rewritten if
    no input and no output is float64."""
    from onnx import TensorProto

    if any(v.type.tensor_type.elem_type == TensorProto.DOUBLE for v in (*graph.input, *graph.output)):
        return False
    if any(tensor.data_type == TensorProto.DOUBLE for tensor in graph.initializer):
        return True
    for node in all_nodes(graph):
        for a in node.attribute:
            tensors = (a.t, *a.tensors, *(t for g in (a.g, *a.graphs) for t in g.initializer))
            if any(tensor.data_type == TensorProto.DOUBLE for tensor in tensors):
                return True
            if a.name in ("to", "dtype") and a.i == TensorProto.DOUBLE:
                return True
    return False


def _types(graph: onnx.GraphProto, types: Mapping[str, int], capabilities: Sequence[str]) -> Iterator[Refusal]:
    from onnx import TensorProto

    names: dict[int, str] = {
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.FLOAT8E4M3FN: "float8",
        TensorProto.FLOAT8E5M2: "float8",
    }
    fixes = {
        "bfloat16": "export it in float32 or float16, or build for 8.0 and later",
        "float8": "use int8 or build for 8.9 and later",
    }
    ends = {value.name for value in (*graph.input, *graph.output)}
    for role, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
                yield Refusal(
                    node=value.name,
                    operator=role,
                    cause="TensorRT reads float64 as float32",
                    fix="convert the model to float32 before it is exported (model.float())",
                )
    double = computes_in_float64(graph)
    lacking: dict[str, str] = {}
    for text in capabilities:
        have = tuple(int(part) for part in text.split(".")) if text.replace(".", "").isdigit() else (99, 0)
        lacking |= {kind: text for kind, first in FIRST_WITH.items() if have < first}
    for node in all_nodes(graph):
        if kind := _unknown_type(node, types, ends):
            yield _refusal(node, f"TensorRT has no {kind}", "cast to int32, int64 or float before it")
            continue
        if double and any(types.get(name) == TensorProto.DOUBLE for name in node.output):
            yield _refusal(node, "TensorRT silently computes float64 in float32", IN_FLOAT32, safe=True)
            continue
        kinds = {names.get(types.get(name, 0)) for name in (*node.input, *node.output)}
        for kind in sorted(k for k in kinds if k in lacking):
            yield _refusal(node, f"compute capability {lacking[kind]} has no {kind}", fixes[kind])
            break


def _unknown_type(node: onnx.NodeProto, types: Mapping[str, int], ends: Collection[str]) -> str:
    """Returns the first dtype among the inputs and outputs of ``node`` that TensorRT doesn't support. Returns "" if
    TensorRT supports all dtypes of the node.

    Ignores QuantizeLinear and DequantizeLinear, because ``_quantization`` checks these nodes.
    """
    from onnx import TensorProto

    if node.op_type in _QDQ:
        return ""
    for name in (*node.input, *node.output):
        kind: str = TensorProto.DataType.Name(types.get(name, 0))
        if kind in _UNKNOWN:
            return kind.lower()
        if kind == "UINT8" and not (node.op_type == "Cast" and name in ends):
            return "uint8, except for a Cast of an input or to an output"
    return ""


def _operators(graph: onnx.GraphProto, supported: Mapping[str, bool]) -> Iterator[Refusal]:
    for node in all_nodes(graph):
        if supported.get(node.op_type) is False:
            where = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            yield _refusal(node, f"TensorRT's parser has no {where}", STANDARD)


def _depth(graph: onnx.GraphProto) -> int:
    """Returns the number of nodes on the longest path."""
    if len(graph.node) <= LONGEST_CHAIN:
        return len(graph.node)
    depth: dict[str, int] = {}
    for node in graph.node:
        here = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth |= dict.fromkeys(node.output, here)
    return max(depth.values(), default=0)


def parser_says(path: Path, toolkit: str, capabilities: Sequence[str] = ()) -> dict[str, bool]:
    """Calls ``ask_parser`` in a child process. Returns an empty dict if the toolkit is missing or fails."""
    from accel.child import run_in_child
    from accel.errors import AccelError, UnsupportedHere
    from accel.progress import report
    from accel.runtimes.tensorrt_toolkit import toolkit_runtime

    if not toolkit_runtime(toolkit).installed:
        return {}
    try:
        found: dict[str, bool] = run_in_child(
            "accel.converters.to_tensorrt.preflight:ask_parser",
            path=path,
            toolkit=toolkit,
            capabilities=tuple(capabilities),
        )
    except UnsupportedHere:  # TensorRT can't build for a requested compute capability
        raise
    except (AccelError, TypeError, RuntimeError) as error:
        report(f"{toolkit} can't be asked about operators: {one_line(error)}")
        return {}
    return found
