"""ONNX Runtime on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import math
import os
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from accel.artifact import Artifact
from accel.errors import BadConfig, InvalidModel, MissingExtra, RunFailed, UnsupportedHere, ValuesOutOfRange, one_line
from accel.memory import trim
from accel.runtimes.base import BaseSession, SessionOptions
from accel.signature import Feeds, numpy_dtype, shapes_of

if TYPE_CHECKING:
    import numpy as np

OPERATORS = "ACCEL_ONNXRUNTIME_LIBRARY"  # the environment variable that names a library of operators to register
CONVOLUTION = "FusedConv2d"  # what the names of accel's convolutions begin with
_FATAL = 4  # onnxruntime's log severity: what it says of an error is in the exception, too
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# What its operators say of an index that picks nothing.
_OUT_OF_BOUNDS = re.compile("out of data bounds|out of bounds|within bounds")
# Types that numpy knows through ml_dtypes only, and that go in and out as their bits.
_BY_BITS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

_FAILURES = (native.Fail, native.InvalidArgument, native.RuntimeException, native.EPFail, native.NotImplemented)


class OnnxRuntimeSession(BaseSession):
    """The CPU execution provider: ``options.threads`` threads inside an operator, one operator at a time. Runs may
    come from several threads; ``options.streams`` of them at once then take no more threads in all.

    Raises ``InvalidModel`` where the file is no model that ONNX Runtime takes, ``UnsupportedHere`` where it has an
    operator that this build has no kernel for.
    """

    provider: ClassVar[str] = "CPUExecutionProvider"
    concurrent: ClassVar[bool] = True

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self.session: Any = _open(artifact, options, self.provider)
        self.outputs = [output.name for output in self.session.get_outputs()]
        dtypes = [_dtype(value.type) for value in (*self.session.get_inputs(), *self.session.get_outputs())]
        dtypes += [spec.dtype for spec in artifact.signature.inputs if spec.optional]
        # Which way to call: the plain one costs the least and knows no bfloat16.
        self._plain = not set(dtypes) & set(_BY_BITS)

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        try:
            return self._run_native(feeds)
        except _FAILURES as error:
            sizes = shapes_of(feeds)
            failed = f"ONNX Runtime can't run {self.artifact.path} at {sizes}: {_reason(error)}"
            if outside := self._outside(feeds) if _OUT_OF_BOUNDS.search(str(error)) else "":
                raise ValuesOutOfRange(f"{failed} ({outside}); check the inputs' values") from error
            raise RunFailed(f"{failed}; check the inputs' values") from error

    def _outside(self, feeds: Feeds) -> str:
        """The first integer input that picks rows of a constant table and holds a number that is no row of it, in
        words; nothing where there is none: then an index was computed, and the inputs may be right."""
        for name, (low, high) in self._rows.items():
            value = feeds[name]
            # From the end an index counts down from -1.
            if value.size and (value.max() > high or value.min() < low - high - 1):
                wrong = value[(value > high) | (value < low)].flat[0]
                return f"input {name!r} holds {wrong}, it takes {low}..{high}"
        return ""

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """The rows of the table that each input picks from, as the file says: read when a run has failed."""
        from accel.sources.onnx_file import describe

        return {spec.name: spec.values for spec in describe(self.artifact.path)[0].inputs if spec.values}

    def _run_native(self, feeds: Feeds) -> dict[str, np.ndarray]:
        if not self._plain:
            return self._run_bound(feeds, "cpu")
        return dict(zip(self.outputs, self.session.run(self.outputs, dict(feeds)), strict=True))

    def _run_bound(self, feeds: Feeds, device: str) -> dict[str, np.ndarray]:
        """Inputs copied to ``device``, outputs left there until all are done, then copied back: one copy each way."""
        binding = self.session.io_binding()
        held = []  # not every version keeps a reference to what is bound
        for name, value in feeds.items():
            held.append(_to_device(value, device))
            binding.bind_ortvalue_input(name, held[-1])
        for name in self.outputs:
            # What numpy can't hold is read by its address, which has to be one of this process.
            binding.bind_output(name, device if self._plain else "cpu")
        self.session.run_with_iobinding(binding)
        if self._plain:
            return dict(zip(self.outputs, binding.copy_outputs_to_cpu(), strict=True))
        return dict(zip(self.outputs, map(_to_array, binding.get_outputs()), strict=True))

    def close(self) -> None:
        """Free the model's memory and end its thread pool."""
        super().close()
        self.session = None
        trim()


class OnnxRuntimeCudaSession(OnnxRuntimeSession):
    """The CUDA execution provider, with IO binding. What it has no kernel for runs on the CPU, as ONNX Runtime does.

    Raises ``MissingExtra`` where the installed ONNX Runtime was built without CUDA, ``UnsupportedHere`` where CUDA
    can't start on this machine; it never runs the whole model on the CPU instead.
    """

    provider: ClassVar[str] = "CUDAExecutionProvider"

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        if self.provider not in onnxruntime.get_available_providers():
            raise MissingExtra("onnxruntime with CUDA (onnxruntime-gpu)", "cuda")
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # the CUDA libraries that came with pip
        super().__init__(artifact, options)
        if self.session.get_providers()[0] != self.provider:
            raise UnsupportedHere(
                f"ONNX Runtime could not start CUDA for {artifact.path}; compare its CUDA version with nvidia-smi's"
            )

    def _run_native(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._run_bound(feeds, "cuda")


def _open(artifact: Artifact, options: SessionOptions, provider: str) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = _FATAL
    # Each caller works along with the pool: n threads are n - 1 of the pool and the caller, or fewer and more callers.
    settings.intra_op_num_threads = max(1, options.threads - options.streams + 1) if options.threads else 0
    if not options.spinning:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[options.graph_level])
    path = artifact.path
    if not path.is_file():
        raise InvalidModel(f"{path} does not exist; check the path")
    if path.stat().st_size == 0:
        raise InvalidModel(f"{path} is empty; export it again")
    _register_operators(settings, path)
    try:
        return _session(path, settings, provider)
    except native.NotImplemented as error:
        raise UnsupportedHere(
            f"ONNX Runtime has no kernel that {path} needs ({_reason(error)}); cast or re-export it"
        ) from error
    except (native.InvalidProtobuf, native.InvalidGraph, native.InvalidArgument) as error:
        raise InvalidModel(f"{path} is no valid ONNX model ({_reason(error)}); export it again") from error
    except (native.Fail, native.NoSuchFile, native.RuntimeException, native.NoModel) as error:
        raise InvalidModel(f"ONNX Runtime can't load {path} ({_reason(error)}); export it again") from error


def _session(path: Path, settings: Any, provider: str) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), settings, providers=[provider])
    except native.InvalidGraph as error:
        # ONNX Runtime fuses float8 QDQ into an int8 product and then calls its own node invalid. A file that is right
        # runs as it is written; of one that is wrong the first error is the one that says why.
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return onnxruntime.InferenceSession(str(path), settings, providers=[provider])
        except Exception:  # whatever it is
            raise error from None


def _register_operators(settings: Any, path: Path) -> None:
    """Those in C++ of the library that the environment names; without it the bodies in the file are what runs.

    Convolutions have their sizes in their names, which no library can know before: it is told those of this model.
    """
    given = os.environ.get(OPERATORS)
    if not given:
        return
    from accel.sources.onnx_file import all_nodes, read_proto

    model = read_proto(path)
    nodes = [node for graph in (model.graph, *model.functions) for node in all_nodes(graph)]
    names = {node.op_type for node in nodes if node.domain == "accel" and node.op_type.startswith(CONVOLUTION)}
    for at, name in enumerate(sorted(names)):
        settings.add_session_config_entry(f"custom_op.{CONVOLUTION}.{at}", name)
    try:
        settings.register_custom_ops_library(given)
    except _FAILURES as error:
        raise BadConfig(
            f"{OPERATORS} is {given}, which ONNX Runtime can't load ({_reason(error)}); set it to a library that accel "
            "kernels build --onnxruntime-include wrote, or unset it"
        ) from error


def _reason(error: BaseException) -> str:
    """The runtime's message in one line, without what ours says already: the kind of error and the path."""
    text = one_line(error, None)
    text = text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
    text = re.sub(
        r"^Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: ", r"\1 '\2': ", text
    )
    text = re.sub(r"^(Load model from .*? failed: ?)?(This is an invalid model\. )?", "", text)
    return text[:240].rstrip(" .")


def _dtype(name: str) -> str:
    """``tensor(float16)`` as the field name of the dtype."""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(
        inner, inner
    )


def _to_device(value: np.ndarray, device: str) -> Any:
    import numpy as np

    value = np.ascontiguousarray(value)
    if str(value.dtype) in _BY_BITS:
        import onnx

        bits = value.view(np.uint16 if value.itemsize == 2 else np.uint8)
        kind = int(onnx.TensorProto.DataType.Value(str(value.dtype).upper().replace("_E", "E")))
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)
    where = "cpu" if value.dtype.kind in "OUS" else device  # strings can't leave it
    return onnxruntime.OrtValue.ortvalue_from_numpy(value, where, 0)


def _to_array(value: Any) -> np.ndarray:
    """An output on the CPU as numpy; those that numpy() refuses are copied by their bits."""
    import numpy as np

    dtype = _dtype(value.data_type())
    if dtype not in _BY_BITS:
        array: np.ndarray = value.numpy()
        return array
    shape = value.shape()
    kind = numpy_dtype(dtype)
    # string_at copies: the memory belongs to the runtime and goes with the value.
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * kind.itemsize)
    return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)
