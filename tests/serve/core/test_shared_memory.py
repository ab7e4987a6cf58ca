"""Proves that system shared memory works with Triton's utilities and is safe between clients."""

from __future__ import annotations

import json
import os
import queue
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from accel.serve.core.shared_memory import SharedMemory
from accel.serve.core.transport import Slice
from accel.serve.protocol.inference import Code, ServeError
from tests.support.serving import WEIGHTS, Start, plain
from tests.support.serving import client as client_to

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


@pytest.fixture
def region() -> Any:
    """Returns ``region(size)``, which makes new shared memory and returns its key and Triton's handle."""
    made = []

    def make(size: int) -> tuple[str, Any]:
        key = f"/accel-test-{uuid.uuid4().hex[:8]}"
        made.append(shm.create_shared_memory_region(key[1:], key, size))
        return key, made[-1]

    yield make
    for handle in made:
        shm.destroy_shared_memory_region(handle)


@pytest.fixture
def process(repository: Path, start: Start) -> Any:
    return start(repository, http_port=0)


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_inputs_and_outputs_in_shared_memory(process: Any, region: Any, face: str) -> None:
    """Fails if inputs are read from the wrong address, outputs are written to the wrong address, or the response
    contains the outputs as well."""
    module = triton if face == "grpc" else triton_http
    key, handle = region(1024)
    with module.InferenceServerClient(f"127.0.0.1:{process.ports[face]}") as client:
        client.register_system_shared_memory("all", key, 1024)
        status = client.get_system_shared_memory_status()
        assert (status.regions["all"].key if face == "grpc" else status[0]["key"]) == key
        shm.set_shared_memory_region(handle, [X], offset=64)
        given = module.InferInput("x", [2, 4], "FP32")
        given.set_shared_memory("all", X.nbytes, offset=64)
        asked = module.InferRequestedOutput("y")
        asked.set_shared_memory("all", 24, offset=512)
        result = client.infer("linear", [given], outputs=[asked])
        found = shm.get_contents_as_numpy(handle, np.float32, [2, 3], offset=512)
        np.testing.assert_allclose(found, X @ WEIGHTS, rtol=1e-5)
        if face == "grpc":
            assert list(result.get_response().raw_output_contents) == [b""]
        else:
            assert set(result.get_output("y")) == {"name", "datatype", "shape"}
        client.unregister_system_shared_memory("all")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'all'"):
            client.infer("linear", [given])


@pytest.mark.parametrize(
    ("size", "offset", "out_size", "code", "says"),
    [
        (32, 1000, 24, "INVALID_ARGUMENT", "Invalid offset + byte size"),
        (32, 2**63 - 1, 24, "INVALID_ARGUMENT", "Invalid offset for"),
        (32, -1, 24, "INVALID_ARGUMENT", "Invalid offset for"),
        (16, 0, 24, "INVALID_ARGUMENT", "Expected 32, got 16"),
        (32, 0, 20, "INVALID_ARGUMENT", "should be at least 24 bytes"),
    ],
)
def test_slices_that_do_not_fit(
    process: Any, region: Any, size: int, offset: int, out_size: int, code: str, says: str
) -> None:
    """Fails if a byte outside the region is read or written, or if a tensor larger than its region is accepted."""
    key, _ = region(1024)
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}") as client:
        client.register_system_shared_memory("r", key, 1024)
        given = triton.InferInput("x", [2, 4], "FP32")
        given.set_shared_memory("r", size, offset=offset)
        asked = triton.InferRequestedOutput("y")
        asked.set_shared_memory("r", out_size)
        with pytest.raises(InferenceServerException) as caught:
            client.infer("linear", [given], outputs=[asked])
        assert caught.value.status() == f"StatusCode.{code}"
        assert says in caught.value.message()


def test_an_offset_beyond_64_bits(process: Any, region: Any) -> None:
    """Checks that a JSON request with an offset beyond 64 bits gets the status 400."""
    key, _ = region(1024)
    with triton_http.InferenceServerClient(f"127.0.0.1:{process.ports['http']}") as client:
        client.register_system_shared_memory("r", key, 1024)
    for offset in (2**63, 2**64, 2**200, -(2**63)):
        parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 32, "shared_memory_offset": offset}
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": parameters}]}
        status, said = plain(process, "/v2/models/linear/infer", json.dumps(body).encode())
        assert (status, "offset" in said.decode()) == (400, True), said


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_regions_are_their_owners(repository: Path, start: Start, region: Any, tmp_path: Path, face: str) -> None:
    """Fails if a caller can read, write, list, unregister or detect a region that another token registered. Also checks
    that two tokens can use the same name, and that the regions of a removed token are removed."""
    rows = {name: f'[[token]]\nname = "{name}"\ntoken = "{name}-secret"\ncontrol = true\n' for name in ("one", "two")}
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("".join(rows.values()))
    process = start(repository, http_port=0, tokens=str(tokens))
    module = triton if face == "grpc" else triton_http
    headers = {name: {"authorization": f"Bearer {name}-secret"} for name in rows}
    keys = {name: region(64) for name in rows}
    with module.InferenceServerClient(f"127.0.0.1:{process.ports[face]}") as client:

        def status(name: str, **asked: str) -> dict[str, str]:
            found = client.get_system_shared_memory_status(**asked, headers=headers[name])
            listed = found.regions.values() if face == "grpc" else [SimpleNamespace(**row) for row in found]
            return {row.name: row.key for row in listed}

        def infer(name: str) -> np.ndarray:
            """Multiplies the first four numbers of the region "r" by the weights, and writes the result after these
            numbers."""
            given = module.InferInput("x", [1, 4], "FP32")
            given.set_shared_memory("r", 16)
            asked = module.InferRequestedOutput("y")
            asked.set_shared_memory("r", 12, offset=16)
            client.infer("linear", [given], outputs=[asked], headers=headers[name])
            found: np.ndarray = shm.get_contents_as_numpy(keys[name][1], np.float32, [7])
            return found

        def unknown(call: Any, *arguments: Any, **options: Any) -> None:
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'") as caught:
                call(*arguments, **options)
            assert caught.value.status() == ("StatusCode.NOT_FOUND" if face == "grpc" else "404")

        x = {"one": X[:1], "two": X[1:]}
        for name, (_, handle) in keys.items():
            shm.set_shared_memory_region(handle, [np.concatenate([x[name].ravel(), np.zeros(3, np.float32)])])
        client.register_system_shared_memory("r", keys["one"][0], 64, headers=headers["one"])
        assert status("two") == {}
        unknown(status, "two", region_name="r")
        unknown(infer, "two")
        client.unregister_system_shared_memory("r", headers=headers["two"])
        client.unregister_system_shared_memory(headers=headers["two"])
        assert status("one") == {"r": keys["one"][0]}
        client.register_system_shared_memory("r", keys["two"][0], 64, headers=headers["two"])
        for name in rows:
            assert status(name, region_name="r") == {"r": keys[name][0]}
            np.testing.assert_allclose(infer(name), [*x[name][0], *(x[name] @ WEIGHTS)[0]], rtol=1e-5, atol=1e-6)
        tokens.write_text(rows["two"])
        process.renewal.look()
        tokens.write_text(rows["two"] + rows["one"])
        process.renewal.look()
        assert status("one") == {}
        assert status("two") == {"r": keys["two"][0]}


def test_registering(region: Any) -> None:
    """Fails if a name can be registered twice, or if the server registers a missing object, bytes outside an object, or
    a file that isn't shared memory."""
    memory = SharedMemory()
    key, _ = region(100)

    def refused(code: Code, *arguments: Any) -> None:
        with pytest.raises(ServeError) as caught:
            memory.register(*arguments)
        assert caught.value.code is code

    memory.register("a", key, 0, 100)
    refused(Code.ALREADY_EXISTS, "a", key, 0, 100)
    refused(Code.NOT_FOUND, "b", "/accel-test-nothing", 0, 100)
    refused(Code.INVALID_ARGUMENT, "b", key, 0, 101)
    refused(Code.INVALID_ARGUMENT, "b", key, 90, 11)
    refused(Code.INVALID_ARGUMENT, "b", key, -1, 10)
    refused(Code.INVALID_ARGUMENT, "b", key, 0, 0)
    for path in ("/../etc/passwd", "../etc/passwd", "/..", "a/b", "", "///", "//triton_python_backend_shm_region_1"):
        refused(Code.INVALID_ARGUMENT, "b", path, 0, 1)
    memory.unregister("nothing")
    memory.unregister()
    assert memory.status() == []


def test_links_are_not_followed(region: Any, tmp_path: Path) -> None:
    """Fails if a symbolic link in /dev/shm makes the server open another file."""
    (tmp_path / "secret").write_bytes(b"x" * 100)
    link = Path("/dev/shm") / f"accel-test-{uuid.uuid4().hex[:8]}"
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(ServeError) as caught:
            SharedMemory().register("a", f"/{link.name}", 0, 10)
        assert caught.value.code is Code.NOT_FOUND
    finally:
        link.unlink()


def test_memory_that_was_made_smaller(region: Any) -> None:
    """Fails if the server accesses memory pages that the client removed, because such an access would end the server's
    process."""
    key, handle = region(8192)
    memory = SharedMemory()
    memory.register("a", key, 0, 8192)
    shm.set_shared_memory_region(handle, [np.full(8192, 7, np.uint8)])
    found = memory.read(Slice("a", 8192))
    os.truncate(f"/dev/shm{key}", 4096)
    assert bytes(found) == bytes([7]) * 8192  # ``read`` has already copied these bytes
    with pytest.raises(ServeError, match="made smaller"):
        memory.read(Slice("a", 10))
    with pytest.raises(ServeError, match="made smaller"):
        memory.write(Slice("a", 10), b"x")
    memory.unregister()


def test_unregistering_during_a_request(faulty: Any, region: Any) -> None:
    """Fails if a region disappears while a request still has to write its output there, or stays once no request uses
    it."""
    key, handle = region(64)
    shm.set_shared_memory_region(handle, [np.full(7, 2, np.float32)])
    answers: queue.Queue[Any] = queue.Queue()

    def infer(client: Any, model: str) -> None:
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_shared_memory("r", 16)
        asked = triton.InferRequestedOutput("y")
        asked.set_shared_memory("r", 12, offset=16)
        client.async_infer(model, [given], lambda result, error: answers.put((result, error)), outputs=[asked])

    with client_to(faulty.ports["grpc"]) as client:
        client.register_system_shared_memory("r", key, 64)
        infer(client, "bad")
        assert faulty.running.acquire(timeout=60)
        client.unregister_system_shared_memory()
        assert list(client.get_system_shared_memory_status().regions) == ["r"]
        infer(client, "good")  # as in Triton, requests may use the region until it goes
        assert answers.get(timeout=60)[1] is None
        with pytest.raises(InferenceServerException, match="already in manager"):
            client.register_system_shared_memory("r", key, 64)
        faulty.released.set()
        assert answers.get(timeout=60)[1] is None
        y = shm.get_contents_as_numpy(handle, np.float32, [7])[4:]
        np.testing.assert_allclose(y, 2 * WEIGHTS.sum(0), rtol=1e-5)
        assert list(client.get_system_shared_memory_status().regions) == []
        client.register_system_shared_memory("r", key, 64)
        client.unregister_system_shared_memory("r")
        assert list(client.get_system_shared_memory_status().regions) == []
