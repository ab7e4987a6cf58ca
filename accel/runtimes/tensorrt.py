"""Runs TensorRT and TensorRT-RTX engines on an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.artifact import Artifact
from accel.errors import AccelError, BadFeeds, InvalidModel, UnsupportedHere, one_line
from accel.signature import DimRange, Feeds, Signature, numpy_dtype
from accel.spelling import option

from .base import BaseSession, SessionOptions
from .cuda_graph import CudaGraph
from .cuda_memory import CudaRuntime, DeviceMemory
from .engine_options import engine_option_words
from .tensorrt_toolkit import PLUGIN_LIBRARY, Log, engine_problem, load_plugin_library, load_toolkit, make_logger

if TYPE_CHECKING:
    from .cuda_memory import Cuda

Shape = tuple[int, ...]
# Maps each input to its minimum, optimal and maximum shape.
Profile = Mapping[str, tuple[Shape, Shape, Shape]]


class EngineFailed(AccelError):
    """An engine could not be set up or run on the GPU."""


class TensorRTSession(BaseSession):
    """Runs an engine with one execution context on one stream of the current device.

    Inputs are copied through pinned memory to device buffers, which never shrink. A run uses the first optimization
    profile that includes the shapes of the feeds.

    Raises ``UnsupportedHere`` if the engine was built by another toolkit version or for another GPU. Raises
    ``InvalidModel`` if the file's hash differs from the hash in its manifest. A run raises ``BadFeeds`` for shapes
    outside all profiles.
    """

    def __init__(self, artifact: Artifact, options: SessionOptions) -> None:
        super().__init__(artifact, options)
        toolkit = str(artifact.properties.get("toolkit", "tensorrt-rtx"))
        self._trt = load_toolkit(toolkit)
        cuda = CudaRuntime(toolkit)
        check_fit(artifact, str(self._trt.__version__), cuda.capability())
        check_bytes(artifact)
        load_plugins(self._trt, artifact, cuda.capability())
        self._log = Log()
        self._logger = make_logger(self._trt, self._log)
        self._runtime = self._trt.Runtime(self._logger)
        if artifact.properties.get("version_compatible"):
            self._runtime.engine_host_code_allowed = True  # a version-compatible engine contains a lean runtime
        self._engine = self._deserialized(artifact.path)
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise EngineFailed(
                f"TensorRT can't create an execution context for {artifact.path} ({self._reason()}); free GPU memory"
            )
        self._cuda: Cuda = cuda
        self._stream = cuda.create_stream()
        self._memory = DeviceMemory(cuda)
        self._graph = CudaGraph(cuda, self._stream) if options.cuda_graph else None
        self._inputs = [spec.name for spec in artifact.signature.inputs]
        self._outputs = {spec.name: numpy_dtype(spec.dtype) for spec in artifact.signature.outputs}
        self._on_host = {
            name
            for name in (*self._inputs, *self._outputs)
            if self._engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
        }
        self._profiles = read_profiles(self._engine, self._inputs)
        self._profile = 0
        self._shapes: dict[str, Shape] = {}
        self._allocators: dict[str, Any] = {}
        self.artifact = replace(artifact, signature=ranged(artifact.signature, self._profiles))

    def _run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        return self._run_marked(feeds, lambda: None)

    def phases(self, feeds: Feeds) -> dict[str, float]:
        """Returns the milliseconds of the phases ``host_to_device``, ``compute`` and ``device_to_host`` in one run.

        CUDA events measure only the GPU, without the CPU's work before, between and after the phases.
        """
        self.check_feeds(feeds)
        events = [self._cuda.create_event() for _ in range(4)]
        left = iter(events)
        try:
            self._run_marked(feeds, lambda: self._cuda.record(next(left), self._stream))
            pairs = zip(("host_to_device", "compute", "device_to_host"), events, events[1:], strict=False)
            return {name: self._cuda.elapsed_ms(start, end) for name, start, end in pairs}
        finally:
            for event in events:
                self._cuda.destroy_event(event)

    def _run_marked(self, feeds: Feeds, mark: Callable[[], None]) -> dict[str, np.ndarray]:
        """Run once. Calls ``mark`` before copying the inputs, before the kernels, and before and after copying the
        outputs."""
        self.check_open()
        self._log.errors.clear()
        shapes = {name: tuple(feeds[name].shape) for name in self._inputs}
        self._choose(shapes)
        mark()
        for name in self._inputs:
            self._send(name, feeds[name])
        known = self._place_outputs()
        mark()
        if not self._enqueue(known):
            raise EngineFailed(f"{self.artifact.path} failed on the GPU: {self._reason()}")
        mark()
        self._cuda.wait(self._stream)  # data-dependent output sizes are known only after the run
        return self._receive(known, mark)

    def _enqueue(self, known: Mapping[str, Shape]) -> bool:
        """Enqueue the kernels, as a CUDA graph if the options request a graph and all output sizes are known."""

        def enqueue() -> bool:
            return bool(self._context.execute_async_v3(self._stream))

        if self._graph is None or len(known) < len(self._outputs):
            return enqueue()
        return self._graph.run((self._profile, tuple(self._shapes.items()), self._memory.addresses), enqueue)

    def _choose(self, shapes: dict[str, Shape]) -> None:
        """Set the optimization profile and the input shapes of this run."""
        index = choose_profile(self._profiles, shapes)
        if index is None:
            raise BadFeeds(off_profile(self._profiles, shapes))
        if index != self._profile:
            if not self._context.set_optimization_profile_async(index, self._stream):
                raise EngineFailed(f"can't switch to optimization profile {index}: {self._reason()}")
            self._cuda.wait(self._stream)
            self._profile, self._shapes = index, {}
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                if not self._context.set_input_shape(name, shape):
                    raise EngineFailed(f"{self.artifact.path} refuses {name!r} {list(shape)}: {self._reason()}")
                self._shapes[name] = shape

    def _send(self, name: str, value: np.ndarray) -> None:
        flat = np.ascontiguousarray(value).reshape(-1)
        staging = self._memory.host(name, flat.nbytes)
        staging[...] = flat.view(np.uint8)
        if name in self._on_host:
            self._context.set_tensor_address(name, self._memory.host_address(name, flat.nbytes))
            return
        address = self._memory.device(name, flat.nbytes)
        self._context.set_tensor_address(name, address)
        if flat.nbytes:
            self._cuda.to_device(address, self._memory.host_address(name, flat.nbytes), flat.nbytes, self._stream)

    def _place_outputs(self) -> dict[str, Shape]:
        """Give each output a buffer. Returns the output shapes that are known before the run."""
        known: dict[str, Shape] = {}
        for name, dtype in self._outputs.items():
            shape = tuple(int(size) for size in self._context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                self._context.set_output_allocator(name, self._allocator(name))
                continue
            known[name] = shape
            size = math.prod(shape) * dtype.itemsize
            on_host = name in self._on_host
            address = self._memory.host_address(name, size) if on_host else self._memory.device(name, size)
            self._context.set_tensor_address(name, address)
        return known

    def _allocator(self, name: str) -> Any:
        if name not in self._allocators:
            self._allocators[name] = make_output_allocator(self._trt, self._memory.device)
        return self._allocators[name]

    def _receive(self, known: Mapping[str, Shape], mark: Callable[[], None]) -> dict[str, np.ndarray]:
        """Returns all outputs as new arrays, because the next run overwrites the buffers."""
        results = {}
        for name, dtype in self._outputs.items():
            shape = known[name] if name in known else self._allocators[name].shapes[name]
            results[name] = np.empty(shape, dtype)
            size = results[name].nbytes
            if size and name not in self._on_host:
                self._cuda.to_host(
                    self._memory.host_address(name, size), self._memory.device(name, size), size, self._stream
                )
        mark()
        self._cuda.wait(self._stream)
        for name, value in results.items():
            value.reshape(-1).view(np.uint8)[...] = self._memory.host(name, value.nbytes)
        return results

    def _deserialized(self, path: Path) -> Any:
        data = path.read_bytes()
        if problem := engine_problem(self._trt, self._log, self._runtime, data):
            raise UnsupportedHere(
                f"the engine {path} can't run on this machine: {problem}; build it again with: {rebuild(self.artifact)}"
            )
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise InvalidModel(
                f"the engine {path} can't be loaded ({self._reason()}); build it again with: {rebuild(self.artifact)}"
            )
        return engine

    def _reason(self) -> str:
        return one_line(self._log.errors[0]) if self._log.errors else "TensorRT gives no reason"

    def close(self) -> None:
        """Free the context, the engine, the buffers and the stream. A second call does nothing."""
        super().close()
        if self._context is None:
            return
        self._cuda.wait(self._stream)
        if self._graph is not None:
            self._graph.close()
        # Releases the context, then the engine, then the runtime, because the context uses the engine and the engine
        # uses the runtime.
        self._context = self._engine = self._runtime = None
        self._allocators.clear()
        self._memory.close()
        self._cuda.destroy_stream(self._stream)

    def __del__(self) -> None:
        if getattr(self, "_stream", None) is not None and hasattr(self, "_memory"):
            with contextlib.suppress(Exception):  # at the end of the process, the CUDA driver may already be unloaded
                self.close()


def make_output_allocator(trt: Any, device: Callable[[str, int], int]) -> Any:
    """Returns the allocator of outputs whose size depends on the data. After a run, the allocator's ``shapes`` holds
    the shapes of these outputs."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.shapes: dict[str, Shape] = {}

        # TensorRT passes the arguments by position, so the names of unused arguments may differ from TensorRT's names.
        def reallocate_output(self, tensor_name: str, _memory: int, size: int, _alignment: int) -> int:
            return device(tensor_name, size)

        def reallocate_output_async(
            self, tensor_name: str, _memory: int, size: int, _alignment: int, _stream: int
        ) -> int:
            return device(tensor_name, size)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shapes[tensor_name] = tuple(int(size) for size in shape)

    return OutputAllocator()


def read_profiles(engine: Any, inputs: Sequence[str]) -> list[Profile]:
    """Returns the engine's optimization profiles, in the engine's order."""

    def ends(name: str, index: int) -> tuple[Shape, Shape, Shape]:
        low, opt, high = (tuple(int(d) for d in shape) for shape in engine.get_tensor_profile_shape(name, index))
        return low, opt, high

    return [{name: ends(name, index) for name in inputs} for index in range(engine.num_optimization_profiles)]


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int | None:
    """Returns the index of the first profile that includes ``shapes``, or None if no profile does. Returns 0 for an
    engine without profiles."""

    def holds(profile: Profile) -> bool:
        return all(
            len(shape) == len(profile[name][0])
            and all(
                low <= size <= high for low, size, high in zip(profile[name][0], shape, profile[name][2], strict=True)
            )
            for name, shape in shapes.items()
            if name in profile
        )

    if not profiles:
        return 0
    return next((index for index, profile in enumerate(profiles) if holds(profile)), None)


def off_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> str:
    """Returns the error message for feeds whose shapes are outside all profiles."""

    def text(shape: Shape) -> str:
        return "x".join(map(str, shape))

    asked = ", ".join(f"{name} {text(shape)}" for name, shape in shapes.items())
    built = " or ".join(
        ", ".join(f"{name} {text(low)} to {text(high)}" for name, (low, _, high) in p.items()) for p in profiles
    )
    fix = f"pad or split it, or build with {option('profiles')}"
    return f"{asked} is off the engine's optimization profiles ({built}); {fix}"


def ranged(signature: Signature, profiles: Sequence[Profile]) -> Signature:
    """Returns ``signature`` with the range of each dim replaced by the range that all profiles cover together."""
    found: dict[str, DimRange] = {}
    for profile in profiles:
        for spec in signature.inputs:
            low, opt, high = profile[spec.name]
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str):
                    known = found.get(dim) or DimRange(low[axis], opt[axis], high[axis])
                    found[dim] = DimRange(min(known.min, low[axis]), known.opt, max(known.max, high[axis]))
    return signature.with_dims(found) if found else signature


def check_fit(artifact: Artifact, version: str, capability: str) -> None:
    """Raises ``UnsupportedHere`` if the manifest names another toolkit version or another GPU."""
    properties = artifact.properties
    built = properties.get("toolkit_version")
    later = built is not None and properties.get("version_compatible") and _numbers(version) >= _numbers(built)
    if built is not None and built != version and not later:
        raise UnsupportedHere(
            f"the engine {artifact.path} was built by {artifact.properties.get('toolkit')} {built}, but this machine "
            f"has version {version}; build it again with: {rebuild(artifact)}"
        )
    capabilities = artifact.properties.get("compute_capabilities") or [capability]
    if properties.get("hardware") == "ampere-plus" and _numbers(capability) >= (8, 0):
        return
    if capability not in capabilities:
        raise UnsupportedHere(
            f"the engine {artifact.path} was built for compute capability {', '.join(capabilities)}, but this GPU has "
            f"compute capability {capability}; build it again with: {rebuild(artifact, capability)}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def check_bytes(artifact: Artifact) -> None:
    """Raises ``InvalidModel`` if the file hashes differ from the manifest's hashes. A damaged engine can crash the
    process."""
    if artifact.manifest is not None and artifact.hashes() != dict(artifact.manifest.files):
        raise InvalidModel(
            f"{artifact.path} is not the file its manifest describes (its sha256 differs); build it again with: "
            f"{rebuild(artifact)}"
        )


def load_plugins(trt: Any, artifact: Artifact, capability: str) -> None:
    """Load accel's plugin library if nodes of the engine need it.

    The library is searched for on this machine. The library's path is never read from a manifest, because a manifest
    may be hostile.

    Raises ``UnsupportedHere`` if there is no library for this GPU. Also raises the errors of ``load_plugin_library``.
    """
    if PLUGIN_LIBRARY not in dict(artifact.properties.get("plugins") or {}).values():
        return
    if load_plugin_library(trt, capability) is None:
        raise UnsupportedHere(
            f"{artifact.path} needs accel's TensorRT plugins, but no plugins are built for this GPU; run accel kernels "
            "build --arch native --tensorrt-include DIR, or build the engine again without plugins: "
            f"{rebuild(artifact)}"
        )


def rebuild(artifact: Artifact, capability: str | None = None) -> str:
    """Returns the command that builds this engine again. If ``capability`` is given, the command builds the engine for
    GPUs of this compute capability."""
    properties = artifact.properties
    words = ["accel", "optimize", str(artifact.source.get("spec", "MODEL.onnx"))]
    words += ["--target", str(properties.get("toolkit", "tensorrt-rtx"))]
    words += ["--precision", str(properties.get("precision", "fp32"))]
    words += ["--kernels"] * bool(properties.get("kernels"))
    for profile in properties.get("profiles", ()):
        for name, ends in profile.items():
            words += ["--profile", f"{name}={','.join('x'.join(map(str, shape)) for shape in ends)}"]
    for found in [capability] if capability else properties.get("compute_capabilities", ()):
        words += ["--compute-capability", found]
    words += engine_option_words(dict(properties))
    return " ".join([*words, "-o", str(artifact.path.parent)])
