"""Forks the processes of the training tests from a server that has already imported torch. The module
``tests.forked`` describes the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.forked import Server


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    server = Server("training")
    yield server
    server.end()


@pytest.fixture(scope="module", autouse=True)
def _forked(_server: Server) -> Iterator[None]:
    """Makes the tests of a module fork their processes. Each process computes with one thread, because two workers of
    pytest share two cores."""
    threads = torch.get_num_threads()
    with _server.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
