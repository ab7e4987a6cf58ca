"""Runs 16-bit ONNX models on the CPU and rounds the outputs of every node to their 16-bit dtypes.

ONNX Runtime's CPU provider computes most float16 nodes in float32 and fuses them, so that ``sqrt(x * x)`` at x = 300
gives 300. Hardware that computes in float16 gives infinity for ``sqrt(x * x)`` at x = 300. The CPU provider can't run
bfloat16 at all. This session rewrites the model to float32, and runs the rewritten model without graph optimizations.
The rewritten model casts each float16 or bfloat16 tensor to its 16-bit dtype and back to float32. Inside a node, such
as in the sums of a MatMul, values stay float32, as on tensor cores. A model without 16-bit floats runs unchanged.

In the precision ``tf32``, the inputs of products of float32 tensors are rounded to 10 bits of mantissa, as on GPUs from
compute capability 8.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper

from accel.artifact import Artifact
from accel.signature import Feeds, numpy_dtype
from accel.sources.onnx.functions import inlined
from accel.sources.onnx.weights import read_detached, weight_array

from .base import BaseSession, SessionOptions

LOW = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})

# Operators that only move or select values. The outputs of these operators need no rounding, because the inputs are
# already rounded.
MOVES = frozenset(
    {
        "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity",
        "If", "Loop", "MaxPool", "Relu", "Reshape", "Scan", "ScatterElements", "ScatterND", "Slice", "SpaceToDepth",
        "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip

# The dtypes that NumPy has without ml_dtypes. Constants of these dtypes are passed to ONNX Runtime as arrays.
_NATIVE = frozenset(
    {
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32,
        TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
        TensorProto.BOOL,
    }
)  # fmt: skip

# The names of integer attributes that hold a dtype.
_DTYPE_ATTRIBUTES = frozenset({"dtype", "output_dtype", "output_datatype", "precision", "softmax_precision"})

# Constants with more than this number of elements are passed as arrays, because a protobuf message is limited to 2 GB
# and copying is slow.
_INLINE_ELEMENTS = 1024

# The operators that multiply tensors, and the positions of the inputs that TF32 rounds. None means all inputs.
_PRODUCTS: Mapping[str, tuple[int, ...] | None] = {
    "Attention": (0, 1, 2), "Conv": (0, 1), "ConvTranspose": (0, 1), "Einsum": None, "GRU": (0, 1, 2), "Gemm": (0, 1),
    "LSTM": (0, 1, 2), "MatMul": (0, 1), "RNN": (0, 1, 2),
}  # fmt: skip
# Float32 has 13 bits of mantissa more than TF32.
_SPLIT, _LARGEST = float(2**13 + 1), float(2.0**113)

_GIVEN = "given"

# If a model has more than this number of bytes of weights, ONNX Runtime doesn't pack the weights, because packing keeps
# a second copy.
_LARGE_BYTES = 1 << 30


class RoundedModel:
    """A model in memory that runs with the real rounding of 16-bit floats. ``model`` itself is not changed. With
    ``tf32``, products of float32 tensors round their inputs to TF32.

    ``tensors`` lists the names of all tensors that top-level nodes compute, in graph order. The model's local functions
    are inlined first, so the list includes their tensors.
    """

    def __init__(self, model: onnx.ModelProto, *, threads: int = 0, tf32: bool = False) -> None:
        self._threads = threads
        self.twin, self._arrays, self.types = _twin(inlined(model), tf32)
        self._large = 4 * sum(map(_elements, self.twin.graph.initializer)) > _LARGE_BYTES  # 4 bytes per float32
        self.outputs = tuple(value.name for value in self.twin.graph.output)
        known = set(self.types)
        self.tensors = tuple(name for node in self.twin.graph.node for name in node.output if name and name in known)
        self._sessions: dict[tuple[str, ...], Any] = {}

    def run(self, feeds: Feeds, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Returns the tensors ``names``, by default the outputs. A 16-bit float tensor is returned as float32, with its
        values rounded to 16 bits."""
        wanted = tuple(names) if names is not None else self.outputs
        if not wanted:
            return {}
        plain = {name: as_float32(value) for name, value in feeds.items()}
        return dict(zip(wanted, self._session(wanted).run(list(wanted), plain), strict=True))

    def _session(self, wanted: tuple[str, ...]) -> Any:
        """Returns a session with the outputs ``wanted``. Caches two sessions: the session that returns only the model's
        own outputs, and the last session that also returns other tensors."""
        extra = tuple(name for name in wanted if name not in self.outputs)
        if extra not in self._sessions:
            self._sessions = {key: value for key, value in self._sessions.items() if not key}
            self._sessions[extra] = self._open(extra)
        return self._sessions[extra]

    def _open(self, extra: tuple[str, ...]) -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self._threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self._large:
            options.add_session_config_entry("session.disable_prepacking", "1")
        for name, value in self._arrays.items():
            options.add_initializer(name, value)
        own = len(self.twin.graph.output)
        self.twin.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra)
        try:
            body = self.twin.SerializeToString()
        finally:
            del self.twin.graph.output[own:]
        # ONNX Runtime uses the arrays without a copy. ONNX Runtime checks that the file of external tensors exists but
        # never reads the file, so a sparse file is enough.
        with TemporaryDirectory() as folder:
            twin, given = Path(folder, "twin.onnx"), Path(folder, _GIVEN)
            twin.write_bytes(body)
            with given.open("wb") as stream:
                stream.truncate(max((value.tensor_size_in_bytes() for value in self._arrays.values()), default=0))
            return onnxruntime.InferenceSession(twin, options, providers=["CPUExecutionProvider"])


class RoundedSession(BaseSession):
    """Runs fp16 and bf16 models with the rounding of 16-bit hardware, and other models without optimizations."""

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self._model = RoundedModel(
            read_detached(artifact.path), threads=options.threads, tf32=options.precision == "tf32"
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """Returns the names of the tensors that ``run_all`` returns by default."""
        return self._model.tensors

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._typed(self._model.run(feeds))

    def run_all(self, feeds: Feeds, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Returns the tensors ``names`` in their own dtypes. By default, returns all tensors that nodes of the
        top-level graph compute."""
        self.check_feeds(feeds)
        return self._typed(self._model.run(feeds, self.tensors if names is None else names))

    def _typed(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        def typed(name: str, value: np.ndarray) -> np.ndarray:
            kind = self._model.types.get(name)
            return value.astype(_numpy_dtype(kind)) if kind in LOW else value

        return {name: typed(name, value) for name, value in found.items()}


def as_float32(value: np.ndarray) -> np.ndarray:
    """Returns ``value``, and converts 16-bit floats to float32 without rounding."""
    return value.astype(np.float32) if value.dtype in (np.float16, numpy_dtype("bfloat16")) else value


def _numpy_dtype(kind: int) -> np.dtype[Any]:
    return numpy_dtype("float16" if kind == TensorProto.FLOAT16 else "bfloat16")


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of the model without the bytes of the larger constants, which shape inference doesn't need."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if _elements(tensor) > _INLINE_ELEMENTS:
            for data in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(data)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return light


def tensor_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns ``model`` without its weights. The result's ``value_info`` has the inferred dtype and shape of every
    tensor."""
    light = without_weights(model)
    found: onnx.ModelProto = onnx.shape_inference.infer_shapes(light, data_prop=True)
    return found


def in_chunks(model: onnx.ModelProto, names: Sequence[str], feeds: Feeds, limit: int) -> Iterator[list[str]]:
    """Yields ``names`` in groups. The tensors of a group take at most ``limit`` bytes at the shapes of ``feeds``."""
    sizes = _sizes(model, feeds)
    unknown = max(sizes.values(), default=4)
    group: list[str] = []
    used = 0
    for name in names:
        size = sizes.get(name, unknown)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(name)
        used += size
    if group:
        yield group


def _sizes(model: onnx.ModelProto, feeds: Feeds) -> dict[str, int]:
    """Returns the number of bytes of each tensor that the nodes of ``model`` compute. Leaves out tensors of unknown
    shape."""
    light = without_weights(model)
    del light.graph.value_info[:]
    for value in light.graph.input:
        if value.name in feeds:
            for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
                dim.dim_value = size
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    found = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    shapes = {v.name: v.type.tensor_type.shape for v in (*found.value_info, *found.output)}
    known = {n: s.dim for n, s in shapes.items() if all(d.HasField("dim_value") for d in s.dim)}
    return {name: 4 * math.prod(d.dim_value for d in dims) for name, dims in known.items()}


def elem_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Returns the dtypes of the tensors that a graph declares. The graph's ``value_info`` has to be filled."""
    types = {t.name: int(t.data_type) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            types[value.name] = int(value.type.tensor_type.elem_type)
    return types


def _elements(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


def _twin(model: onnx.ModelProto, tf32: bool) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, int]]:
    """Rewrites ``model`` to float32. Returns the rewritten model, a dict of its larger constants (as ONNX Runtime
    values), and a dict of the dtypes that ``model`` declares."""
    typed = tensor_types(model)
    types = elem_types(typed.graph)
    twin = onnx.ModelProto()
    twin.CopyFrom(typed)
    if tf32:
        _round_products(twin.graph, {})
    _rewrite(twin.graph, {})
    arrays: dict[str, Any] = {}
    places = {t.name: t for t in twin.graph.initializer}
    for tensor in model.graph.initializer:
        if _elements(tensor) <= _INLINE_ELEMENTS:
            continue
        place = places[tensor.name]
        if tensor.data_type in _NATIVE or tensor.data_type in LOW:
            value = np.ascontiguousarray(weight_array(tensor, widened=True))
            arrays[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(value)
            place.data_location = TensorProto.EXTERNAL
            place.external_data.add(key="location", value=_GIVEN)
        else:
            place.CopyFrom(tensor)
    return twin, arrays, types


def _rewrite(graph: onnx.GraphProto, outer: Mapping[str, int]) -> None:
    """Rewrite ``graph`` to float32, in place. ``outer`` holds the dtypes of the enclosing graph's tensors."""
    types = {**outer, **elem_types(graph)}
    for tensor in graph.initializer:
        _widen(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in LOW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.extend(_rounded(node, types))


def _rounded(node: onnx.NodeProto, types: Mapping[str, int]) -> Iterator[onnx.NodeProto]:
    """Yields ``node``, rewritten to float32, and the casts that round its outputs."""
    target = next((a.i for a in node.attribute if a.name == "to"), 0) if node.op_type == "Cast" else 0
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR:
            _widen(attribute.t)
        elif attribute.type == onnx.AttributeProto.GRAPH:
            _rewrite(attribute.g, types)
        elif attribute.name in _DTYPE_ATTRIBUTES and attribute.i in LOW:
            attribute.i = TensorProto.FLOAT
    after: list[onnx.NodeProto] = []
    for index, name in enumerate(node.output):
        kind = types.get(name, 0)
        if not name or kind not in LOW or node.op_type in MOVES or node.op_type == "Constant":
            continue
        exact = f"{name}/exact"
        if target in LOW:  # a Cast to a 16-bit dtype already rounds its output
            node.output[index] = f"{name}/rounded"
        else:
            node.output[index] = exact
            after.append(onnx.helper.make_node("Cast", [exact], [f"{name}/rounded"], to=kind))
        after.append(onnx.helper.make_node("Cast", [f"{name}/rounded"], [name], to=TensorProto.FLOAT))
    yield node
    yield from after


def _widen(tensor: TensorProto) -> None:
    """Turn a 16-bit float tensor into float32, in place. If the tensor's bytes are missing, changes only the dtype."""
    if tensor.data_type not in LOW:
        return
    bare = not (tensor.raw_data or tensor.int32_data)
    if bare:
        tensor.data_type = TensorProto.FLOAT
        return
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _round_products(graph: onnx.GraphProto, types: Mapping[str, int]) -> None:
    """Rounds the float32 inputs of the products in ``graph`` to TF32, in place. ``types`` has the dtypes of the tensors
    outside ``graph``.

    The rounding is Veltkamp's splitting (Dekker 1971, "A floating-point technique for extending the available
    precision"): c = (2^13 + 1) x, and c - (c - x) has the first 11 bits of x, rounded to nearest. Very large values,
    at which c overflows, stay unchanged.
    """
    types = {**types, **elem_types(graph)}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _round_products(attribute.g, types)
        places = _PRODUCTS.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
        for place in range(len(node.input)) if places is None else places:
            name = node.input[place]
            if types.get(name) == TensorProto.FLOAT:
                rounded = f"{node.output[0]}/{place}/tf32"
                graph.node.extend(_rounding(name, rounded))
                node.input[place] = rounded
        graph.node.append(node)


def _rounding(name: str, rounded: str) -> Iterator[onnx.NodeProto]:
    """Yields the nodes that round the tensor ``name`` to TF32."""
    of = {key: f"{rounded}/{key}" for key in ("split", "largest", "c", "rest", "high", "size", "fits")}
    for key, value in (("split", _SPLIT), ("largest", _LARGEST)):
        yield onnx.helper.make_node("Constant", [], [of[key]], value_float=value)
    for operator, inputs, output in (
        ("Mul", (name, of["split"]), of["c"]),
        ("Sub", (of["c"], name), of["rest"]),
        ("Sub", (of["c"], of["rest"]), of["high"]),
        ("Abs", (name,), of["size"]),
        ("Less", (of["size"], of["largest"]), of["fits"]),
        ("Where", (of["fits"], of["high"], name), rounded),
    ):
        yield onnx.helper.make_node(operator, inputs, [output])
