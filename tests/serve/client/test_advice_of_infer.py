"""Proves that ``accel infer`` names its own options in its errors, and shows its progress."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from accel.progress import PlainLines, watched_by
from accel.serve.client.grpc import Inference, InferenceClient
from accel.serve.protocol import messages as proto
from accel.serve.protocol.inference import ServeError
from accel.serve.security.access import Access, Permission


def refuse(_: Any, context: grpc.ServicerContext) -> None:
    """Answers every call with the error of a server that needs a token."""
    try:
        Access((Permission("web", "0" * 64),)).check(None)
    except ServeError as error:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


def test_a_call_without_a_token_is_told_where_the_token_goes(cli: Any, tmp_path: Path) -> None:
    """Checks that the error of ``accel infer`` for a missing token names ``--token`` and ACCEL_TOKEN. Also checks that
    the error in Python names the argument ``token`` and not the command's option."""
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 2), np.float32))
    server = grpc.server(ThreadPoolExecutor(1))
    methods = {"ModelMetadata": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto.SERVICE, methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        ran = cli("infer", "m", "--input", tmp_path / "x.npz", "--url", address, "-q")
        with InferenceClient(address) as client, pytest.raises(ServeError, match=r"valid token; pass token=$"):
            client.call("ModelMetadata", name="m")
    finally:
        server.stop(None)
    assert ran.code == 1
    assert ran.stderr == "accel: error: the server needs a valid token; pass --token or set ACCEL_TOKEN\n"


def test_the_progress_of_a_log_seems_finished(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Checks that the log shows the number of samples, and doesn't end with an unfinished count such as "0 of 5
    samples". Also checks that the progress bar ends at 100%."""
    seen: list[float | None] = []
    log = PlainLines()

    def sink(message: str, fraction: float | None) -> None:
        seen.append(fraction)
        log(message, fraction)

    answer = Inference(model="m", version="1", outputs={"y": np.zeros((2, 1))}, datatypes={"y": "FP64"}, requests=1)
    monkeypatch.setattr(InferenceClient, "_infer", lambda *_: answer)
    described = SimpleNamespace(name="m", inputs=[SimpleNamespace(name="x", datatype="FP32")])
    monkeypatch.setattr(InferenceClient, "_describe", lambda *_: (described, SimpleNamespace(max_batch_size=2)))
    with InferenceClient("127.0.0.1:1") as client, watched_by(sink):
        assert client.infer_many("m", {"x": np.zeros((5, 1), np.float32)}).requests == 3
    assert capsys.readouterr().err == "accel: m: sending 5 samples\n"
    assert seen == [0.0, 0.4, 0.8, 1.0]
