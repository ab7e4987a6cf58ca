"""Runs models with OpenVINO on the CPU."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from accel.artifact import Artifact
from accel.errors import (
    InvalidModel,
    MissingExtra,
    RunFailed,
    UnknownName,
    UnsupportedHere,
    ValuesOutOfRange,
    one_line,
    shortened,
)
from accel.machine import trim_memory
from accel.signature import Bound, Feeds, IntegerRanges, TensorSpec, numpy_dtype, shapes_of
from accel.signature.decoder import precision_name

from .base import BaseSession, SessionOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The precision hint is always set, because by default OpenVINO computes float32 models in bfloat16 on CPUs with
# bfloat16.
_HINTS = {"fp32": "f32", "bf16": "bf16"}
_CACHE_HINTS = {**_HINTS, "fp16": "f16", "int8": "u8"}
_CAPABILITY = {"bf16": "BF16"}
_WIDE = ("int32", "uint32", "int64", "uint64")
_BITS_24, _BITS_32 = (-(2**24), 2**24), (-(2**31), 2**31 - 1)
# OpenVINO moves or compares integers in these operators, and computes other operators on integers in float32.
_EXACT = {
    "Abs", "Broadcast", "Concat", "Convert", "Gather", "GatherElements", "GatherND", "Greater", "GreaterEqual", "Less",
    "LessEqual", "Negative", "Reshape", "Result", "ScatterElementsUpdate", "Select", "ShapeOf", "Slice", "Split",
    "Squeeze", "StridedSlice", "Tile", "TopK", "Transpose", "Unsqueeze", "VariadicSplit",
}  # fmt: skip
_PRODUCTS = ("FullyConnected", "MatMul", "ScaledDotProductAttention")
# OpenVINO's Python API takes tensors of these dtypes only as integers with the same bits.
_BY_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


Steps = Callable[[Feeds], "dict[str, np.ndarray]"]


def _within(values: tuple[Bound, Bound] | None, outer: tuple[int, int]) -> bool:
    """Tells whether the range ``values`` lies within ``outer``. Returns False if a bound depends on a dim."""
    if values is None or any(isinstance(bound, str) for bound in values):
        return False
    return outer[0] <= int(values[0]) and int(values[1]) <= outer[1]


def _computes_with(port: Any) -> bool:
    """Tells whether a graph does more with the integers of an input than move or compare them."""
    waiting, seen = [port], set()
    while waiting:
        for target in waiting.pop().get_target_inputs():
            node = target.get_node()
            name = node.get_type_name()
            if name not in _EXACT:
                return True
            if node.get_friendly_name() in seen or name == "ShapeOf":
                continue
            seen.add(node.get_friendly_name())
            waiting += [one for one in node.outputs() if one.get_element_type().is_integral_number()]
    return False


@dataclass
class _Slot:
    """An infer request. OpenVINO reads the inputs in place, so ``held`` keeps the inputs alive until the run ends."""

    request: Any
    held: list[Any] = field(default_factory=list)


class OpenVinoSession(BaseSession):
    """A compiled model with one infer request for latency, or ``options.streams`` requests for throughput. Threads may
    call ``run`` concurrently, at most one thread per request. ``options.precision`` is the precision in which float32
    models are computed. ``options.cache_precision`` is the precision of a KV cache that the runtime keeps.

    Raises these errors:

    - ``MissingExtra`` if OpenVINO isn't installed.
    - ``InvalidModel`` if the IR is missing, truncated or corrupt.
    - ``UnsupportedHere`` if bfloat16 is requested and the CPU doesn't support bfloat16, or if OpenVINO keeps the cache
      in another precision than ``options.cache_precision``.
    """

    concurrent: ClassVar[bool] = True

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        self._loading = threading.Lock()
        try:
            import openvino
        except ImportError as error:
            raise MissingExtra("openvino", "openvino") from error
        self._ov: Any = openvino
        self._core: Any = openvino.Core()
        self._settings = _settings(options, self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        self._load()
        model, signature = self._model, artifact.signature
        self.keeps_state = bool(model.create_infer_request().query_state())
        self._check_cache()
        self._inputs = self._placed(model.inputs, [spec.name for spec in signature.inputs])
        self._outputs = self._placed(model.outputs, [spec.name for spec in signature.outputs])
        self._types = {name: model.inputs[index].get_element_type() for name, index in self._inputs.items()}
        self._dtypes = {spec.name: numpy_dtype(spec.dtype) for spec in signature.outputs}
        self._by_bits = {s.name: _BY_BITS[s.dtype] for s in signature.inputs if s.dtype in _BY_BITS}

    @cached_property
    def _integers(self) -> IntegerRanges:
        """Returns the ranges of all inputs, because OpenVINO reads past the end of a lookup table without an error."""
        return IntegerRanges([spec for spec in self.signature.inputs if spec.dtype != "uint8"])

    @cached_property
    def _wide(self) -> list[TensorSpec]:
        """Returns the inputs whose integers may need more than 24 bits. ``check_feeds`` keeps the integers of the other
        inputs within their ranges."""
        wide = [one for one in self.signature.inputs if one.dtype in _WIDE and not _within(one.values, _BITS_24)]
        return [TensorSpec(one.name, one.dtype, one.shape) for one in wide]

    @cached_property
    def _surely_exact(self) -> IntegerRanges:
        return IntegerRanges([replace(spec, values=_BITS_24) for spec in self._wide])

    @cached_property
    def _exact(self) -> IntegerRanges:
        """Returns the ranges in which OpenVINO computes integers exactly. It drops the upper 32 bits of an integer, and
        computes most operators in float32."""
        model = self._core.read_model(str(self.artifact.path))
        computed = {name for port in model.inputs if _computes_with(port) for name in port.get_names()}
        return IntegerRanges(
            [replace(spec, values=_BITS_24 if spec.name in computed else _BITS_32) for spec in self._wide]
        )

    def _check_integers(self, feeds: Feeds) -> None:
        super()._check_integers(feeds)
        if self._surely_exact.first_outside(feeds) and (found := self._exact.first_outside(feeds)):
            bits = "float32" if found.high == _BITS_24[1] else "32 bits"
            raise ValuesOutOfRange(
                f"{found}, because OpenVINO computes these integers in {bits}; run the model in another runtime, such "
                "as ort-cpu, for larger integers"
            )

    def _load(self) -> None:
        path = self.artifact.path
        for file in (path, path.with_suffix(".bin")):
            if not file.is_file():
                raise InvalidModel(f"{file} does not exist; put both files of the IR into one folder")
        try:
            model: Any = self._core.compile_model(str(path), "CPU", self._settings)
        except RuntimeError as error:
            why = reason(error)
            raise InvalidModel(f"OpenVINO can't load {path} ({why}); convert the model again", why) from error
        free: SimpleQueue[_Slot] = SimpleQueue()
        # With several streams, one extra request holds the next inputs until a stream becomes free.
        for _ in range(self.streams + (self.streams > 1)):
            free.put(_Slot(model.create_infer_request()))
        # With one thread, infer() hides errors and keeps the outputs of the previous run, while wait() raises the
        # errors.
        self._waits = int(model.get_property("INFERENCE_NUM_THREADS")) < 2 * self.streams
        self._free = free
        self._model = model

    def _placed(self, ports: list[Any], names: list[str]) -> dict[str, int]:
        """Returns the port index of each name, because OpenVINO finds a port faster by index than by name."""
        index = {name: i for i, port in enumerate(ports) for name in port.get_names()}
        if missing := [name for name in names if name not in index]:
            has = ", ".join(sorted(index))
            raise InvalidModel(
                f"{self.artifact.path} has no tensor {missing[0]!r} (its tensors: {has}); convert the model again"
            )
        return {name: index[name] for name in names}

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self._ready()
        free = self._free
        slot = free.get()
        request = slot.request
        try:
            held = [self._tensor(name, feeds[name]) for name in self._inputs]
            for index, (tensor, _) in zip(self._inputs.values(), held, strict=True):
                request.set_input_tensor(index, tensor)
            if self.keeps_state:
                request.reset_state()
            self._infer(request)
            slot.held = held
            return self._outputs_of(request)
        except RuntimeError as error:
            raise self._failed(error, feeds) from error
        finally:
            free.put(slot)

    def _infer(self, request: Any) -> None:
        if self._waits:
            request.start_async()
            request.wait()
        else:
            request.infer(None)

    def steps(self, state: Mapping[str, np.ndarray] | None = None) -> Steps:
        """Returns a function that runs the next step of a model with a state, such as a KV cache. The state is at first
        ``state``, by the names of the variables, or empty. It belongs to this function alone. The feeds aren't checked,
        because the signature describes runs that begin with an empty state."""
        self._ready()
        request = self._model.create_infer_request()
        if state is not None:
            for variable in request.query_state():
                variable.state = self._ov.Tensor(np.ascontiguousarray(state[variable.name]))

        def step(feeds: Feeds) -> dict[str, np.ndarray]:
            held = [self._tensor(name, feeds[name]) for name in self._inputs]
            for index, (tensor, _) in zip(self._inputs.values(), held, strict=True):
                request.set_input_tensor(index, tensor)
            try:
                self._infer(request)
            except RuntimeError as error:
                raise self._failed(error, feeds) from error
            return self._outputs_of(request)

        return step

    def state(self) -> list[TensorSpec]:
        """Returns the name, dtype and shape of each part of the state. A dim of any size is called ``any``."""
        model = self._core.read_model(str(self.artifact.path))
        rows = sorted((one.get_info() for one in model.get_variables()), key=lambda row: row.variable_id)
        return [
            TensorSpec(
                row.variable_id,
                np.dtype(row.data_type.to_dtype()).name,
                tuple(size.get_length() if size.is_static else "any" for size in row.data_shape),
            )
            for row in rows
        ]

    def computed_in(self) -> Mapping[str, int]:
        """Returns how many matrix products the compiled model computes in each of OpenVINO's precisions, such as
        ``f32`` or ``bf16``."""
        found: dict[str, int] = {}
        for node in self._model.get_runtime_model().get_ops():
            about = node.get_rt_info()
            if about["layerType"].astype(str) in _PRODUCTS:
                name = about["runtimePrecision"].astype(str)
                found[name] = found.get(name, 0) + 1
        return found

    def cache_kept_in(self) -> Mapping[str, int]:
        """Returns how many layers keep their keys and values in each precision, as read back from the compiled model.

        OpenVINO accepts every ``KV_CACHE_PRECISION``. It ignores the property for attention other than its operator,
        and ignores bfloat16 if it computes in float32.
        """
        found: dict[str, int] = {}
        known = {name: ours for ours, name in _CACHE_HINTS.items()}
        for node in self._model.get_runtime_model().get_ops():
            about = node.get_rt_info()
            kind = about["layerType"].astype(str)
            if kind == "ScaledDotProductAttention" and "kv_cache_precision" in about:
                said = about["kv_cache_precision"].astype(str)
                found[known.get(said, said)] = found.get(known.get(said, said), 0) + 1
        if self.keeps_state and not found:
            # The products of an attention of single operations read the variables as they are in the file.
            for spec in self.state()[::2]:
                name = precision_name(spec.dtype)
                found[name] = found.get(name, 0) + 1
        return found

    def _check_cache(self) -> None:
        wanted = self.options.cache_precision
        if not wanted:
            return
        found = self.cache_kept_in()
        if other := [name for name in found if name != wanted]:
            raise UnsupportedHere(
                f"OpenVINO keeps the KV cache of {self.artifact.path} in {other[0]} instead of {wanted}; leave out "
                "cache_precision"
            )
        if not found:
            raise UnsupportedHere(
                f"{self.artifact.path} keeps no KV cache; leave out cache_precision, or export the decoder with "
                "--to openvino"
            )

    def run_many(self, requests: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
        """Returns the outputs of each request, in the order of the requests. Uses asynchronous requests without
        callbacks.

        OpenVINO's own request queue can deadlock on destruction, because the queue's thread and the Python interpreter
        may wait for each other.
        """
        if self.streams == 1:
            return super().run_many(requests)
        requests = [self.signature.widened(feeds) for feeds in requests]
        for feeds in requests:
            self.check_feeds(feeds)
        self._ready()
        free = self._free
        found: list[dict[str, np.ndarray]] = [{} for _ in requests]
        under_way: dict[int, _Slot] = {}
        try:
            for number, feeds in enumerate(requests):
                slot = None
                while slot is None:
                    try:
                        slot = free.get(block=not under_way)  # waits if other callers hold all slots
                    except Empty:
                        self._finish_one(requests, under_way, found, free)
                under_way[number] = slot
                slot.held = [self._tensor(name, feeds[name]) for name in self._inputs]
                for index, (tensor, _) in zip(self._inputs.values(), slot.held, strict=True):
                    slot.request.set_input_tensor(index, tensor)
                if self.keeps_state:
                    slot.request.reset_state()
                slot.request.start_async()
            while under_way:
                self._finish_one(requests, under_way, found, free)
        except RuntimeError as error:
            raise self._failed(error, feeds) from error
        finally:
            for slot in under_way.values():
                with contextlib.suppress(RuntimeError):
                    slot.request.wait()
                free.put(slot)
        return found

    def _finish_one(
        self,
        requests: Sequence[Feeds],
        under_way: dict[int, _Slot],
        found: list[dict[str, np.ndarray]],
        free: SimpleQueue[_Slot],
    ) -> None:
        """Wait until any request is done and store its outputs. Checks the oldest request first."""
        while True:
            for number, slot in under_way.items():
                try:
                    if not slot.request.wait_for(1):
                        continue
                    slot.request.wait()  # wait raises errors that wait_for hides
                except RuntimeError as error:
                    raise self._failed(error, requests[number]) from error
                found[number] = self._outputs_of(slot.request)
                free.put(under_way.pop(number))
                return

    def _ready(self) -> None:
        """Load the model again if a run has failed."""
        self.check_open()
        if self._model is None:
            with self._loading:
                if self._model is None:
                    self._load()

    def _failed(self, error: RuntimeError, feeds: Feeds) -> RunFailed:
        # In bfloat16, all runs after a failed run fail too, until the model is loaded again.
        self._model = None
        sizes = shapes_of(feeds)
        return self._run_error(f"OpenVINO can't run {self.artifact.path} at {sizes}: {reason(error)}", "", feeds)

    def _outputs_of(self, request: Any) -> dict[str, np.ndarray]:
        return {name: self._array(request.get_output_tensor(i), name) for name, i in self._outputs.items()}

    def _tensor(self, name: str, value: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns a tensor for the input, and the array whose memory the tensor shares."""
        if value.dtype.kind in "OUS":
            return self._ov.Tensor(value.astype(np.str_)), value
        # OpenVINO refuses read-only memory, such as the memory of a request over the network.
        value = np.require(value, requirements=("C", "W"))
        if name in self._by_bits:
            return self._ov.Tensor(value.view(self._by_bits[name]), list(value.shape), self._types[name]), value
        return self._ov.Tensor(value, shared_memory=True), value

    def _array(self, tensor: Any, name: str) -> np.ndarray:
        """Returns a copy of an output, because the next run overwrites the tensor."""
        dtype = self._dtypes[name]
        if dtype.kind == "O":
            strings: np.ndarray = np.asarray(tensor.str_data, dtype=object)
            return strings
        found: np.ndarray = tensor.data
        return found.copy() if found.dtype == dtype else found.copy().view(dtype)

    def close(self) -> None:
        """Free the model and end its threads."""
        super().close()
        self._free = SimpleQueue()
        self._model = self._core = None
        trim_memory()


def reason(error: BaseException, most: int = 300) -> str:
    """Returns OpenVINO's message without the locations in its C++ code, shortened to ``most`` characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [re.sub(r"^Check '.*?' failed at \S+:\d+:?", "", re.sub(r"^Exception from \S+:\d+:?", "", n)) for n in lines]
    return shortened(one_line(" ".join(said), None).strip(". "), most) or type(error).__name__


def _settings(options: SessionOptions, capabilities: list[str]) -> Mapping[str, Any]:
    if options.precision not in _HINTS:
        raise UnknownName(f"OpenVINO can't compute in the precision {options.precision!r}; use {' or '.join(_HINTS)}")
    needs = _CAPABILITY.get(options.precision)
    if needs and needs not in capabilities:
        raise UnsupportedHere(f"this CPU has no {options.precision} instructions; load the model with precision fp32")
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY" if options.streams == 1 else "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": _HINTS[options.precision],
        # By default, a KV cache is rounded to 8 bits.
        "KV_CACHE_PRECISION": _CACHE_HINTS[options.cache_precision or options.precision],
    }
    if options.threads:
        settings["INFERENCE_NUM_THREADS"] = options.threads
    if options.streams > 1:
        settings["NUM_STREAMS"] = options.streams
    return settings
