"""Proves that a rolling update behind a load balancer loses no request, and that the death of a server loses only what
a retry saves.

HAProxy balances the requests of gRPC clients over three servers, as a service with several machines would, and asks
each server for ``/v2/health/ready``. ``docs/how-to/several-machines.md`` shows the same settings.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support import ROOT
from tests.support.serving import WEIGHTS, Asking, Served, ask, client, linear

pytestmark = [
    pytest.mark.proof(seconds=20),
    pytest.mark.skipif(not shutil.which("haproxy") and not os.environ.get("CI"), reason="HAProxy is not installed"),
]

SERVERS, CLIENTS, TRIES = 3, 4, 5
# tests/serve/process/test_drain.py proves the drain on every transport.
TRANSPORTS = ("cygrpc", "native")


class Fleet:
    """Servers that can be replaced, each on the ports that its predecessor had."""

    def __init__(self, serve: Any, models: Path) -> None:
        self._begin = lambda **options: serve(str(models), "--drain-delay", "2", *options.pop("words", ()), **options)
        self.servers: list[Served] = [self._begin() for _ in range(SERVERS)]
        self.ports = [served.wait_for("serving")["ports"] for served in self.servers]

    def again(self, number: int) -> None:
        """Starts a new server in place of one that has ended, and waits until it is ready."""
        ports = self.ports[number]
        words = ("--grpc-port", str(ports["grpc"]), "--http-port", str(ports["http"]))
        self.servers[number] = self._begin(words=words, free=False)
        self.servers[number].wait_for("serving")


class Requests(Asking):
    """Clients that ask through the balancer. A client repeats a request that got UNAVAILABLE, as gRPC's retry policy
    does, at most ``TRIES`` times."""

    def __init__(self, port: int) -> None:
        self.repeated: list[str] = []
        self.lost: list[str] = []
        super().__init__(port, CLIENTS)

    def ask(self, made: Any) -> bool:
        for attempt in range(TRIES):
            try:
                np.testing.assert_allclose(ask(made, client_timeout=30), [WEIGHTS.sum(0)], rtol=1e-5)
                return True
            except InferenceServerException as error:
                if error.status() != "StatusCode.UNAVAILABLE" or attempt == TRIES - 1:
                    self.lost.append(str(error))
                    return False
                self.repeated.append(str(error))
                time.sleep(0.1 * 2**attempt)
        raise AssertionError


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def settings(port: int, ports: list[dict[str, int]]) -> str:
    """Returns the settings of the page, with the ports of the test."""
    page = (ROOT / "docs/how-to/several-machines.md").read_text()
    found = re.search(r"```text\n(defaults\n.*?)```", page, re.S)
    assert found is not None
    kept = [line for line in found[1].splitlines() if not line.strip().startswith("server ")]
    lines = [
        f"    server s{number} 127.0.0.1:{one['grpc']} check port {one['http']}" for number, one in enumerate(ports)
    ]
    return "\n".join([*kept, *lines, ""]).replace("bind :8001", f"bind 127.0.0.1:{port}")


@pytest.fixture
def fleet(tmp_path: Path, serve: Any) -> Iterator[tuple[Fleet, Requests]]:
    linear(tmp_path / "models/linear/1")
    made = Fleet(serve, tmp_path / "models")
    port = free_port()
    file = tmp_path / "haproxy.cfg"
    file.write_text(settings(port, made.ports))
    with subprocess.Popen(["haproxy", "-db", "-f", str(file)], stderr=subprocess.DEVNULL) as balancer:
        try:
            with client(port) as first:
                deadline = time.monotonic() + 30
                while True:
                    try:
                        ask(first)
                        break
                    except InferenceServerException:
                        assert balancer.poll() is None
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
            requests = Requests(port)
            try:
                yield made, requests
            finally:
                requests.end()
        finally:
            balancer.terminate()


def test_a_rolling_update(fleet: tuple[Fleet, Requests]) -> None:
    """Fails if a request gets an error or a wrong answer while each server in turn ends and is replaced."""
    made, requests = fleet
    requests.more(50)
    for number in range(SERVERS):
        assert made.servers[number].end() == 0
        requests.more(50)
        made.again(number)
        requests.more(50)
    requests.end()
    assert requests.lost == []
    assert requests.repeated == []


def test_a_server_dies(fleet: tuple[Fleet, Requests]) -> None:
    """Fails if the death of a server costs a request that a retry would have saved, or more than what the server was
    running."""
    made, requests = fleet
    requests.more(50)
    for number in range(SERVERS):
        made.servers[number].process.kill()
        made.servers[number].process.wait()
        requests.more(50)
        made.again(number)
        requests.more(50)
    requests.end()
    assert requests.lost == []
