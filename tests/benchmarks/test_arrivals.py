"""Tests the client of the benchmarks that sends calls at random times."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from accel.serve.transports.native import build

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_h2load.py"
OPENED, MESSAGE = 1, 2


@pytest.mark.parametrize("ends", [False, True])
def test_a_wait_counts_for_each_call_that_was_due(script: ModuleType, tmp_path: Path, ends: bool) -> None:
    """Fails if a server that stops for a while seems fast, because the client sends less or counts the time only from
    the sending, or if calls without an answer pass."""
    if reason := build.why_not():
        pytest.skip(reason)
    body = tmp_path / "body"
    body.write_bytes(b"\0" + (5000).to_bytes(4, "big") + bytes(5000))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    number = listener.getsockname()[1]
    limits = {"message": 1 << 20, "partial": 1 << 21, "headers": 1 << 14, "streams": 1000, "resets": 0.0}
    port = build.port_library().Port((listener.detach(),), per_address=0, **limits)
    over, came = threading.Event(), list[None]()

    def serve() -> None:
        while not over.is_set():
            for call in port.poll(0.02):
                news = call.news()
                if news & OPENED:
                    call.accept()
                if news & MESSAGE and call.take() is not None:
                    came.append(None)
                    call.finish(0, b"", (b"answer",))
                if len(came) == 100 and ends:
                    port.close()
                elif len(came) == 100:
                    time.sleep(0.3)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        if ends:
            with pytest.raises(subprocess.CalledProcessError):
                script.arrivals(number, body, 4, 4.0, 400.0)
            return
        found = script.arrivals(number, body, 4, 4.0, 400.0)
    finally:
        over.set()
        thread.join()
        port.close()
    assert found["rate"] * 4 == len(came) > 1200
    assert found["p99"] > 100
