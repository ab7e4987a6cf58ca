"""Proves that the server survives failing sessions, vanishing clients and malformed messages."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from accel.serve.protocol import messages as proto
from tests.support.serving import WEIGHTS, plain, until


def ask(client: Any, name: str, mark: float = 0, **options: Any) -> np.ndarray:
    x = np.full((1, 4), mark, dtype=np.float32)
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(x)
    found: np.ndarray = client.infer(name, [given], **options).as_numpy("y")
    np.testing.assert_allclose(found, x @ WEIGHTS, rtol=1e-5)
    return found


def client_of(process: Any) -> Any:
    return triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}")


def idle(process: Any) -> bool:
    """Waits for at most a minute until every request has finished. Returns False if a request is still running."""
    deadline = time.monotonic() + 60
    while process.server.under_way and time.monotonic() < deadline:
        time.sleep(0.005)
    return process.server.under_way == 0


def test_a_session_that_raises(faulty: Any) -> None:
    """Checks that a session that raises an error gives the right error code, counts as a failure, and breaks no
    model."""
    with client_of(faulty) as client:
        for _ in range(3):
            with pytest.raises(InferenceServerException) as caught:
                ask(client, "bad", 1)
            assert caught.value.status() == "StatusCode.INTERNAL"
            assert "the runtime gave up" in caught.value.message()
        ask(client, "bad", 3)
        ask(client, "good")
        stats = client.get_inference_statistics("bad").model_stats[0].inference_stats
        assert (stats.success.count, stats.fail.count) == (1, 3)
    assert idle(faulty)


def test_a_session_that_hangs(faulty: Any) -> None:
    """Fails if a hung model blocks another model, delays the refusal of a request, or accepts requests without a
    limit."""
    with ExitStack() as stack, client_of(faulty) as client:
        hung = [stack.enter_context(client_of(faulty)) for _ in range(14)]
        x = triton.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.full((1, 4), 2, dtype=np.float32))
        answers: queue.Queue[Any] = queue.Queue()
        for one in hung:
            one.async_infer("bad", [x], lambda result, error: answers.put((result, error)), client_timeout=120)
        assert faulty.running.acquire(timeout=30)
        deadline = time.monotonic() + 30
        while faulty.server.under_way < 14:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        ask(client, "good", client_timeout=60)
        assert client.is_server_live(client_timeout=60)
        began = time.monotonic()
        with pytest.raises(InferenceServerException, match=r"Exceeds maximum queue size.*--grpc-threads") as caught:
            ask(client, "bad", 3, client_timeout=60)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert time.monotonic() - began < 5
        assert faulty.server.repository.get("bad").statistics().fail.count == 1  # the statistics count refused requests
        faulty.released.set()
        assert [answers.get(timeout=30)[1] for _ in hung] == [None] * 14
        assert idle(faulty)
        ask(client, "bad", 3)


def test_shared_memory_that_goes_while_its_request_waits(faulty: Any) -> None:
    """Fails if the server accesses shared memory that a client has truncated, because such an access would end the
    server's process."""
    key = f"/accel-test-{uuid.uuid4().hex[:8]}"
    handle = shm.create_shared_memory_region(key[1:], key, 4096)
    x = np.full((1, 4), 3, dtype=np.float32)
    shm.set_shared_memory_region(handle, [x])
    answers: queue.Queue[Any] = queue.Queue()
    try:
        with client_of(faulty) as client, ThreadPoolExecutor(1) as pool:
            client.register_system_shared_memory("r", key, 4096)
            first = pool.submit(ask, client, "bad", 2)
            assert faulty.running.acquire(timeout=60)
            given = triton.InferInput("x", [1, 4], "FP32")
            given.set_shared_memory("r", 16)
            client.async_infer("bad", [given], lambda result, error: answers.put((result, error)), client_timeout=60)
            until(lambda: faulty.server.under_way == 2)
            until(lambda: faulty.server.repository.get("bad").statistics().queue_depth == 1)
            os.truncate(f"/dev/shm{key}", 0)
            faulty.released.set()
            first.result(60)
            result, error = answers.get(timeout=60)
            assert error is None
            np.testing.assert_allclose(result.as_numpy("y"), x @ WEIGHTS, rtol=1e-5)
    finally:
        shm.destroy_shared_memory_region(handle)


def test_a_deadline_that_passes(faulty: Any) -> None:
    """Fails if a caller waits beyond its deadline, or if the caller's request stays pending."""
    with client_of(faulty) as client:
        with pytest.raises(InferenceServerException) as caught:
            ask(client, "bad", 2, client_timeout=0.2)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        faulty.released.set()
        assert idle(faulty)
        ask(client, "bad", 3)


def test_a_deadline_shorter_than_the_queue(faulty: Any) -> None:
    """Fails if a request still runs after its deadline has passed in the queue, or if the caller gets another code than
    DEADLINE_EXCEEDED."""
    with client_of(faulty) as client, client_of_its_own(faulty) as other, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, client, "bad", 2)
        assert faulty.running.acquire(timeout=60)
        ran = list(faulty.sessions[-1].sizes)
        late = pool.submit(ask, other, "bad", 3, client_timeout=3)
        until(lambda: late.done() or faulty.server.repository.get("bad").statistics().queue_depth == 1)
        with pytest.raises(InferenceServerException) as caught:
            late.result(60)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        # The client may notice the expired deadline before the server does.
        until(lambda: faulty.server.repository.get("bad").statistics().queue_depth == 0)
        faulty.released.set()
        first.result(60)
        assert idle(faulty)
        assert faulty.sessions[-1].sizes == ran  # only the first request, which had already begun, has run
        ask(client, "bad", 3)


LEVELS = """{"max_batch_size": 1, "dynamic_batching": {"priority_levels": 2, "default_priority_level": 2,
"default_queue_policy": {"allow_timeout_override": %s}}}"""


def test_a_timeout_that_a_request_brings(faulty: Any) -> None:
    """Checks that a request that waits behind a hung session ends after its ``timeout`` in microseconds. Also fails if
    the ``timeout`` has an effect although the model's config forbids timeouts."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [3] * 4}
    body = json.dumps({"parameters": {"timeout": 200_000}, "inputs": [x]}).encode()
    with (
        client_of(faulty) as client,
        client_of_its_own(faulty) as other,
        ThreadPoolExecutor(3) as pool,
        ExitStack() as stack,
    ):
        stack.callback(faulty.released.set)  # releases the pool's threads after a failed assertion
        client.load_model("bad", config=LEVELS % "true")
        first = pool.submit(ask, client, "bad", 2)
        assert faulty.running.acquire(timeout=60)
        ran = list(faulty.sessions[-1].marks)
        began = time.monotonic()
        with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
            ask(other, "bad", 3, timeout=200_000, client_timeout=60)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert 0.2 <= time.monotonic() - began < 30
        status, said = plain(faulty, "/v2/models/bad/infer", body)
        assert (status, "Request timeout expired" in said.decode()) == (503, True)
        faulty.released.set()
        first.result(60)
        assert faulty.sessions[-1].marks == ran
        assert faulty.server.repository.get("bad").statistics().fail.count == 2

        client.load_model("bad", config=LEVELS % "false")
        faulty.released.clear()
        first = pool.submit(ask, client, "bad", 2)
        assert faulty.running.acquire(timeout=60)
        late = pool.submit(ask, other, "bad", 3, timeout=1, client_timeout=60)
        until(lambda: late.done() or faulty.server.repository.get("bad").statistics().queue_depth == 1)
        faulty.released.set()
        late.result(60)  # the request gets an answer despite its expired timeout


def test_a_priority_that_a_request_brings(faulty: Any) -> None:
    """Fails if a request of priority 1, over gRPC or HTTP, runs after earlier requests of priority 2. Also fails if a
    request without a priority overtakes earlier requests of the default priority."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [7] * 4}
    body = json.dumps({"parameters": {"priority": 1}, "inputs": [x]}).encode()
    model = faulty.server.repository
    with client_of(faulty) as client, ThreadPoolExecutor(5) as pool, ExitStack() as stack:
        stack.callback(faulty.released.set)
        client.load_model("bad", config=LEVELS % "true")
        asked = [pool.submit(ask, client, "bad", 2)]
        assert faulty.running.acquire(timeout=60)
        ran = len(faulty.sessions[-1].marks)
        for mark, options in ((4, {"priority": 2}), (5, {}), (6, {"priority": 1})):
            asked.append(pool.submit(ask, client, "bad", mark, client_timeout=100, **options))
            until(lambda: model.get("bad").statistics().queue_depth == len(asked) - 1)
        over_http = pool.submit(plain, faulty, "/v2/models/bad/infer", body)
        until(lambda: model.get("bad").statistics().queue_depth == 4)
        faulty.released.set()
        for one in asked:
            one.result(100)
        assert over_http.result(100)[0] == 200
        assert faulty.sessions[-1].marks[ran:] == [6, 7, 4, 5]


CLIENT = """
import sys
import numpy as np
import tritonclient.grpc as triton

with triton.InferenceServerClient(sys.argv[1]) as client:
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), float(sys.argv[2]), np.float32))
    client.infer("bad", [given])
"""


@pytest.mark.parametrize("mark", ["2", "3"])
def test_a_client_that_is_killed(faulty: Any, mark: str) -> None:
    """Fails if a killed client's request stays pending, or if the session runs a waiting request of a killed client.
    Also fails if killing the client affects the server or another caller. The killed client's request is running if
    ``mark`` is 2, and waiting if ``mark`` is 3."""
    address = f"127.0.0.1:{faulty.ports['grpc']}"
    model = faulty.server.repository.get("bad")
    with client_of(faulty) as client, ThreadPoolExecutor(1) as pool:
        first = None
        if mark == "3":
            first = pool.submit(ask, client, "bad", 2)
            assert faulty.running.acquire(timeout=60)
        killed = subprocess.Popen([sys.executable, "-W", "ignore", "-c", CLIENT, address, mark])
        try:
            if mark == "3":
                until(lambda: model.statistics().queue_depth == 1)
            else:
                assert faulty.running.acquire(timeout=60)
        finally:
            killed.kill()
            killed.wait(60)
        if mark == "3":
            until(lambda: model.statistics().queue_depth == 0)
        ran = list(faulty.sessions[-1].sizes)
        faulty.released.set()
        assert first is None or first.result(60) is not None
        assert idle(faulty)
        assert faulty.sessions[-1].sizes == ran
        ask(client, "bad", 3)
        ask(client, "good")


def test_a_client_that_vanishes(faulty: Any) -> None:
    """Fails if a request whose client has disconnected stays pending, or crashes the server when the request ends."""
    request = proto.message("ModelInferRequest")(model_name="bad")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.full((1, 4), 2, dtype=np.float32).tobytes())
    channel = grpc.insecure_channel(f"127.0.0.1:{faulty.ports['grpc']}")
    call = channel.unary_unary(f"/{proto.SERVICE}/ModelInfer").future(request.SerializeToString())
    assert faulty.running.acquire(timeout=30)
    call.cancel()
    channel.close()
    faulty.released.set()
    assert idle(faulty)
    with client_of(faulty) as client:
        ask(client, "bad", 3)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xff\xff\xff\xff", grpc.StatusCode.INTERNAL),
        (b"\n\xff\xff\xff\xff\x0f", grpc.StatusCode.INTERNAL),
        (b"x" * ((1 << 20) + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_bytes_that_are_no_request(faulty: Any, body: bytes, code: grpc.StatusCode, caplog: Any) -> None:
    """Fails if a malformed or oversize message gets the wrong code, or affects another call."""
    with grpc.insecure_channel(f"127.0.0.1:{faulty.ports['grpc']}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{proto.SERVICE}/ModelInfer")(body)
        assert caught.value.code() is code
    with client_of(faulty) as client:
        ask(client, "good")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xff\xff\xff\xff", grpc.StatusCode.INTERNAL),
        (b"\n\xff\xff\xff\xff\x0f", grpc.StatusCode.INTERNAL),
        (b"x" * ((1 << 20) + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_bytes_that_are_no_request_in_a_stream(faulty: Any, body: bytes, code: grpc.StatusCode) -> None:
    """Checks that a malformed or oversize message gets the right code and ends the stream. The bad message is the first
    or the second message of the stream. Also fails if a malformed message blocks a stream slot, disturbs another
    caller, or prevents a clean end."""
    request = proto.message("ModelInferRequest")(model_name="good", id="7")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.ones((1, 4), np.float32).tobytes())
    good, answer = request.SerializeToString(), proto.message("ModelStreamInferResponse").FromString
    with grpc.insecure_channel(f"127.0.0.1:{faulty.ports['grpc']}") as channel:
        stream = channel.stream_stream(f"/{proto.SERVICE}/ModelStreamInfer", response_deserializer=answer)
        for before in [0, 1] * 4:  # the server allows four streams
            sent: queue.Queue[Any] = queue.Queue()
            responses = stream(iter(sent.get, None), timeout=60)
            for _ in range(before):
                sent.put(good)
                assert next(responses).infer_response.id == "7"
            sent.put(body)
            with pytest.raises(grpc.RpcError) as caught:
                next(responses)
            sent.put(None)
            assert caught.value.code() is code
        found = [response.error_message for response in stream(iter([b"", good]), timeout=60)]
        assert "unknown model: ''" in found[0]
        assert found[1:] == [""]
    with client_of(faulty) as client:
        ask(client, "good")
    assert idle(faulty)
    started = time.monotonic()
    faulty.transports["grpc"].stop(1.0)
    assert time.monotonic() - started < 5, "the server can't end"


def test_connections_that_are_left_open(faulty: Any) -> None:
    """Fails if clients that connect and send nothing, or half a request, block new connections."""
    with ExitStack() as stack:
        for i in range(300):
            left = stack.enter_context(socket.create_connection(("127.0.0.1", faulty.ports["grpc"])))
            if i % 2:
                left.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00")
        with client_of(faulty) as client:
            ask(client, "good", client_timeout=60)


def test_a_model_whose_file_is_gone(faulty: Any, tmp_path: Path) -> None:
    """Checks that a loaded model still works after its file is deleted, even after a failed reload."""
    shutil.rmtree(tmp_path / "models" / "good" / "1")
    with client_of(faulty) as client:
        ask(client, "good")
        with pytest.raises(InferenceServerException, match="no version is available"):
            client.load_model("good")
        ask(client, "good")
        assert client.is_model_ready("good")


def test_a_stream_of_many_requests(faulty: Any) -> None:
    """Checks that the server slows down a long stream to a slow model instead of refusing the stream. Also fails if the
    stream blocks the threads of unary calls. Also checks that the stream keeps all responses in order, and that the
    stream's requests form full batches."""
    count, answers = 600, queue.Queue[Any]()
    with client_of_its_own(faulty) as client, client_of(faulty) as other, ThreadPoolExecutor(1) as pool:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(count):
            x = triton.InferInput("x", [1, 4], "FP32")
            x.set_data_from_numpy(np.full((1, 4), 2 if number == 0 else 4, dtype=np.float32))
            client.async_stream_infer("bad", [x], request_id=str(number))
        assert faulty.running.acquire(timeout=60)
        until(lambda: faulty.server.under_way >= 100)
        unary = pool.submit(ask, other, "bad", 5, client_timeout=100)
        ask(other, "good", client_timeout=60)
        faulty.released.set()
        found = [answers.get(timeout=60) for _ in range(count)]
        unary.result(100)
    assert [error for _, error in found if error is not None] == []
    assert [result.get_response().id for result, _ in found] == [str(number) for number in range(count)]
    assert max(faulty.sessions[-1].sizes[2:]) == 8  # the first runs are the warm-up
    assert idle(faulty)
    stats = faulty.server.repository.get("bad").statistics()
    assert (stats.received, stats.success.count, stats.fail.count) == (count + 1, count + 1, 0)


def test_http_requests_wait_without_a_thread(faulty: Any) -> None:
    """Fails if the server refuses HTTP requests because all threads are busy, although the model's queue has room."""
    count = 40
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4]}

    def asked(mark: int) -> tuple[int, bytes]:
        body = json.dumps({"inputs": [{**x, "data": [mark] * 4}]}).encode()
        return plain(faulty, "/v2/models/bad/infer", body)

    with ThreadPoolExecutor(count) as pool:
        first = pool.submit(asked, 2)
        assert faulty.running.acquire(timeout=60)
        found = [pool.submit(asked, 4) for _ in range(count - 1)]
        until(lambda: faulty.server.under_way == count or any(one.done() for one in found))
        faulty.released.set()
        assert {one.result(60)[0] for one in (first, *found)} == {200}


def test_streams_have_a_bound(faulty: Any) -> None:
    """Fails if open streams can occupy every thread."""
    with ExitStack() as stack:
        refused = 0
        for _ in range(8):
            one = stack.enter_context(client_of_its_own(faulty))
            found: list[Any] = []
            arrived = threading.Event()

            def answer(result: Any, error: Any, found: Any = found, arrived: Any = arrived) -> None:
                found.append(error)
                arrived.set()

            one.start_stream(answer)
            given = triton.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            with suppress(InferenceServerException):  # the stream may already be refused
                one.async_stream_infer("good", [given])
            assert arrived.wait(30)
            refused += found[0] is not None
        assert refused == 4  # only a quarter of the sixteen threads serves streams
        with client_of(faulty) as client:
            ask(client, "good", client_timeout=60)


def client_of_its_own(process: Any) -> Any:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return triton.InferenceServerClient(f"127.0.0.1:{process.ports['grpc']}", channel_args=options)
