"""Manages memory, streams, events and graphs of an NVIDIA GPU for running engines."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from accel.errors import AccelError, MissingExtra, UnsupportedHere

# Buffer sizes are rounded up to a multiple of this number of bytes, the alignment of cudaMalloc. Even a tensor without
# elements gets a buffer of this size, because it needs an address.
GRAIN = 256


class CudaFailed(AccelError):
    """A call of the CUDA runtime failed."""


class Cuda(Protocol):
    """The functions of the CUDA runtime that a session calls. Tests replace them. Addresses and streams are
    integers."""

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def allocate_host(self, size: int) -> int: ...

    def free_host(self, address: int) -> None: ...

    def to_device(self, target: int, source: int, size: int, stream: int) -> None: ...

    def to_host(self, target: int, source: int, size: int, stream: int) -> None: ...

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def wait(self, stream: int) -> None: ...

    def create_event(self) -> int: ...

    def record(self, event: int, stream: int) -> None: ...

    def elapsed_ms(self, start: int, end: int) -> float: ...

    def destroy_event(self, event: int) -> None: ...

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> int: ...

    def launch(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...


class CudaRuntime:
    """The CUDA runtime on the current device. Raises ``UnsupportedHere`` if there is no GPU or the driver is too
    old."""

    def __init__(self, extra: str = "tensorrt-rtx") -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise MissingExtra("cuda-bindings", extra) from error
        self._cuda: Any = runtime
        self._kinds: Any = runtime.cudaMemcpyKind
        # Each dict maps an integer handle to the object that the functions of the CUDA bindings take.
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._graphs: dict[int, Any] = {}
        status, count = runtime.cudaGetDeviceCount()
        if status != runtime.cudaError_t.cudaSuccess or not count:
            reason = self._text(status) if status != runtime.cudaError_t.cudaSuccess else "no device"
            raise UnsupportedHere(
                f"no NVIDIA GPU can be used here ({reason}); use a machine where nvidia-smi shows a GPU"
            )

    def capability(self) -> str:
        """Returns the compute capability of the current device, such as ``8.6``."""
        (device,) = self._call(self._cuda.cudaGetDevice())
        attributes = self._cuda.cudaDeviceAttr
        (major,) = self._call(
            self._cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, device),
        )
        (minor,) = self._call(
            self._cuda.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, device),
        )
        return f"{major}.{minor}"

    def allocate(self, size: int) -> int:
        (address,) = self._call(self._cuda.cudaMalloc(size), size)
        return int(address)

    def free(self, address: int) -> None:
        self._call(self._cuda.cudaFree(address))

    def allocate_host(self, size: int) -> int:
        (address,) = self._call(self._cuda.cudaMallocHost(size), size)
        return int(address)

    def free_host(self, address: int) -> None:
        self._call(self._cuda.cudaFreeHost(address))

    def to_device(self, target: int, source: int, size: int, stream: int) -> None:
        kind = self._kinds.cudaMemcpyHostToDevice
        self._call(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._streams[stream]))

    def to_host(self, target: int, source: int, size: int, stream: int) -> None:
        kind = self._kinds.cudaMemcpyDeviceToHost
        self._call(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._streams[stream]))

    def create_stream(self) -> int:
        (stream,) = self._call(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking))
        self._streams[int(stream)] = stream
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        self._call(self._cuda.cudaStreamDestroy(self._streams.pop(stream)))

    def wait(self, stream: int) -> None:
        self._call(self._cuda.cudaStreamSynchronize(self._streams[stream]))

    def create_event(self) -> int:
        (event,) = self._call(self._cuda.cudaEventCreate())
        self._events[int(event)] = event
        return int(event)

    def record(self, event: int, stream: int) -> None:
        self._call(self._cuda.cudaEventRecord(self._events[event], self._streams[stream]))

    def elapsed_ms(self, start: int, end: int) -> float:
        """Returns the milliseconds between two recorded events. The second event must have completed."""
        (ms,) = self._call(self._cuda.cudaEventElapsedTime(self._events[start], self._events[end]))
        return float(ms)

    def destroy_event(self, event: int) -> None:
        self._call(self._cuda.cudaEventDestroy(self._events.pop(event)))

    def begin_capture(self, stream: int) -> None:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call(self._cuda.cudaStreamBeginCapture(self._streams[stream], mode))

    def end_capture(self, stream: int) -> int:
        """Returns a launchable graph of the work that was enqueued on ``stream`` since ``begin_capture``."""
        (graph,) = self._call(self._cuda.cudaStreamEndCapture(self._streams[stream]))
        (ready,) = self._call(self._cuda.cudaGraphInstantiate(graph, 0))
        self._call(self._cuda.cudaGraphDestroy(graph))
        self._graphs[int(ready)] = ready
        return int(ready)

    def launch(self, graph: int, stream: int) -> None:
        self._call(self._cuda.cudaGraphLaunch(self._graphs[graph], self._streams[stream]))

    def destroy_graph(self, graph: int) -> None:
        self._call(self._cuda.cudaGraphExecDestroy(self._graphs.pop(graph)))

    def _call(self, answer: tuple[Any, ...], size: int | None = None) -> tuple[Any, ...]:
        status, *values = answer
        errors = self._cuda.cudaError_t
        if status == errors.cudaSuccess:
            return tuple(values)
        if status == errors.cudaErrorMemoryAllocation and size is not None:
            raise CudaFailed(
                f"the GPU can't allocate {size / 1e6:.0f} MB more; run a smaller batch or close other sessions"
            )
        raise CudaFailed(
            f"CUDA failed ({self._text(status)}); check the GPU with nvidia-smi, and run compute-sanitizer if the "
            "error persists"
        )

    def _text(self, status: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(status)
        return text.decode() if isinstance(text, bytes) else str(text)


def device_capability() -> str:
    """Returns the compute capability of this machine's GPU, such as ``8.6``.

    Raises ``UnsupportedHere`` if there is no GPU.
    """
    return CudaRuntime().capability()


class DeviceMemory:
    """Holds a device buffer and a pinned host buffer for each tensor name.

    Buffers grow and never shrink, so a session stops allocating after the run with its largest shape.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._device: dict[str, tuple[int, int]] = {}  # address, size
        self._host: dict[str, tuple[int, int]] = {}

    def device(self, name: str, size: int) -> int:
        """Returns the address of at least ``size`` bytes on the device. A buffer that grows loses its content."""
        return self._grown(self._device, name, size, self._cuda.allocate, self._cuda.free)

    def host(self, name: str, size: int) -> np.ndarray:
        """Returns ``size`` bytes of pinned memory as uint8. Copies to and from the device are asynchronous only with
        pinned memory."""
        address = self.host_address(name, size)
        content = (ctypes.c_uint8 * size).from_address(address)
        return np.ctypeslib.as_array(content)

    def host_address(self, name: str, size: int) -> int:
        return self._grown(self._host, name, size, self._cuda.allocate_host, self._cuda.free_host)

    def _grown(self, kept: dict[str, tuple[int, int]], name: str, size: int, allocate: Any, free: Any) -> int:
        address, has = kept.get(name, (0, 0))
        if has and size <= has:
            return address
        if has:
            del kept[name]  # removes the entry first, so that an error can't cause a double free
            free(address)
        room = max(1, -(-size // GRAIN)) * GRAIN
        address = int(allocate(room))
        kept[name] = (address, room)
        return address

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Returns the name and device address of each tensor, sorted by name."""
        return tuple((name, address) for name, (address, _) in sorted(self._device.items()))

    @property
    def size(self) -> int:
        """Returns the number of bytes held on the device."""
        return sum(size for _, size in self._device.values())

    def close(self) -> None:
        """Free all buffers. A second call has no effect."""
        for kept, free in ((self._device, self._cuda.free), (self._host, self._cuda.free_host)):
            while kept:
                _, (address, _) = kept.popitem()
                free(address)
