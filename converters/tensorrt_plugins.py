"""accel's operators in an engine of TensorRT: which plugin takes each, and the model as TensorRT's parser then gets it.

Of a plugin library (``accel kernels build --tensorrt-include``) come the products with tensor-core kernels of this GPU,
from Triton (quick plugins, whose kernels the engine itself holds) the others. Convolutions come from Triton, which
takes them whole, and where that can't from the library, which multiplies their patches. What neither has runs its body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from accel.errors import AccelError, one_line
from accel.runtimes.tensorrt_toolkit import PLUGIN_LIBRARY, load_plugin_library
from accel.sources.onnx_file import all_nodes

DOMAIN = "accel"  # that of accel.kernels.onnx_function, which loads torch
CONVOLUTION = "FusedConv2d"  # the library's plugin for all of them
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
    with TensorRT then. Empty where the model has none of them; raises what ``load_plugin_library`` does."""
    counts = Counter(node.op_type for node in all_nodes(model.graph) if node.domain == DOMAIN)
    inside = {node.op_type for function in model.functions for node in function.node if node.domain == DOMAIN}
    library = load_plugin_library(trt, capability) if counts else None
    found = []
    for operator, nodes in sorted(counts.items()):
        by, reason = FUNCTION_BODY, "it is called by another function"
        if operator not in inside:
            in_library = library is not None and _in_library(trt, model, operator)
            if not in_library or _geometry(operator):
                by, reason = _quick(operator, capability)
            if in_library and by == FUNCTION_BODY:
                by, reason = PLUGIN_LIBRARY, ""
        found.append(PluginChoice(operator=operator, nodes=nodes, by=by, reason=reason))
    return found


def _in_library(trt: Any, model: onnx.ModelProto, operator: str) -> bool:
    """Whether the plugins in C++ take every node of this operator whatever its number of rows."""
    from accel.kernels.onnx_function import FusedConv2d, FusedGemm

    function = _parsed(operator)
    if not isinstance(function, FusedConv2d) and not (
        isinstance(function, FusedGemm) and function.product == "gemm_nt"
    ):
        return False
    name = CONVOLUTION if isinstance(function, FusedConv2d) else operator
    if trt.get_plugin_registry().get_creator(name, _VERSION, "") is None:
        return False
    if function.dtype not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return False
    narrow = function.dtypes[0] in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)
    if function.dtypes[0] != function.dtype and not narrow:
        return False
    step = _ALIGNED // (1 if narrow else 2)
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    weights = [n.input[1] for n in all_nodes(model.graph) if n.domain == DOMAIN and n.op_type == operator]
    # N and K of a product; what comes out of a convolution and what goes in.
    return all(name in shapes and not any(size % step for size in shapes[name][:2]) for name in weights)


def _geometry(operator: str) -> dict[str, int]:
    """The fields of the plugin ``FusedConv2d`` for this convolution; empty for another operator."""
    from accel.kernels.native import ACTS, DTYPES
    from accel.kernels.onnx_function import OPERANDS, FusedConv2d

    function = _parsed(operator)
    if not isinstance(function, FusedConv2d):
        return {}
    fields = {"act": ACTS[function.act], "bias": int(function.bias), "residual": int(function.residual)}
    fields["dtype"] = DTYPES[OPERANDS[function.dtype]]
    for name in ("kernel", "stride", "padding", "dilation"):
        fields[f"{name}_h"], fields[f"{name}_w"] = getattr(function, name)
    return fields


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
    and has no body any more. Of convolutions the library has one plugin: their sizes go from the name to attributes."""
    taken = {choice.operator: choice.by for choice in choices if choice.by != FUNCTION_BODY}
    for node in all_nodes(model.graph):
        if node.domain == DOMAIN and node.op_type in taken:
            space = DOMAIN if taken[node.op_type] == QUICK_PLUGIN else ""
            words: dict[str, Any] = {"plugin_version": _VERSION, "plugin_namespace": space}
            if not space and (fields := _geometry(node.op_type)):
                node.op_type = CONVOLUTION
                words |= fields
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
