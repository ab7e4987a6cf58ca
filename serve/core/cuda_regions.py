"""Implements CUDA shared memory, which is GPU memory that a client allocated and shares through a CUDA IPC handle.

The server copies tensors between the shared GPU memory and numpy arrays, because sessions take and return numpy arrays.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from accel.errors import AccelError
from accel.machine import has_nvidia_gpu
from accel.runtimes.cuda_memory import CudaFailed, CudaRuntime

from ..protocol.inference import Code, ServeError

HANDLE_BYTES = 64


class Ipc(Protocol):
    """Declares the CUDA calls of this module. ``address`` is an address in GPU memory, and ``host`` is an address in
    host memory."""

    def open(self, handle: bytes, device: int) -> int:
        """Returns the address of the memory that ``handle`` shares."""
        ...

    def room(self, address: int) -> int:
        """Returns the number of bytes from ``address`` to the end of its allocation."""
        ...

    def from_gpu(self, host: int, address: int, size: int, device: int) -> None: ...

    def to_gpu(self, address: int, host: int, size: int, device: int) -> None: ...

    def close(self, address: int, device: int) -> None: ...


def available() -> bool:
    """Tells whether this machine has an NVIDIA GPU and the package ``cuda.bindings``."""
    try:
        return has_nvidia_gpu() and importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # the package cuda is not installed at all
        return False


class CudaIpc(CudaRuntime):
    """Implements ``Ipc`` on the GPUs of this machine. Raises ``UnsupportedHere`` if there is no GPU."""

    def open(self, handle: bytes, device: int) -> int:
        self._call(self._cuda.cudaSetDevice(device))
        given = self._cuda.cudaIpcMemHandle_t()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        flags = self._cuda.cudaIpcMemLazyEnablePeerAccess
        (address,) = self._call(self._cuda.cudaIpcOpenMemHandle(given, flags))
        return int(address)

    def room(self, address: int) -> int:
        from cuda.bindings import driver

        status, base, size = driver.cuMemGetAddressRange(address)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CudaFailed(f"CUDA can't tell how large the shared memory is ({status.name})")
        return int(base) + int(size) - address

    def from_gpu(self, host: int, address: int, size: int, device: int) -> None:
        self._copy(host, address, size, device, self._kinds.cudaMemcpyDeviceToHost)

    def to_gpu(self, address: int, host: int, size: int, device: int) -> None:
        self._copy(address, host, size, device, self._kinds.cudaMemcpyHostToDevice)

    def _copy(self, target: int, source: int, size: int, device: int, kind: Any) -> None:
        self._call(self._cuda.cudaSetDevice(device))  # CUDA keeps a current device for each thread
        self._call(self._cuda.cudaMemcpy(target, source, size, kind))

    def close(self, address: int, device: int) -> None:
        self._call(self._cuda.cudaSetDevice(device))
        self._call(self._cuda.cudaIpcCloseMemHandle(address))


@dataclass
class CudaRegion:
    """Holds a registered region of ``byte_size`` bytes at ``address`` on the GPU ``device``, shared through
    ``handle``."""

    name: str
    device: int
    byte_size: int
    handle: bytes
    address: int
    ipc: Ipc
    _copying: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def read(self, offset: int, size: int) -> memoryview:
        """Returns a copy of ``size`` bytes from ``offset``. The caller has checked that the slice lies within the
        region."""
        found = np.empty(size, dtype=np.uint8)
        self._copy(self.ipc.from_gpu, found.ctypes.data, self.address + offset, size)
        return memoryview(found)  # type: ignore[arg-type]

    def write(self, offset: int, body: bytes | bytearray | memoryview) -> None:
        """Copy ``body`` to the region, starting at ``offset``. The caller has checked that ``body`` fits into the
        region."""
        source = np.frombuffer(body, dtype=np.uint8)
        self._copy(self.ipc.to_gpu, self.address + offset, source.ctypes.data, source.nbytes)

    def _copy(self, copy: Any, target: int, source: int, size: int) -> None:
        with self._copying:  # close() waits until the copy has ended
            if self._closed:
                raise ServeError(Code.NOT_FOUND, f"Unable to find shared memory region: '{self.name}'")
            try:
                if size:
                    copy(target, source, size, self.device)
            except AccelError as error:
                raise ServeError(
                    Code.UNAVAILABLE, f"shared memory region '{self.name}' can't be read or written: {error}"
                ) from None

    def close(self) -> None:
        with self._copying:
            if not self._closed:
                self._closed = True
                self.ipc.close(self.address, self.device)


def open_region(name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
    """Returns the region that ``handle`` shares.

    Raises ``ServeError`` INVALID_ARGUMENT if ``handle`` doesn't share at least ``byte_size`` bytes. Raises
    ``ServeError`` UNIMPLEMENTED if this machine has no usable GPU.
    """

    def refused(code: Code, why: str) -> ServeError:
        return ServeError(code, f"failed to register CUDA shared memory region: '{name}', {why}")

    if not available():
        raise refused(Code.UNIMPLEMENTED, "GPUs not supported")
    if not name or len(handle) != HANDLE_BYTES or byte_size <= 0 or device < 0:
        raise refused(
            Code.INVALID_ARGUMENT,
            f"the request needs a name, a handle of {HANDLE_BYTES} bytes, a device and a byte_size above 0",
        )
    try:
        ipc: Ipc = CudaIpc()
        address = ipc.open(handle, device)
    except AccelError as error:
        raise refused(Code.INVALID_ARGUMENT, str(error)) from None
    try:
        room = ipc.room(address)
        if byte_size > room:
            raise refused(Code.INVALID_ARGUMENT, f"byte_size is {byte_size}, but the shared memory has {room} bytes")
        return CudaRegion(name, device, byte_size, handle, address, ipc)
    except BaseException as error:
        ipc.close(address, device)
        if isinstance(error, CudaFailed):
            raise refused(Code.INVALID_ARGUMENT, str(error)) from None
        raise
