"""Runs models with ONNX Runtime on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from accel.artifact import Artifact
from accel.errors import AccelError, BadConfig, InvalidModel, MissingExtra, UnsupportedHere, ValuesOutOfRange
from accel.machine import trim_memory
from accel.signature import Feeds, decoder, numpy_dtype, shapes_of
from accel.sources.onnx.file import PACKED_WEIGHTS
from accel.sources.onnx.integers_alone import integers_alone
from accel.sources.onnx.refusal import plain_reason

from .base import BaseSession, SessionOptions

if TYPE_CHECKING:
    import numpy as np

    from .kv.cache import KvCache

OPERATORS = "ACCEL_ONNXRUNTIME_LIBRARY"  # The environment variable that names a library of operators to register.
CONVOLUTION = "FusedConv2d"  # The prefix of the operator names of accel's convolutions.
_FATAL = 4  # Hides the errors in ONNX Runtime's log, because the exceptions contain the same messages.
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# Matches ONNX Runtime's error messages about an index out of range.
_OUT_OF_BOUNDS = re.compile("out of data bounds|out of bounds|within bounds")
_OPERATOR = re.compile(r"returned while running (\w+) node")
# Dtypes of ml_dtypes that NumPy itself lacks. ONNX Runtime gets tensors of these dtypes as integers with the same bits.
_BY_BITS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

_FAILURES = (native.Fail, native.InvalidArgument, native.RuntimeException, native.EPFail, native.NotImplemented)


class OnnxRuntimeSession(BaseSession):
    """Runs a model with the CPU execution provider, one operator at a time, with ``options.threads`` threads inside an
    operator.

    Several threads may call ``run``. Concurrent runs (``options.streams``) share the threads.

    Raises ``InvalidModel`` if ONNX Runtime can't load the file. Raises ``UnsupportedHere`` if the installed build of
    ONNX Runtime has no kernel for an operator.
    """

    provider: ClassVar[str] = "CPUExecutionProvider"
    concurrent: ClassVar[bool] = True

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self.session: Any = _open(artifact, options, self.provider)
        self.outputs = [output.name for output in self.session.get_outputs()]
        dtypes = [_dtype(value.type) for value in (*self.session.get_inputs(), *self.session.get_outputs())]
        dtypes += [spec.dtype for spec in (*artifact.signature.inputs, *artifact.signature.optional) if spec.optional]
        # A plain ``run`` is faster than IO binding, but can't pass bfloat16 and float8.
        self._plain = not set(dtypes) & set(_BY_BITS)
        if options.cache_precision:
            self._check_cache(options.cache_precision)

    def cache_kept_in(self) -> Mapping[str, int]:
        """Returns how many layers keep their keys and values in each precision, as read back from the loaded model."""
        layout = decoder.Cache.of(self.artifact.signature)
        dtypes = {value.name: _dtype(value.type) for value in self.session.get_inputs()}
        kept = Counter(decoder.precision_name(dtypes[spec.name]) for spec in (layout.past[::2] if layout else ()))
        return dict(kept)

    def integers_alone(self, feeds: Feeds) -> frozenset[str]:  # noqa: ARG002
        return integers_alone(self.artifact.path)

    def _check_cache(self, wanted: str) -> None:
        if list(self.cache_kept_in()) != [wanted]:
            kept = ", ".join(self.cache_kept_in()) or "no precision"
            raise UnsupportedHere(
                f"ONNX Runtime keeps the KV cache of {self.artifact.path} in {kept} instead of {wanted}; leave out "
                "cache_precision"
            )

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        if self._in_place and self._by_row(feeds):
            rows = range(len(feeds[decoder.IDS]))
            return joined([self._run(self.signature.row_of(feeds, row)) for row in rows])
        try:
            return self._run_native(feeds)
        except _FAILURES as error:
            raise self._explained(error, feeds) from error

    def open_cache(self, layout: decoder.Cache, rows: int) -> KvCache | None:
        """Returns an empty cache that grows in place, or None if the model copies its cache."""
        if not self._in_place:
            return None
        from .kv.in_place import InPlaceCache

        return InPlaceCache(self, layout, rows)

    def run_bound(self, binding: Any, feeds: Feeds) -> None:
        """Runs the model with the inputs and outputs of ``binding``. ``feeds`` are the inputs for error messages."""
        self.check_open()
        try:
            self.session.run_with_iobinding(binding)
        except _FAILURES as error:
            raise self._explained(error, feeds) from error

    @cached_property
    def _in_place(self) -> bool:
        """Tells whether the model is a decoder whose cache grows in place. The file is read only for a decoder."""
        layout = decoder.Cache.of(self.artifact.signature)
        if layout is None or self.provider != OnnxRuntimeSession.provider:
            return False
        from .kv.cache import grows_in_place

        return grows_in_place(self.artifact.path, layout)

    def _by_row(self, feeds: Feeds) -> bool:
        from .kv.cache import runs_by_row

        rows, new = feeds[decoder.IDS].shape
        return runs_by_row(rows, new, feeds[decoder.past_name(0, decoder.PARTS[0])].shape[2])

    def _explained(self, error: Exception, feeds: Feeds) -> AccelError:
        """Turns an error of ONNX Runtime during a run with ``feeds`` into an error that names the fix."""
        failed = f"ONNX Runtime can't run {self.artifact.path} at {shapes_of(feeds)}: {plain_reason(error)}"
        bounds = bool(_OUT_OF_BOUNDS.search(str(error)))
        if outside := self._outside(feeds) if bounds else "":
            return ValuesOutOfRange(f"{failed} ({outside}); check the inputs' values")
        if names := [] if bounds and self._rows else self._read_by(error):
            return ValuesOutOfRange(f"{failed}; check the values of {' and '.join(map(repr, names))}")
        return self._run_error(failed, "; check the inputs' values", feeds)

    def _read_by(self, error: Exception) -> list[str]:
        """Returns the names of the integer inputs that the failed node reads. The caller chose these integers, such as
        the lengths of an LSTM, so they are the caller's fault."""
        from accel.sources.onnx.integers_read import integers_read

        operator = _OPERATOR.search(str(error))
        return list(integers_read(self.artifact.path, operator[1])) if operator else []

    def _outside(self, feeds: Feeds) -> str:
        """Returns a phrase for an error message. The phrase names the first integer input with an index outside its
        lookup table.

        The phrase is empty if the inputs hold no bad index, which means that the model itself computed the bad index.
        """
        for name, (low, high) in self._rows.items():
            value = feeds[name]
            # A negative index counts from the end.
            if value.size and (value.max() > high or value.min() < low - high - 1):
                wrong = value[(value > high) | (value < low)].flat[0]
                return f"input {name!r} holds {wrong}, it takes {low}..{high}"
        return ""

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """Returns the range of valid indices for each input that selects rows of a table. The model file is read only
        after a failed run."""
        from accel.sources.onnx.file import describe

        ranges = {spec.name: spec.range_at({}) for spec in describe(self.artifact.path)[0].inputs}
        return {name: found for name, found in ranges.items() if found is not None}

    def _run_native(self, feeds: Feeds) -> dict[str, np.ndarray]:
        if not self._plain:
            return self._run_bound(feeds, "cpu")
        return dict(zip(self.outputs, self.session.run(self.outputs, dict(feeds)), strict=True))

    def _run_bound(self, feeds: Feeds, device: str) -> dict[str, np.ndarray]:
        """Copy the inputs to ``device``, run the model there, and copy the outputs back, with one copy in each
        direction."""
        binding = self.session.io_binding()
        held = []  # some versions of ONNX Runtime keep no references to bound values
        for name, value in feeds.items():
            held.append(_to_device(value, device))
            binding.bind_ortvalue_input(name, held[-1])
        for name in self.outputs:
            # A tensor whose dtype NumPy lacks is read from its memory address, so the tensor has to be in CPU memory.
            binding.bind_output(name, device if self._plain else "cpu")
        self.session.run_with_iobinding(binding)
        if self._plain:
            return dict(zip(self.outputs, binding.copy_outputs_to_cpu(), strict=True))
        return dict(zip(self.outputs, map(_to_array, binding.get_outputs()), strict=True))

    def close(self) -> None:
        """Free the model's memory and end its thread pool."""
        super().close()
        self.session = None
        trim_memory()


def joined(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the outputs of a batch from the outputs of each row."""
    import numpy as np

    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


class OnnxRuntimeCudaSession(OnnxRuntimeSession):
    """Runs a model with the CUDA execution provider and IO binding. Operators without a CUDA kernel run on the CPU.

    Raises ``MissingExtra`` if the installed ONNX Runtime was built without CUDA. Raises ``UnsupportedHere`` if CUDA
    can't start on this machine. A session never falls back to the CPU for the whole model.
    """

    provider: ClassVar[str] = "CUDAExecutionProvider"

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        if self.provider not in onnxruntime.get_available_providers():
            raise MissingExtra("onnxruntime with CUDA (onnxruntime-gpu)", "cuda")
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # loads the CUDA libraries that pip installed
        super().__init__(artifact, options)
        if self.session.get_providers()[0] != self.provider:
            raise UnsupportedHere(
                f"ONNX Runtime could not start CUDA for {artifact.path}; compare the CUDA version of ONNX Runtime with "
                "the version that nvidia-smi shows"
            )

    def _run_native(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._run_bound(feeds, "cuda")


def _open(artifact: Artifact, options: SessionOptions, provider: str) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _FATAL
    # ONNX Runtime counts the thread that calls ``run`` as one of its threads. With several streams, several threads
    # call ``run``, so the thread pool gets one thread fewer for each further stream.
    settings.intra_op_num_threads = max(1, options.threads - options.streams + 1) if options.threads else 0
    if not options.spinning:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[options.graph_level])
    # A decoder takes other sizes at each step, so an arena would keep buffers of sizes that don't come again.
    settings.enable_cpu_mem_arena = decoder.Cache.of(artifact.signature) is None
    path = artifact.path
    if not path.is_file():
        raise InvalidModel(f"{path} does not exist; check the path")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; export it again")
    _register_operators(settings, artifact)
    try:
        return _session(path, settings, with_tf32(provider, options.precision == "tf32"))
    except native.NotImplemented as error:
        low = {"float16", "bfloat16"} & set(artifact.properties.get("floats", ()))
        fix = "use the runtime onnx-rounded, or export the model in float32" if low else "export it again"
        raise UnsupportedHere(
            f"ONNX Runtime lacks a kernel for an operator of the model {path} ({plain_reason(error)}); {fix}"
        ) from error
    except (native.InvalidProtobuf, native.InvalidGraph, native.InvalidArgument) as error:
        why = plain_reason(error)
        raise InvalidModel(f"{path} is no valid ONNX model ({why}); export it again", why) from error
    except (native.Fail, native.NoSuchFile, native.RuntimeException, native.NoModel) as error:
        why = plain_reason(error)
        fix = "export it again"
        if _needs_library(path):
            fix = f"build accel's operators with accel kernels build, and name the library in {OPERATORS}"
        raise InvalidModel(f"ONNX Runtime can't load {path} ({why}); {fix}", why) from error


def _needs_library(path: Path) -> bool:
    """Tells whether the model has an operator of accel without a function body, which only a library can run."""
    from accel.sources.onnx.file import all_nodes, read_without_weights

    model = read_without_weights(path)
    bodies = {function.name for function in model.functions if function.domain == "accel"}
    return any(node.domain == "accel" and node.op_type not in bodies for node in all_nodes(model.graph))


def with_tf32(provider: str, allowed: bool) -> Any:
    """Returns a provider with its options. By default, the CUDA provider rounds the products of float32 tensors to
    TF32."""
    cuda = OnnxRuntimeCudaSession.provider
    return (provider, {"use_tf32": str(int(allowed))}) if provider == cuda else provider


def _session(path: Path, settings: Any, provider: Any) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), settings, providers=[provider])
    except native.InvalidGraph as error:
        # ONNX Runtime fuses float8 QDQ nodes into an int8 matrix multiplication and then rejects the fused node. The
        # file itself is valid and can be loaded without optimizations. If the model can't be loaded without
        # optimizations either, the error of the load with optimizations is raised.
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return onnxruntime.InferenceSession(str(path), settings, providers=[provider])
        except Exception:
            raise error from None


def _register_operators(settings: Any, artifact: Artifact) -> None:
    """Register accel's C++ operators from the library that ``$ACCEL_ONNXRUNTIME_LIBRARY`` names. If this variable isn't
    set, and the model has weights for accel's CPU kernels, takes the library that ``accel kernels build`` made.

    Without the library, ONNX Runtime runs the function bodies that the model file contains for accel's operators. The
    names of accel's convolution operators contain sizes and differ between models, so this function reads the names
    from the model file and passes them to the library.
    """
    path, given = artifact.path, os.environ.get(OPERATORS)
    if not given and artifact.properties.get(PACKED_WEIGHTS):
        from accel.kernels.native.bridges import find_onnxruntime_library

        given = str(find_onnxruntime_library() or "")
    if not given:
        return
    from accel.sources.onnx.file import all_nodes, read_without_weights

    model = read_without_weights(path)
    nodes = [node for graph in (model.graph, *model.functions) for node in all_nodes(graph)]
    names = {node.op_type for node in nodes if node.domain == "accel" and node.op_type.startswith(CONVOLUTION)}
    for at, name in enumerate(sorted(names)):
        settings.add_session_config_entry(f"custom_op.{CONVOLUTION}.{at}", name)
    try:
        settings.register_custom_ops_library(given)
    except _FAILURES as error:
        raise BadConfig(
            f"{OPERATORS} names the library {given}, which ONNX Runtime can't load ({plain_reason(error)}); unset the "
            "variable, or set it to a library built by accel kernels build --onnxruntime-include"
        ) from error


def _dtype(name: str) -> str:
    """Converts an ONNX Runtime type such as ``tensor(float16)`` to a name from ``DTYPES``."""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(
        inner, inner
    )


def _to_device(value: np.ndarray, device: str) -> Any:
    import numpy as np

    value = np.asarray(value, order="C")
    if str(value.dtype) in _BY_BITS:
        import onnx

        bits = value.view(np.uint16 if value.itemsize == 2 else np.uint8)
        kind = int(onnx.TensorProto.DataType.Value(str(value.dtype).upper().replace("_E", "E")))
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)
    where = "cpu" if value.dtype.kind in "OUS" else device  # strings stay on the CPU
    return onnxruntime.OrtValue.ortvalue_from_numpy(value, where, 0)


def _to_array(value: Any) -> np.ndarray:
    """Returns an output on the CPU as a NumPy array, with bfloat16 and float8 copied bit by bit."""
    import numpy as np

    dtype = _dtype(value.data_type())
    if dtype not in _BY_BITS:
        array: np.ndarray = value.numpy()
        return array
    shape = value.shape()
    kind = numpy_dtype(dtype)
    # string_at copies the data, because ONNX Runtime frees the memory together with the value.
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * kind.itemsize)
    return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)
