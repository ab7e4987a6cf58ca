"""Proves that CUDA shared memory works. Most tests use a fake CUDA in plain memory, and one test needs a GPU."""

from __future__ import annotations

import base64
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from accel.runtimes.cuda_memory import CudaFailed
from accel.serve.core import cuda_regions
from accel.serve.core.shared_memory import SharedMemory
from accel.serve.core.transport import Slice
from accel.serve.protocol.inference import Code, ServeError
from tests.support.serving import WEIGHTS, Start

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


class FakeGpu:
    """A fake GPU that stores allocations by handle. ``opened`` counts how often each allocation is open. An access
    outside the open allocations raises an error."""

    def __init__(self) -> None:
        self.shared: dict[bytes, Any] = {}
        self.opened: dict[int, int] = {}
        self.broken = False

    def allocate(self, size: int) -> bytes:
        """Allocates memory and returns its handle in the encoding that clients send."""
        handle = bytes([len(self.shared) + 1]) * 64
        self.shared[handle] = ctypes.create_string_buffer(size)
        return base64.b64encode(handle)

    def memory(self, handle: bytes) -> np.ndarray:
        return np.frombuffer(self.shared[base64.b64decode(handle)], np.uint8)

    def open(self, handle: bytes, device: int) -> int:
        if handle not in self.shared or device != 0:
            raise CudaFailed("CUDA failed (invalid device context)")
        address = ctypes.addressof(self.shared[handle])
        self.opened[address] = self.opened.get(address, 0) + 1
        return address

    def room(self, address: int) -> int:
        assert self.opened[address]
        return next(len(block) for block in self.shared.values() if ctypes.addressof(block) == address)

    def _check(self, address: int, size: int, device: int) -> None:
        assert device == 0
        if self.broken:
            raise CudaFailed("CUDA failed (an illegal memory access was encountered)")
        assert any(start <= address and address + size <= start + self.room(start) for start in self.opened)

    def from_gpu(self, host: int, address: int, size: int, device: int) -> None:
        self._check(address, size, device)
        ctypes.memmove(host, address, size)

    def to_gpu(self, address: int, host: int, size: int, device: int) -> None:
        self._check(address, size, device)
        ctypes.memmove(address, host, size)

    def close(self, address: int, device: int) -> None:
        self.opened[address] -= 1
        if not self.opened[address]:
            del self.opened[address]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    monkeypatch.setattr(cuda_regions, "available", lambda: True)
    monkeypatch.setattr(cuda_regions, "CudaIpc", lambda: made)
    return made


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_inputs_and_outputs_on_a_gpu(gpu: FakeGpu, repository: Path, start: Start, face: str) -> None:
    """Fails if inputs are read from the wrong address, outputs are written to the wrong address, or the response also
    contains the outputs. Also checks that the region is listed, and that unregistering the region closes it."""
    process = start(repository, http_port=0)
    module = triton if face == "grpc" else triton_http
    handle = gpu.allocate(1024)
    sent: Any = handle if face == "grpc" else handle.decode()
    gpu.memory(handle)[64:96] = np.frombuffer(X.tobytes(), np.uint8)
    with module.InferenceServerClient(f"127.0.0.1:{process.ports[face]}") as client:
        metadata = client.get_server_metadata()
        assert "cuda_shared_memory" in (metadata.extensions if face == "grpc" else metadata["extensions"])
        client.register_cuda_shared_memory("all", sent, 0, 1024)
        status = client.get_cuda_shared_memory_status()
        listed = status.regions["all"].byte_size if face == "grpc" else status[0]["byte_size"]
        assert listed == 1024
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_cuda_shared_memory("all", sent, 0, 1024)
        given = module.InferInput("x", [2, 4], "FP32")
        given.set_shared_memory("all", X.nbytes, offset=64)
        asked = module.InferRequestedOutput("y")
        asked.set_shared_memory("all", 24, offset=512)
        result = client.infer("linear", [given], outputs=[asked])
        found = gpu.memory(handle)[512:536].view(np.float32).reshape(2, 3)
        np.testing.assert_allclose(found, X @ WEIGHTS, rtol=1e-5)
        if face == "grpc":
            assert list(result.get_response().raw_output_contents) == [b""]
        given.set_shared_memory("all", X.nbytes, offset=1000)
        with pytest.raises(InferenceServerException, match="Invalid offset"):
            client.infer("linear", [given])
        gpu.broken = True
        given.set_shared_memory("all", X.nbytes, offset=64)
        with pytest.raises(InferenceServerException, match="can't be read or written: CUDA failed"):
            client.infer("linear", [given])
        client.unregister_system_shared_memory()  # unregisters only system memory
        assert gpu.opened
        client.unregister_cuda_shared_memory("all")
        assert not gpu.opened
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'all'"):
            client.infer("linear", [given])


def test_registering(gpu: FakeGpu) -> None:
    """Fails if the server accepts an invalid handle, or a handle to less memory than the request declares. Also fails
    if a refused handle stays open, if two regions share a name, or if an unregistered region is read."""
    memory = SharedMemory()
    handle = base64.b64decode(gpu.allocate(100))
    for arguments in (
        ("a", handle, 0, 101),
        ("a", handle, 0, 0),
        ("a", handle, 1, 100),
        ("a", handle, -1, 100),
        ("a", handle[:-1], 0, 100),
        ("a", b"\xff" * 64, 0, 100),
        ("", handle, 0, 100),
    ):
        with pytest.raises(ServeError) as caught:
            memory.register_cuda(*arguments)
        assert caught.value.code is Code.INVALID_ARGUMENT
    assert not gpu.opened
    memory.register_cuda("a", handle, 0, 100)
    region = memory.cuda_status("a")[0]
    assert memory.status() == []
    for name in ("a", "b"):
        with pytest.raises(ServeError) as caught:
            memory.status(name)
        assert caught.value.code is Code.NOT_FOUND
    memory.write(Slice("a", 4, 96), b"1234")
    assert bytes(memory.read(Slice("a", 6, 94))) == b"\0\x001234"
    assert bytes(memory.read(Slice("a", 0, 100))) == b""
    memory.unregister()
    assert not gpu.opened
    with pytest.raises(ServeError, match="Unable to find"):
        region.read(0, 1)  # the request arrived before the region was unregistered


@pytest.mark.gpu
def test_tritons_own_utilities(repository: Path, serve: Any) -> None:
    """Checks that the server can read and write memory that Triton's utilities allocated on the GPU in another
    process."""
    served = serve(str(repository))
    port = served.wait_for("serving")["ports"]["grpc"]
    ran = subprocess.run([sys.executable, "-c", CLIENT, str(port)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = np.array([float(word) for word in ran.stdout.split()], np.float32).reshape(2, 3)
    np.testing.assert_allclose(found, np.arange(8, dtype=np.float32).reshape(2, 4) @ WEIGHTS, rtol=1e-5)


CLIENT = """
import sys
import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.cuda_shared_memory as cuda

x = np.arange(8, dtype=np.float32).reshape(2, 4)
region = cuda.create_shared_memory_region("all", 1024, 0)
cuda.set_shared_memory_region(region, [x])
with triton.InferenceServerClient("127.0.0.1:" + sys.argv[1]) as client:
    client.register_cuda_shared_memory("all", cuda.get_raw_handle(region), 0, 1024)
    given, asked = triton.InferInput("x", [2, 4], "FP32"), triton.InferRequestedOutput("y")
    given.set_shared_memory("all", 32)
    asked.set_shared_memory("all", 24)
    client.infer("linear", [given], outputs=[asked])
    print(*cuda.get_contents_as_numpy(region, np.float32, [2, 3]).ravel())
    client.unregister_cuda_shared_memory("all")
cuda.destroy_shared_memory_region(region)
"""
