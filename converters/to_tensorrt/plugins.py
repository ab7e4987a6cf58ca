"""Chooses the plugins for accel's operators in a TensorRT engine, and prepares the model for TensorRT's parser.

An operator has up to three implementations:

- The plugin library (``accel kernels build --tensorrt-include``) has tensor-core kernels for products on this GPU. The
  library's plugins read weights as (N, K), so constant weights in (K, N) are transposed. The library computes a
  convolution as a matrix product of image patches.
- Quick plugins are Triton kernels inside the engine. For convolutions, quick plugins are preferred, because they need
  no patches. Quick plugins also compute the products that the library doesn't support.
- All other nodes use the operator's function body, which consists of standard ONNX operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from accel.errors import AccelError, one_line
from accel.runtimes.tensorrt_toolkit import PLUGIN_LIBRARY, load_plugin_library
from accel.sources.onnx.file import all_nodes

from .transposed_weights import transpose_weights

DOMAIN = "accel"  # The same value as in accel.kernels.onnx.function, whose import would load torch.
# The library's plugins. The options in an operator's name become fields of the plugin.
CONVOLUTION, PRODUCT = "FusedConv2d", "FusedGemm"
QUICK_PLUGIN = "quick plugin"
FUNCTION_BODY = "function body"
_VERSION = "1"  # The version of accel's plugins, and of TensorRT's quick plugins.
# The library's kernels load ``_ALIGNED`` bytes at a time. The size of a row of weights has to be a multiple of
# ``_ALIGNED`` bytes.
_ALIGNED = 16


@dataclass(frozen=True, kw_only=True)
class PluginChoice:
    """``operator`` is a name in the domain ``accel``. ``nodes`` is the number of the operator's nodes that use the
    implementation ``by``. ``by`` is ``PLUGIN_LIBRARY``, ``QUICK_PLUGIN`` or ``FUNCTION_BODY``. ``reason`` tells why the
    operator uses its function body."""

    operator: str
    nodes: int
    by: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_plugins(trt: Any, model: onnx.ModelProto, capability: str) -> list[PluginChoice]:
    """Chooses an implementation for each of accel's operators in ``model``, and registers the plugins with TensorRT.

    ``capability`` is the compute capability of the GPU. If the nodes of an operator use two implementations, the result
    has two choices for the operator. The choice with the plugin library comes last. Returns an empty list if the model
    has none of accel's operators. Raises the same errors as ``load_plugin_library``.
    """
    nodes = defaultdict(list)
    for node in all_nodes(model.graph):
        if node.domain == DOMAIN:
            nodes[node.op_type].append(node)
    inside = {node.op_type for function in model.functions for node in function.node if node.domain == DOMAIN}
    library = load_plugin_library(trt, capability) if nodes else None
    sizes = _sizes(model)
    found = []
    for operator, own in sorted(nodes.items()):
        by, reason, its = FUNCTION_BODY, "it is called by another function", 0
        if operator not in inside:
            plugin = _plugin_of(operator)
            if library is not None and trt.get_plugin_registry().get_creator(plugin, _VERSION, "") is not None:
                its = sum(_fits(node, sizes) for node in own)
            if plugin == CONVOLUTION or its < len(own):
                by, reason = _quick(operator, capability)
            if plugin == CONVOLUTION and by == QUICK_PLUGIN:
                its = 0
        if its < len(own):
            found.append(PluginChoice(operator=operator, nodes=len(own) - its, by=by, reason=reason))
        if its:
            found.append(PluginChoice(operator=operator, nodes=its, by=PLUGIN_LIBRARY))
    return found


def _sizes(model: onnx.ModelProto) -> dict[str, Sequence[int]]:
    return {tensor.name: tensor.dims for tensor in model.graph.initializer}


def _fits(node: onnx.NodeProto, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Checks whether the plugin library can compute ``node`` for any number of rows. ``sizes`` has the shapes of the
    initializers."""
    from accel.kernels.onnx.function import FusedConv2d, FusedGemm

    function = _parsed(node.op_type)
    if not isinstance(function, FusedConv2d | FusedGemm):
        return False
    if function.dtype not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return False
    narrow = function.dtypes[0] in (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)
    if function.dtypes[0] != function.dtype and not narrow:
        return False
    step = _ALIGNED // (1 if narrow else 2)
    shape = sizes.get(node.input[1], ())
    if len(shape) != (4 if isinstance(function, FusedConv2d) else 2):
        return False
    # The first two sizes are N and K of a product, or the output and input channels of a convolution.
    return not any(size % step for size in shape[:2])


def _plugin_of(operator: str) -> str:
    """Returns the name of the library's plugin for ``operator``."""
    from accel.kernels.onnx.function import FusedConv2d

    return CONVOLUTION if isinstance(_parsed(operator), FusedConv2d) else PRODUCT


def _fields(operator: str) -> dict[str, int]:
    """Returns the fields of the library's plugin for ``operator``."""
    from accel.kernels.native.library import ACTS, DTYPES
    from accel.kernels.onnx.function import OPERANDS

    function = _parsed(operator)
    fields = {"act": ACTS[function.act], "bias": int(function.bias), "residual": int(function.residual)}
    fields["dtype"] = DTYPES[OPERANDS[function.dtypes[0]]]
    if _plugin_of(operator) == PRODUCT:
        scales = {"row_scale": int(function.row_scale), "col_scale": int(function.col_scale)}
        return fields | scales | {"out_dtype": DTYPES[OPERANDS[function.dtype]]}
    for name in ("kernel", "stride", "padding", "dilation"):
        fields[f"{name}_h"], fields[f"{name}_w"] = getattr(function, name)
    return fields


def _quick(operator: str, capability: str) -> tuple[str, str]:
    """Registers a quick plugin for ``operator`` if possible.

    Returns ``QUICK_PLUGIN`` and an empty reason, or ``FUNCTION_BODY`` and the reason why a quick plugin is impossible.
    """
    from accel.kernels.onnx.function import FusedConv2d, FusedGemm
    from accel.kernels.tensorrt.quick_plugins import arch_for, register

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
    except Exception as error:  # after any error of a compiler or of TensorRT, the function body is used
        return FUNCTION_BODY, f"{type(error).__name__}: {one_line(error)}"
    return QUICK_PLUGIN, ""


def _parsed(operator: str) -> Any:
    from accel.kernels.onnx.function import parse

    try:
        return parse(operator)
    except AccelError:
        return None


def with_plugins(
    model: onnx.ModelProto, choices: Sequence[PluginChoice], source: Path, folder: Path
) -> tuple[bytes, Path]:
    """Returns the bytes of ``model`` for TensorRT's parser, and a path in the folder of the external weights.

    ``source`` is the file of ``model``. If some weights are transposed, the returned path is in ``folder``.

    A node with a plugin gets the plugin's version and namespace as attributes. Function bodies that no node uses any
    more are removed, because some versions of the parser prefer function bodies to plugins. The library has one plugin
    for all products and one plugin for all convolutions. The options in an operator's name become attributes of the
    node.
    """
    takers: dict[str, set[str]] = {}
    for choice in choices:
        takers.setdefault(choice.operator, set()).add(choice.by)
    sizes = _sizes(model)
    turned = []
    for node in all_nodes(model.graph):
        taken = takers.get(node.op_type, set()) if node.domain == DOMAIN else set()
        in_library = PLUGIN_LIBRARY in taken and _fits(node, sizes)
        if not in_library and QUICK_PLUGIN not in taken:
            continue
        words: dict[str, Any] = {"plugin_version": _VERSION, "plugin_namespace": "" if in_library else DOMAIN}
        if in_library:
            function, plugin = _parsed(node.op_type), _plugin_of(node.op_type)
            if plugin == PRODUCT and function.product != "gemm_nt":
                turned.append(node)
            words |= _fields(node.op_type)
            node.op_type = plugin
        node.attribute.extend(helper.make_attribute(key, value) for key, value in words.items())
    kept = [f for f in model.functions if f.domain != DOMAIN or FUNCTION_BODY in takers.get(f.name, {FUNCTION_BODY})]
    del model.functions[:]
    model.functions.extend(kept)
    path = transpose_weights(model, turned, source, folder)
    content: bytes = model.SerializeToString()
    return content, path


def take_fp8_bodies(model: onnx.ModelProto) -> bool:
    """Replaces the bodies of accel's fp8 functions in ``model`` by bodies that TensorRT's parser accepts. Returns True
    if ``model`` changed."""
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
    """Returns one line about the operators without a plugin, or "" if every operator has a plugin.

    ``choices`` are results of ``PluginChoice.to_json``.
    """
    left = [choice for choice in choices if choice["by"] == FUNCTION_BODY]
    if not left:
        return ""
    reasons = "; ".join(dict.fromkeys(str(choice["reason"]) for choice in left))
    nodes, of = (sum(choice["nodes"] for choice in some) for some in (left, choices))
    return f"{nodes} of {of} fused operators run as TensorRT's own kernels, not as accel's plugins: {reasons}"
