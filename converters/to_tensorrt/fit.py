"""Rewrites a graph for TensorRT: makes int8 symmetric, and removes quantized biases and float64.

A gate later compares the outputs of the new graph with the outputs of the old graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from accel.artifact import Artifact
from accel.errors import StageFailed
from accel.sources.onnx.file import read_proto
from accel.sources.onnx.functions import inlined
from accel.stage import StageConfig

from ..graph.subgraphs import reads
from ..graph.write import onnx_artifact
from .preflight import computes_in_float64, constant_tensors, quantized_type

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = 127  # TensorRT quantizes to symmetric int8, from -127 to 127


class NotFitted(StageFailed):
    """The graph could not be rewritten."""


@dataclass(frozen=True, kw_only=True)
class FitTensorRtConfig(StageConfig):
    """Has no options."""


@dataclass
class _Scale:
    """Holds a scale and a zero point. ``symmetric`` returns the scale for int8 with zero point 0. The new scale covers
    the largest absolute value of the old range."""

    scale: np.ndarray
    zero: np.ndarray
    low: int
    high: int

    def symmetric(self) -> np.ndarray:
        if self.low < 0 and not self.zero.any():
            return self.scale
        offset = self.zero.astype(np.float64)
        if self.low == 0 and (offset == 128).all():  # symmetric int8 has the same scale as uint8 with zero point 128
            return self.scale
        largest = np.maximum(np.abs(self.low - offset), np.abs(self.high - offset)) * self.scale
        return np.asarray(largest / _STEPS, self.scale.dtype)


def fit_tensorrt(src: Artifact, config: FitTensorRtConfig, out: Path) -> Artifact:  # noqa: ARG001
    """Rewrites the quantization and the float64 parts of the ONNX model ``src`` for TensorRT.

    An int32 bias becomes a float bias with the same values. Uint8 and asymmetric int8 become symmetric int8. The change
    from uint8 to int8 is exact for zero point 128. For other zero points, the scale becomes coarser, which changes the
    outputs a little. The gate checks the change. Nodes in float64 become float32, because TensorRT would silently
    compute them in float32. If an input or output of the model is float64, nodes in float64 stay unchanged. The notes
    count the changed ``biases``, ``weights`` and ``activations``, and have an entry ``float64`` if nodes in float64
    were changed. Raises ``NotFitted`` if the result fails the checker.
    """
    model = read_proto(src.path, weights=True)
    # If the model computes in float64, its local functions are inlined, so that the nodes inside them can be rewritten.
    flat = inlined(model)
    double = computes_in_float64(flat.graph)
    model = flat if double else model
    graph = model.graph
    types = {name: int(t.data_type) for name, t in constant_tensors(graph).items()}
    fit = _Fit(graph, types)
    for node in list(graph.node):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain in ("", "ai.onnx"):
            fit.rewrite(node)
    fit.finish()
    if double:
        _in_float32(graph)
    notes = fit.counts | ({"float64": True} if double else {})
    try:
        return onnx_artifact(src, model, out, notes)
    except StageFailed as error:
        raise NotFitted(str(error)) from error


def _in_float32(graph: onnx.GraphProto) -> None:
    _narrow(graph.initializer)
    kept = [value for value in graph.value_info if value.type.tensor_type.elem_type != TensorProto.DOUBLE]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for node in graph.node:
        for attribute in node.attribute:
            _narrow([*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors])
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.DOUBLE:
                attribute.i = TensorProto.FLOAT
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _in_float32(inner)


def _narrow(tensors: Iterable[onnx.TensorProto]) -> None:
    """Converts float64 tensors to float32. Finite values, such as a mask of the lowest float64 number, stay finite."""
    largest = np.finfo(np.float32).max
    for tensor in tensors:
        if tensor.data_type != TensorProto.DOUBLE:
            continue
        values = numpy_helper.to_array(tensor)
        narrow = np.where(np.isfinite(values), np.clip(values, -largest, largest), values).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(narrow), tensor.name))


class _Fit:
    def __init__(self, graph: onnx.GraphProto, types: Mapping[str, int]) -> None:
        self.graph = graph
        self.types = dict(types)
        self.constants = constant_tensors(graph)
        self.counts: dict[str, Any] = {"biases": 0, "weights": 0, "activations": 0}
        self.gone: set[str] = set()  # The outputs of the nodes to remove.
        # Maps the output of a node to the new node that is inserted before the node.
        self.before: dict[str, onnx.NodeProto] = {}
        for node in graph.node:  # A DequantizeLinear without a zero point has the dtype that QuantizeLinear writes.
            if node.op_type == "QuantizeLinear":
                self.types[node.output[0]] = quantized_type(node, self.types)

    def rewrite(self, node: onnx.NodeProto) -> None:
        kind = quantized_type(node, self.types)
        weight = self.constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if kind == TensorProto.INT32 and weight is not None:
            self._fold(node, weight)
        elif kind in (TensorProto.UINT8, TensorProto.INT8) and self._wrong(node, kind):
            parameters = self._parameters(node, kind)
            if parameters is None:
                return
            if weight is not None:
                self._weights(node, weight, parameters)
            else:
                self._activation(node, parameters)

    def _wrong(self, node: onnx.NodeProto, kind: int) -> bool:
        if kind == TensorProto.UINT8:
            return True
        zero = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        return zero is not None and bool(numpy_helper.to_array(zero).any())

    def _parameters(self, node: onnx.NodeProto, kind: int) -> _Scale | None:
        """Returns the scale and the zero point, or None if the model computes the scale or the zero point, as in
        dynamic quantization."""
        scale = self.constants.get(node.input[1])
        has_zero = len(node.input) > 2 and bool(node.input[2])
        zero = self.constants.get(node.input[2]) if has_zero else None
        if scale is None or (has_zero and zero is None):
            return None
        value = numpy_helper.to_array(scale)
        offset = numpy_helper.to_array(zero) if zero is not None else np.zeros(value.shape, np.uint8)
        low, high = (0, 255) if kind == TensorProto.UINT8 else (-128, 127)
        return _Scale(value, offset, low, high)

    def _fold(self, node: onnx.NodeProto, weight: onnx.TensorProto) -> None:
        scale = self.constants.get(node.input[1])
        if scale is None:
            return
        values, steps = numpy_helper.to_array(weight), numpy_helper.to_array(scale)
        value = values.astype(steps.dtype) * _along(steps, values.ndim, _axis(node))
        self._constant(node.output[0], np.asarray(value, steps.dtype))
        self.gone.add(node.output[0])
        self.counts["biases"] += 1

    def _weights(self, node: onnx.NodeProto, weight: onnx.TensorProto, old: _Scale) -> None:
        values, axis = numpy_helper.to_array(weight).astype(np.float64), _axis(node)
        new = old.symmetric()
        real = (values - _along(old.zero.astype(np.float64), values.ndim, axis)) * _along(old.scale, values.ndim, axis)
        steps = np.rint(real / _along(np.where(new == 0, 1, new), values.ndim, axis))
        name = f"{node.output[0]}/int8"
        self._constant(name, np.clip(steps, -128, 127).astype(np.int8))
        node.input[0] = name
        self._rescale(node, new)
        self.counts["weights"] += 1

    def _activation(self, node: onnx.NodeProto, old: _Scale) -> None:
        if node.op_type == "QuantizeLinear" and old.low == 0 and not old.zero.any():
            self._clamp(node)
        self._rescale(node, old.symmetric())
        kept = [a for a in node.attribute if a.name != "output_dtype"]
        del node.attribute[:]
        node.attribute.extend(kept)
        self.counts["activations"] += node.op_type == "QuantizeLinear"

    def _clamp(self, node: onnx.NodeProto) -> None:
        """Inserts a Relu before ``node``. A quantization to uint8 with zero point 0 cuts off negative values, so
        quantizers remove the Relu before the quantization. A quantization to int8 keeps negative values and needs the
        Relu."""
        name = f"{node.input[0]}/above_zero/{node.output[0]}"
        self.before[node.output[0]] = onnx.helper.make_node("Relu", [node.input[0]], [name], name=name)
        node.input[0] = name

    def _rescale(self, node: onnx.NodeProto, scale: np.ndarray) -> None:
        names = (f"{node.output[0]}/scale", f"{node.output[0]}/zero")
        self._constant(names[0], scale)
        self._constant(names[1], np.zeros(scale.shape, np.int8))
        del node.input[1:]
        node.input.extend(names)

    def _constant(self, name: str, value: np.ndarray) -> None:
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))

    def finish(self) -> None:
        """Removes folded nodes and unused constants, and inserts the new nodes."""
        kept = []
        for node in self.graph.node:
            name = next(iter(node.output), "")
            kept += [self.before[name]] if name in self.before else []
            kept += [] if name in self.gone else [node]
        used = {name for node in kept for name in reads(node)} | {value.name for value in self.graph.output}
        kept = [n for n in kept if n.op_type != "Constant" or n.output[0] in used]
        tensors = [tensor for tensor in self.graph.initializer if tensor.name in used]
        stale = {name for node in self.graph.node for name in node.output if node.op_type == "QuantizeLinear"}
        shapes = [value for value in self.graph.value_info if value.name not in stale]
        for old, new in ((self.graph.node, kept), (self.graph.initializer, tensors), (self.graph.value_info, shapes)):
            values = list(new)
            del old[:]
            old.extend(values)


def _axis(node: onnx.NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 1)


def _along(values: np.ndarray, rank: int, axis: int) -> np.ndarray:
    """Reshapes ``values`` (one for each channel) to broadcast along ``axis`` of an array with ``rank`` dims.

    Returns a scalar unchanged.
    """
    if values.ndim != 1 or rank == 0:
        return values
    shape = [1] * rank
    shape[axis] = values.size
    return values.reshape(shape)
