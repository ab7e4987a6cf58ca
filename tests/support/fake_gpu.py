"""Provides a fake CUDA and a fake engine in plain memory. The fakes let the TensorRT session run without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from accel.errors import AccelError
from accel.signature import Signature, TensorSpec


class FakeCuda:
    """An imitation of CUDA that uses ordinary memory. The addresses point to real memory, every allocation is counted,
    and a double free raises an error."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.live: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.streams: set[int] = set()
        self.allocations = 0
        self.clock = 0
        self.events: dict[int, int | None] = {}
        self.destroyed = 0
        self.capturing = False
        self.captured = self.launched = 0
        self.graphs: dict[int, FakeContext] = {}

    def capability(self) -> str:
        return "8.6"

    def allocate(self, size: int) -> int:
        if size > self.limit:
            raise AccelError("the GPU has no room")
        self.allocations += 1
        block = ctypes.create_string_buffer(size)
        self.live[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.live[address]

    def allocate_host(self, size: int) -> int:
        block = ctypes.create_string_buffer(size)
        self.host[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free_host(self, address: int) -> None:
        del self.host[address]

    def to_device(self, target: int, source: int, size: int, stream: int) -> None:
        assert target in self.live
        assert stream in self.streams
        ctypes.memmove(target, source, size)

    def to_host(self, target: int, source: int, size: int, stream: int) -> None:
        assert source in self.live
        assert stream in self.streams
        ctypes.memmove(target, source, size)

    def create_stream(self) -> int:
        self.streams.add(7)
        return 7

    def destroy_stream(self, stream: int) -> None:
        self.streams.remove(stream)

    def wait(self, stream: int) -> None:
        assert stream in self.streams

    def create_event(self) -> int:
        self.events[len(self.events)] = None
        return len(self.events) - 1

    def record(self, event: int, stream: int) -> None:
        self.clock += 10 ** len([e for e in self.events.values() if e is not None])
        self.events[event] = self.clock

    def elapsed_ms(self, start: int, end: int) -> float:
        first, last = self.events[start], self.events[end]
        assert first is not None
        assert last is not None
        return float(last - first)

    def destroy_event(self, event: int) -> None:
        self.destroyed += 1

    def begin_capture(self, stream: int) -> None:
        assert not self.capturing
        self.capturing = True

    def end_capture(self, stream: int) -> int:
        assert self.capturing
        self.capturing = False
        self.captured += 1
        self.graphs[self.captured] = FakeToolkit.Runtime.engines[-1].contexts[-1]
        return self.captured

    def launch(self, graph: int, stream: int) -> None:
        self.launched += 1
        assert self.graphs[graph].execute_async_v3(stream)

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]


def array_at(address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), kind).reshape(shape)


class FakeContext:
    """Computes ``y = 2 * x``, and the indices ``where`` of the positive numbers in ``x``. The number of indices depends
    on the data."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.profile = 0
        self.switched: list[int] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.fails = False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile, self.shapes = index, {}
        self.switched.append(index)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.profiles[self.profile]
        self.shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (2, -1) if name == "where" else self.shapes["x"]

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.fails:
            self.engine.logger.log("error", "out of resources\nin some file")
            return False
        x = array_at(self.addresses["x"], self.shapes["x"], "float32")
        array_at(self.addresses["y"], self.shapes["x"], "float32")[...] = x * 2
        if "where" not in self.allocators:
            return True
        found = np.stack(np.nonzero(x > 0)).astype(np.int64)
        address = self.allocators["where"].reallocate_output_async("where", 0, found.nbytes, 256, 7)
        array_at(address, found.shape, "int64")[...] = found
        self.allocators["where"].notify_shape("where", found.shape)
        return True


class FakeEngine:
    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.profiles = [((1, 2), (2, 4), (4, 8)), ((8, 2), (8, 4), (16, 8))]
        self.num_optimization_profiles = 2
        self.contexts: list[FakeContext] = []

    def create_execution_context(self) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert name == "x"
        return list(self.profiles[index])


class FakeToolkit:
    """Imitates the parts of the tensorrt module that a session uses. An engine file must start with ENGINE."""

    __version__ = "1.7.1"
    TensorLocation = SimpleNamespace(HOST="host", DEVICE="device")

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING = "internal", "error", "warning"

    class IOutputAllocator:
        pass

    class EngineInvalidityDiagnostics:
        __members__ = {"VERSION_MISMATCH": 1, "MALFORMED_ENGINE": 32}  # noqa: RUF012

    class Runtime:
        engine_header_size = 6
        engines: list[FakeEngine] = []  # noqa: RUF012

        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def get_engine_validity(self, header: bytes) -> tuple[str, int]:
            return "invalid", {b"ENGINE": 0, b"OLDONE": 1}.get(header, 32)

        def deserialize_cuda_engine(self, data: bytes) -> FakeEngine | None:
            if data[6:] != b" whole":
                self.logger.log("error", "it is not whole")
                return None
            self.engines.append(FakeEngine(self.logger))
            return self.engines[-1]


SIGNATURE = Signature(
    (TensorSpec("x", "float32", ("batch", "width")),),
    (TensorSpec("y", "float32", ("batch", "width")), TensorSpec("where", "int64", (2, "found"))),
)
