"""Proves, with moto's server and the client library for Amazon's S3, that a repository on S3 is served."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.serving import WEIGHTS, Served, ask, client, linear

STORE = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def put(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes], None]]:
    """Starts an S3 store in a separate process, and sets the environment variables to the store's address. Returns
    ``put(path, body)``, which writes to the store. ``path`` is ``bucket`` or ``bucket/key``."""
    for needed in ("moto", "s3fs"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not in [dev]; run: make remote")
    store = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert store.stdin is not None
    assert store.stdout is not None
    with store:
        address = store.stdout.readline().strip()
        assert address.startswith("http://")
        settings = {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)

        def send(path: str, body: bytes) -> None:
            kind = {"Content-Type": "application/octet-stream"}  # moto parses a body without a Content-Type as a form
            request = urllib.request.Request(f"{address}/{path}", data=body, headers=kind, method="PUT")
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.status == 200

        yield send
        store.stdin.close()  # the server process ends when its stdin closes


def check(address: str) -> subprocess.CompletedProcess[str]:
    """Runs ``accel serve --check`` in a separate process, because s3fs keeps connections for the life of a process."""
    words = [sys.executable, "-W", "ignore", "-m", "accel", "serve", address, "--check", "--json"]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_a_repository_on_s3(put: Callable[[str, bytes], None], tmp_path: Path, serve: Callable[..., Served]) -> None:
    """Checks that ``accel serve s3://...`` and ``--check`` find the models of a bucket. Also checks that a new version
    is noticed, and that a missing bucket isn't served as an empty repository."""
    put("models", b"")
    put("models/all/linear/1/model.onnx", linear(tmp_path / "one").read_bytes())
    ran = check("s3://models/all")
    assert ran.returncode == 0, ran.stderr
    assert '"state": "READY"' in ran.stdout
    ran = check("s3://nowhere/all")
    assert ran.returncode == 2
    assert "can't read the repository s3://nowhere/all" in ran.stderr
    served = serve("s3://models/all", "--mode", "poll", "--poll-seconds", "0.2")
    port = served.wait_for("serving")["ports"]["grpc"]
    with client(port) as made:
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)
        put("models/all/linear/2/model.onnx", linear(tmp_path / "two", scale=2.0).read_bytes())
        assert served.wait_for("model loaded", 2)["version"] == "2"
        np.testing.assert_allclose(ask(made), [2 * WEIGHTS.sum(0)], rtol=1e-5)
    assert served.end() == 0
