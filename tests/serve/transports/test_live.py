"""Proves that the live page gets correct data and shows the data in a real browser."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from accel.serve.protocol.inference import LATENCIES_NS
from accel.serve.transports.http import live
from tests.support.browser import browser, document, screenshot
from tests.support.serving import Start, plain

BOUNDS = [ns / 1e9 for ns in LATENCIES_NS]
TOKENS = f"""
[[token]]
name = "reader"
sha256 = "{hashlib.sha256(b"r-secret").hexdigest()}"
models = ["lin*"]
"""


def ask(process: Any, rows: int = 2, times: int = 1, **headers: str) -> None:
    """Sends some successful requests and a failing request to ``linear``."""
    given = triton.InferInput("x", [rows, 4], "FP32")
    given.set_data_from_numpy(np.ones((rows, 4), np.float32))
    with triton.InferenceServerClient(f"127.0.0.1:{process.ports['http']}") as client:
        for _ in range(times):
            client.infer("linear", [given], headers=headers)


def figures(process: Any, **headers: str) -> dict[str, Any]:
    status, text = plain(process, "/live.json", **headers)
    assert status == 200, text
    body: dict[str, Any] = json.loads(text)
    return body


def test_what_it_draws(repository: Path, start: Start) -> None:
    """Checks that no model is missing, that a broken model has a reason, and that the numbers match the statistics."""
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    process = start(repository, http_port=0)
    ask(process, times=3)
    body = figures(process)
    assert body["ready"] is True
    rows = {row["name"]: row for row in body["models"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "linear": "READY", "pair": "READY", "broken": "UNAVAILABLE",
    }  # fmt: skip
    assert rows["broken"]["reason"]
    assert rows["broken"]["statistics"] is None
    found = rows["linear"]["statistics"]
    assert (found["received"], found["success"], found["fail"], found["queue_depth"]) == (3, 3, 0, 0)
    assert found["inference_count"] == 6
    assert sum(found["latency"]) == 3
    assert len(found["latency"]) == len(body["latency_bounds"]) + 1


def test_without_a_token_it_says_nothing(repository: Path, start: Start, tmp_path: Path) -> None:
    """Fails if the page or its data contains the name of a model that the caller's token doesn't allow. A caller
    without a token must see no name. Also fails if the page may load content from another host."""
    (tmp_path / "tokens.toml").write_text(TOKENS)
    process = start(repository, http_port=0, tokens=str(tmp_path / "tokens.toml"))
    status, text = plain(process, "/")
    assert status == 200
    assert b"linear" not in text
    assert not re.findall(rb"(?:src|href|url)\s*[=(]", text)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        status, text = plain(process, "/live.json", **headers)
        assert status == 401
        assert b"linear" not in text
    body = figures(process, Authorization="Bearer r-secret")
    assert [row["name"] for row in body["models"]] == ["linear"]
    policy = live.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@contextmanager
def feeding(*bodies: Any) -> Iterator[str]:
    """Serves the page and answers the page's requests with the given bodies in order, repeating the last body. Yields
    the address."""
    left = list(bodies)

    class Feed(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                kind, text = "text/html; charset=utf-8", live.page()
            else:
                kind, text = "application/json", json.dumps(left.pop(0) if len(left) > 1 else left[0])
            self.send_response(200 if self.path in ("/", "/live.json") else 404)
            for name, value in {**live.HEADERS, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Feed)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def body(time: float, name: str = "minilm", **changes: Any) -> dict[str, Any]:
    counts = [0] * (len(BOUNDS) + 1)
    for bound, count in changes.pop("latency", {}).items():
        counts[BOUNDS.index(bound)] = count
    statistics = dict.fromkeys(("received", "success", "fail", "inference_count", "execution_count", "queue_depth"), 0)
    row = {
        "name": name,
        "version": "1",
        "state": "READY",
        "reason": "",
        "statistics": {**statistics, "latency": counts, **changes},
    }
    return {
        "name": "accel",
        "version": "1.2",
        "ready": True,
        "time": time,
        "latency_bounds": BOUNDS,
        "models": [row],
    }


def shown(text: str, model: str) -> dict[str, str]:
    """Returns the numbers on a model's card as a dict by name."""
    card = text.partition(f'data-model="{model}"')[2].partition("</article>")[0]
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", card))


@browser
def test_load_and_percentiles_in_a_browser(tmp_path: Path) -> None:
    """Checks that a rate is the number of requests over time, that a percentile is inside its bucket, and that the
    histogram has bars. Also fails if a malicious model name becomes markup in the page."""
    hostile = "<img src=x onerror=alert(1)>"
    first = body(1000.0, received=100, success=100, latency={0.001: 100}, inference_count=100, execution_count=100)
    second = body(
        1004.0, received=510, success=490, fail=10, queue_depth=7, inference_count=1000, execution_count=250,
        latency={0.001: 100, 0.0025: 351, 0.1: 39},
    )  # fmt: skip
    for one in (first, second):
        one["models"].append(
            {"name": hostile, "version": "", "state": "UNAVAILABLE", "reason": hostile, "statistics": None}
        )
    with feeding(first, second) as address:
        text = document(tmp_path, address, 1500)
    found = shown(text, "minilm/1")
    assert found["requests/s"] == "100"  # 400 answers in 4 seconds
    assert (found["in the queue"], found["answered"], found["failed"], found["mean batch"]) == ("7", "490", "10", "4")
    # Of the 390 new requests, 351 took 1 to 2.5 ms and 39 took 50 to 100 ms. By interpolation between 50 and 100 ms,
    # the 99th percentile is 50 + 50 * (0.99 * 390 - 351) / 39 = 95 ms.
    assert found["p50"] == "1.8 ms"
    assert found["p90"] == "2.5 ms"
    assert found["p99"] == "95 ms"
    assert text.count('class="bar"') > 2
    assert 'id="rate">100<' in text
    assert "<img" not in text
    assert "&lt;img src=x" in text


@browser
def test_the_page_of_a_server(repository: Path, start: Start, tmp_path: Path) -> None:
    """Checks that the page shows a real server's models, and asks for a required token. Also fails if the page puts the
    token in the address, or if the page ignores the browser's color scheme."""
    from PIL import Image

    process = start(repository, http_port=0)
    ask(process, times=5)
    address = f"http://127.0.0.1:{process.ports['http']}/"
    text = document(tmp_path, address)
    assert shown(text, "linear/1")["answered"] == "5"
    assert shown(text, "pair/1")["answered"] == "0"
    assert 'class="state good">READY<' in text
    assert re.search(r'<form id="login" hidden', text)
    lightness = []
    for scheme in ("0", "1"):  # dark, light
        shot = screenshot(
            tmp_path, address, "--virtual-time-budget=2000", f"--blink-settings=preferredColorScheme={scheme}"
        )
        with Image.open(shot) as picture:
            lightness.append(picture.convert("L").getpixel((600, 690)))
            assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
    dark, light = lightness
    assert dark < 60
    assert light > 200

    (tmp_path / "tokens.toml").write_text(TOKENS)
    guarded = start(repository, http_port=0, tokens=str(tmp_path / "tokens.toml"))
    address = f"http://127.0.0.1:{guarded.ports['http']}/"
    text = document(tmp_path, address)
    assert re.search(r'<form id="login">', text)
    assert "data-model" not in text
    text = document(tmp_path, f"{address}#token=r-secret")
    assert shown(text, "linear/1")["answered"] == "0"
    assert 'data-model="pair' not in text
    with pytest.raises(InferenceServerException, match="token"):
        ask(guarded)
