"""accel's operators in an engine of TensorRT: which plugin takes each, and the model as TensorRT's parser then gets it.

Of a plugin library (``accel kernels build --tensorrt-include``) come those with tensor-core kernels of this GPU, from
Triton (quick plugins, whose kernels the engine itself holds) the others; what neither has keeps its function body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from accel.converters.preflight import all_nodes
from accel.errors import AccelError, one_line
from accel.runtimes.tensorrt_toolkit import PLUGIN_LIBRARY, find_plugin_library, load_plugin_library

DOMAIN = "accel"  # that of accel.kernels.onnx_function, which loads torch
QUICK_PLUGIN = "quick plugin"
FUNCTION_BODY = "function body"
_VERSION = "1"  # of every plugin of ours, and what TensorRT's quick plugins have
# Bytes that the library's kernels load at a time: rows of another length would leave a product of many rows none.
_ALIGNED = 16


@dataclass(frozen=True, kw_only=True)
class PluginChoice:
    """``operator``: its name in the domain ``accel``; ``nodes`` have it; ``by``: ``PLUGIN_LIBRARY``, ``QUICK_PLUGIN``
    or ``FUNCTION_BODY``, then with the ``reason``."""

    operator: str
    nodes: int
    by: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_plugins(trt: Any, model: onnx.ModelProto, capability: str) -> list[PluginChoice]:
    """What takes each of accel's operators in ``model`` on a GPU of this compute capability; the plugins are registered
    with TensorRT then. Empty where the model has none of them."""
    counts = Counter(node.op_type for node in all_nodes(model.graph) if node.domain == DOMAIN)
    inside = {node.op_type for function in model.functions for node in function.node if node.domain == DOMAIN}
    found, library, refused = [], None, ""
    try:
        library = find_plugin_library(capability) if counts else None
        if library is not None:
            load_plugin_library(trt, library)
    except AccelError as error:
        library, refused = None, f"{one_line(error)}; "
    for operator, nodes in sorted(counts.items()):
        by, reason = FUNCTION_BODY, "it is called by another function"
        if library is not None and operator not in inside and _in_library(model, operator):
            by, reason = PLUGIN_LIBRARY, ""
        elif operator not in inside:
            by, reason = _quick(operator, capability)
        reason = f"{refused}{reason}" if reason else ""
        found.append(PluginChoice(operator=operator, nodes=nodes, by=by, reason=reason))
    return found


def _in_library(model: onnx.ModelProto, operator: str) -> bool:
    """Whether the plugins in C++ take every node of this operator whatever its number of rows."""
    from accel.kernels.onnx_function import FusedGemm

    function = _parsed(operator)
    if not isinstance(function, FusedGemm) or function.product != "gemm_nt":
        return False
    if function.dtype not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return False
    narrow = function.dtypes[0] in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)
    if function.dtypes[0] != function.dtype and not narrow:
        return False
    step = _ALIGNED // (1 if narrow else 2)
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    weights = [n.input[1] for n in all_nodes(model.graph) if n.domain == DOMAIN and n.op_type == operator]
    return all(name in shapes and not any(size % step for size in shapes[name]) for name in weights)


def _quick(operator: str, capability: str) -> tuple[str, str]:
    """By what ``operator`` is taken now, and why not by a quick plugin."""
    from accel.kernels.onnx_function import FusedConv2d, FusedGemm
    from accel.kernels.tensorrt_plugin import arch_for, register

    function = _parsed(operator)
    if not isinstance(function, FusedGemm | FusedConv2d):
        return FUNCTION_BODY, "it has no plugin"
    here = int(capability.replace(".", ""))
    if here < (arch := arch_for(function)):
        return FUNCTION_BODY, f"its kernel needs compute capability {arch / 10}, this GPU has {capability}"
    try:
        register(function, arch=arch)
    except AccelError as error:
        return FUNCTION_BODY, one_line(error)
    except Exception as error:  # a compiler's or TensorRT's own kinds: the body computes the same
        return FUNCTION_BODY, f"{type(error).__name__}: {one_line(error)}"
    return QUICK_PLUGIN, ""


def _parsed(operator: str) -> Any:
    from accel.kernels.onnx_function import parse

    try:
        return parse(operator)
    except AccelError:
        return None


def with_plugins(model: onnx.ModelProto, choices: Sequence[PluginChoice]) -> bytes:
    """``model`` for TensorRT's parser, whose versions differ in what they prefer: what a plugin takes names its plugin
    and has no body any more."""
    taken = {choice.operator: choice.by for choice in choices if choice.by != FUNCTION_BODY}
    for node in all_nodes(model.graph):
        if node.domain == DOMAIN and node.op_type in taken:
            space = DOMAIN if taken[node.op_type] == QUICK_PLUGIN else ""
            words = {"plugin_version": _VERSION, "plugin_namespace": space}
            node.attribute.extend(helper.make_attribute(key, value) for key, value in words.items())
    kept = [f for f in model.functions if f.domain != DOMAIN or f.name not in taken]
    del model.functions[:]
    model.functions.extend(kept)
    content: bytes = model.SerializeToString()
    return content


def take_fp8_bodies(model: onnx.ModelProto) -> bool:
    """Give accel's functions of fp8 in ``model`` the bodies that TensorRT takes; whether there are any."""
    changed = False
    for function in model.functions:
        if function.domain != DOMAIN or "fp8" not in function.name:
            continue
        operator = _parsed(function.name)
        if operator is not None:
            opset = next(own.version for own in function.opset_import if own.domain in ("", "ai.onnx"))
            function.CopyFrom(operator.function(opset, tensorrt=True))
            changed = True
    return changed


def bodies_note(choices: Sequence[Mapping[str, Any]]) -> str:
    """One line about the operators that no plugin takes, of ``PluginChoice.to_json``; empty where there are none."""
    left = [choice for choice in choices if choice["by"] == FUNCTION_BODY]
    if not left:
        return ""
    reasons = "; ".join(dict.fromkeys(str(choice["reason"]) for choice in left))
    nodes, of = (sum(choice["nodes"] for choice in some) for some in (left, choices))
    return f"{nodes} of {of} fused operators run as TensorRT's own kernels, not as accel's plugins: {reasons}"
