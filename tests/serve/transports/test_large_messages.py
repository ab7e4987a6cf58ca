"""Proves that large, compressed and refused messages take little memory, and that none of it is kept."""

from __future__ import annotations

import gc
import gzip
import http.client
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.serve.core.transport import InferReply, ReplyTensor
from accel.serve.process import message_limit, serving
from accel.serve.protocol import messages as proto
from accel.serve.transports.grpc.message import _Request, _split, parse_infer
from accel.serve.transports.grpc.wire import write_reply
from tests.support.onnx_builder import artifact, node
from tests.support.serving import FLOAT, Served, Start, identity, linear, plain, until

MEGABYTE = 1 << 20
BINARY = "Inference-Header-Content-Length"


def request(count: int, name: str = "x", model: str = "linear") -> Any:
    """Makes a request with one row of ``count`` numbers. Models with rows of 4 numbers refuse any other count."""
    made = proto.message("ModelInferRequest")(model_name=model)
    made.inputs.add(name=name, datatype="FP32", shape=[1, count])
    made.raw_input_contents.append(bytes(4 * count))
    return made


def binary(count: int) -> tuple[bytes, dict[str, str]]:
    """Makes the HTTP body and headers of the same request."""
    row = {"name": "x", "datatype": "FP32", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [row]}).encode()
    return head + bytes(4 * count), {BINARY: str(len(head))}


def call(port: int, message: bytes, method: str = "ModelInfer") -> grpc.StatusCode:
    kind = "stream_stream" if method == "ModelStreamInfer" else "unary_unary"
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", sizes) as channel:
        stub = getattr(channel, kind)(f"/{proto.SERVICE}/{method}")
        try:
            if kind == "unary_unary":
                stub(message)
            else:
                list(stub(iter([message])))
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def post(port: int, body: Any, headers: dict[str, str], path: str = "/v2/models/linear/infer") -> tuple[int, str]:
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        made.request("POST", path, body, headers)
        answer = made.getresponse()
        return answer.status, answer.read().decode()
    finally:
        made.close()


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Turns Python's garbage collector off, so that memory in reference cycles stays."""
    gc.collect()
    gc.disable()
    tracemalloc.start(1)
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("fault", ["shape", "name", "run", "none"])
def test_no_request_leaves_a_cycle(repository: Path, start: Start, fault: str) -> None:
    """Fails if the tensors of a request are kept: by a frame that holds an error, a future, or a ticket."""
    folder = repository / "picky" / "1"
    folder.mkdir(parents=True)
    # Only the run finds out whether the sizes of x and b fit together.
    x, b = (FLOAT, ["n", "m"]), (FLOAT, ["k"])
    artifact(folder / "model.onnx", [node("Add", "x b", "y")], {"x": x, "b": b}, {"y": x})
    process = start(repository, http_port=0)
    count, others = MEGABYTE, 3 if fault == "run" else 1
    if fault in ("run", "none"):
        made = request(count, model="picky")
        made.inputs.add(name="b", datatype="FP32", shape=[others])
        made.raw_input_contents.append(bytes(4 * others))
    else:
        made = request(count, name="z" if fault == "name" else "x")
    message = made.SerializeToString()
    rows = [
        {"name": tensor.name, "datatype": "FP32", "shape": list(tensor.shape),
         "parameters": {"binary_data_size": len(raw)}}
        for tensor, raw in zip(made.inputs, made.raw_input_contents, strict=True)
    ]  # fmt: skip
    head = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}}).encode()
    body, headers = head + b"".join(made.raw_input_contents), {BINARY: str(len(head))}
    path = f"/v2/models/{made.model_name}/infer"
    failed = {400, 500} if fault != "none" else {200}

    def ask(way: str) -> None:
        if way == "http":
            assert _status(process.ports["http"], body, headers, path) in failed
        else:
            good = fault == "none" or way == "ModelStreamInfer"
            assert (call(process.ports["grpc"], message, way) is grpc.StatusCode.OK) is good

    for way in ("ModelInfer", "ModelStreamInfer", "http"):
        ask(way)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            ask(way)
        # The server frees a request a moment after the client has the answer.
        until(lambda before=before: tracemalloc.get_traced_memory()[0] - before < 1.5 * 4 * count)


def _status(port: int, body: bytes, headers: dict[str, str], path: str) -> int:
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        made.request("POST", path, body, headers)
        answer = made.getresponse()
        answer.read()
        return answer.status
    finally:
        made.close()


def peak(served: Any, ask: Callable[[], Any]) -> int:
    """Returns how many bytes the server's memory grew at most during ``ask``."""
    folder = Path(f"/proc/{served.process.pid}")

    def read(key: str) -> int:
        [line] = [line for line in (folder / "status").read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1]) * 1024

    (folder / "clear_refs").write_text("5")  # forgets the peak so far
    before = read("VmRSS")
    ask()
    return read("VmHWM") - before


@pytest.fixture
def served(tmp_path: Path, serve: Callable[..., Served]) -> Any:
    linear(tmp_path / "models" / "linear" / "1")
    identity(tmp_path / "models" / "same" / "1", FLOAT, [1, "n"])
    found = serve(str(tmp_path / "models"))
    found.ports = found.wait_for("serving")["ports"]  # type: ignore[attr-defined]
    return found


def test_the_peak_of_a_request(served: Any) -> None:
    """Fails if the server copies a request more often than it has to. An HTTP request takes at most twice its size.
    grpcio itself holds a message three times while it receives the message, and gives the message on as one."""
    port, count = served.ports["http"], 16 * MEGABYTE
    size = 4 * count
    body, headers = binary(count)
    message = request(count).SerializeToString()
    post(port, *binary(4))  # what is made once
    call(served.ports["grpc"], b"")
    assert peak(served, lambda: post(port, body, headers)) < 2 * size
    assert peak(served, lambda: call(served.ports["grpc"], message)) < 3.3 * size

    def again() -> None:
        for _ in range(8):
            call(served.ports["grpc"], message)

    assert peak(served, again) < 5 * size


def test_memory_is_given_back_after_requests(repository: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an idle server keeps the memory of past requests, or searches for free memory although there were no
    requests."""
    given_back: list[int] = []
    monkeypatch.setattr(serving, "give_back_memory", lambda: given_back.append(1))
    process = start(repository)
    process._give_back_memory()
    assert given_back == []
    call(process.ports["grpc"], request(4).SerializeToString())
    for _ in range(2):
        process._give_back_memory()
    assert given_back == [1]


@pytest.mark.http
def test_large_answers(served: Any) -> None:
    """Fails if an answer of many megabytes changes on its way, or takes more memory than the request and the answer
    together need."""
    count = 8 * MEGABYTE
    value = np.arange(count, dtype=np.float32)
    row = {"name": "x", "datatype": "FP32", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    found: list[bytes] = []

    def ask() -> None:
        made = http.client.HTTPConnection("127.0.0.1", served.ports["http"], timeout=60)
        made.request("POST", "/v2/models/same/infer", head + value.tobytes(), {BINARY: str(len(head))})
        answer = made.getresponse()
        assert answer.status == 200
        found.append(answer.read()[int(answer.headers[BINARY]) :])
        made.close()

    ask()
    # The request, its aligned copy and the output are in memory at once.
    assert peak(served, ask) < 3.5 * 4 * count
    assert found[0] == found[1] == value.tobytes()


def _gigabyte(wbits: int) -> bytes:
    """Packs a gigabyte of zeros: one packed megabyte that is repeated, because a full flush makes it independent of the
    bytes before it. The checksum at the end is missing."""
    pack = zlib.compressobj(9, wbits=wbits)
    first = pack.compress(bytes(MEGABYTE)) + pack.flush(zlib.Z_FULL_FLUSH)
    again = pack.compress(bytes(MEGABYTE)) + pack.flush(zlib.Z_FULL_FLUSH)
    return first + again * 1023


@pytest.mark.http
def test_a_small_body_that_is_large_unpacked(served: Any) -> None:
    """Fails if a megabyte that unpacks to a gigabyte is unpacked, or gets another answer than 413."""
    for encoding, wbits in (("gzip", 31), ("deflate", 15)):
        body = _gigabyte(wbits)
        assert len(body) < 1.1 * MEGABYTE
        found: list[Any] = []
        headers = {"Content-Encoding": encoding}
        taken = peak(
            served, lambda body=body, h=headers, found=found: found.append(post(served.ports["http"], body, h))
        )
        assert taken < 150 * MEGABYTE
        [(status, text)] = found
        assert (status, "times larger unpacked" in text) == (413, True), text


def _raw_deflate(body: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(body) + pack.flush()


@pytest.mark.http
@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", _raw_deflate)]
)
def test_compressed_requests(repository: Path, start: Start, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    """Fails if a compressed request of a usual client isn't understood."""
    process = start(repository, http_port=0)
    body, headers = binary(4)
    status, text = post(process.ports["http"], pack(body), headers | {"Content-Encoding": encoding})
    assert (status, json.loads(text)["outputs"][0]["shape"]) == (200, [1, 3]), text


# Without mtime, the bytes would hold the time, and two pytest workers would collect different tests.
_EMPTY = gzip.compress(b"{}", mtime=0)


@pytest.mark.http
@pytest.mark.parametrize(
    ("encoding", "body", "says"),
    [
        ("br", b"anything", "Content-Encoding 'br' is not supported"),
        ("gzip", b"not gzip at all", "broken"),
        ("gzip", _EMPTY[:-4], "incomplete"),
        ("gzip", _EMPTY + b"more", "bytes follow"),
        ("gzip", b"", "list of objects"),
        ("deflate", b"\x78\x9c\xff\xff\xff", "broken"),
    ],
)
def test_broken_encodings(repository: Path, start: Start, encoding: str, body: bytes, says: str) -> None:
    """Fails if an encoding that the server can't unpack ends in an internal error or a hanging call."""
    process = start(repository, http_port=0)
    status, text = post(process.ports["http"], body, {"Content-Encoding": encoding})
    assert (status, says in text) == (400, True), text


@pytest.mark.http
@pytest.mark.parametrize("value", ["9" * 5000, "-1", "1e3", "\u0663"])
def test_a_strange_length(repository: Path, start: Start, value: str) -> None:
    """Fails if a length that is no number, or has thousands of digits, ends in an internal error."""
    process = start(repository, http_port=0)
    headers = {BINARY: value.encode("utf-8")}
    status, text = post(process.ports["http"], b"{}", headers)  # type: ignore[arg-type]
    assert (status, "invalid Inference-Header-Content-Length" in text) == (400, True), text


@pytest.mark.http
def test_a_body_of_unknown_length_is_limited(repository: Path, start: Start) -> None:
    """Fails if a body without a Content-Length is received beyond the limit."""
    process = start(repository, http_port=0, max_message=MEGABYTE)
    chunks = (bytes(1 << 16) for _ in range(64))
    status, text = post(process.ports["http"], chunks, {})
    assert (status, "--max-message" in text) == (413, True), text


def test_a_caller_without_a_token_is_refused_on_the_headers(repository: Path, tmp_path: Path, start: Start) -> None:
    """Fails if the server waits for the message of a caller who has no token."""
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "me"\ntoken = "secret"\n')
    process = start(repository, http_port=0, tokens=str(tmp_path / "tokens.toml"))
    release = threading.Event()

    def never() -> Iterator[bytes]:
        release.wait(30)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{process.ports['grpc']}") as channel:
        for method in ("ModelInfer", "ModelMetadata"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.stream_unary(f"/{proto.SERVICE}/{method}")(never(), timeout=20)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        release.set()
    made = http.client.HTTPConnection("127.0.0.1", process.ports["http"], timeout=20)
    made.putrequest("POST", "/v2/models/linear/infer")
    made.putheader("Content-Length", str(256 * MEGABYTE))
    made.endheaders()
    assert made.getresponse().status == 401
    made.close()


@pytest.mark.parametrize("letter", ["x", "é", "\u65e5", "\U0001f600", "\n", "%"])
def test_a_long_name_is_cut_in_the_error(repository: Path, start: Start, letter: str) -> None:
    """Fails if an error repeats a name of a megabyte, which clients refuse as metadata that is too large."""
    process = start(repository)
    made = request(4, name=letter * (MEGABYTE // len(letter.encode())))
    assert call(process.ports["grpc"], made.SerializeToString()) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_limit_follows_the_models(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the default limit is too small for a model, or is two gigabytes although no model needs them."""
    monkeypatch.setattr(message_limit, "LEAST", MEGABYTE)
    linear(tmp_path / "models" / "linear" / "1")
    process = start(tmp_path / "models", http_port=0)
    small = request(MEGABYTE // 2)
    assert call(process.ports["grpc"], small.SerializeToString()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert plain(process, "/v2/models/linear/infer", bytes(2 * MEGABYTE))[0] == 413
    folder = tmp_path / "others" / "large" / "1"
    folder.mkdir(parents=True)
    shape = (FLOAT, [None, 1 << 17])
    artifact(folder / "model.onnx", [node("Identity", "x", "y")], {"x": shape}, {"y": shape})
    (folder / "model.onnx.manifest.json").unlink(missing_ok=True)
    (tmp_path / "others" / "large" / "config.pbtxt").write_text("max_batch_size: 6")
    process = start(tmp_path / "others", http_port=0)
    made = request(1 << 17, model="large")
    made.inputs[0].shape[0] = 6
    made.raw_input_contents[0] = bytes(6 << 19)
    assert call(process.ports["grpc"], made.SerializeToString()) is grpc.StatusCode.OK


def _made(names: list[str], raws: list[bytes], typed: list[float]) -> Any:
    made = proto.message("ModelInferRequest")(model_name="m", id="7")
    for name in names:
        made.inputs.add(name=name, datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend(typed)
    made.parameters["priority"].int64_param = 1
    made.raw_input_contents.extend(raws)
    return made


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=9), max_size=3), st.lists(st.binary(max_size=300), max_size=4), st.integers(0, 3))
def test_tensors_stay_in_the_message(names: list[str], raws: list[bytes], cut: int) -> None:
    """Fails if the server's own reading of a message differs from protobuf's, or takes a message that was cut."""
    made = _made(names, raws, [0.5])
    message = made.SerializeToString()
    split = _split(message)
    assert split is not None
    rest, found = split
    assert [bytes(one) for one in found] == raws
    made.ClearField("raw_input_contents")
    assert _Request.FromString(b"".join(rest)) == made
    assert cut == 0 or _split(message[:-cut]) != split


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=9), st.lists(st.binary(max_size=300), max_size=4))
def test_a_reply_is_written_as_protobuf_writes_it(text: str, values: list[bytes]) -> None:
    """Fails if a reply that is written without protobuf's copies differs from protobuf's."""
    outputs = [
        ReplyTensor(f"y{at}", "UINT8", [len(value)], np.frombuffer(value, np.uint8)) for at, value in enumerate(values)
    ]
    reply = InferReply("m", "1", text, outputs, {"triton_final_response": True})
    written = proto.message("ModelInferResponse").FromString(write_reply(reply).SerializeToString())
    assert written == write_reply(reply).message()
    assert list(written.raw_output_contents) == values


def test_large_and_malformed_messages() -> None:
    """Fails if a large message is parsed wrongly, or a malformed one is taken."""
    made = _made(["a"], [np.arange(1 << 16, dtype=np.float32).tobytes(), b"xyz"], [])
    found = parse_infer(made.SerializeToString())
    assert [bytes(one) for one in found.raws] == list(made.raw_input_contents)
    assert isinstance(found.raws[0], memoryview)
    typed = _made(["a"], [], [1.0] * (1 << 19))
    assert parse_infer(typed.SerializeToString()).message == typed
    for broken in (b"\xff" * (1 << 17), b"\x3a" + b"\xff" * (1 << 17), made.SerializeToString()[:-1]):
        with pytest.raises(DecodeError):
            parse_infer(broken)
