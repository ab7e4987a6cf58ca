"""Servers over small repositories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serving import Start, linear, two_inputs

from accel.serve.options import ServeOptions
from accel.serve.process import ServingProcess


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(repository, mode=..., ...)`` serves on free ports in this process; ended after the test."""
    with ExitStack() as stack:

        def begin(repository: Path, **options: Any) -> ServingProcess:
            ports: dict[str, Any] = {"grpc_port": 0, "http_port": None, "drain": 5.0, "grpc_threads": 16}
            process = ServingProcess(ServeOptions(repository=str(repository), **{**ports, **options}))
            stack.callback(process.stop)
            process.start()
            return process

        yield begin


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """``linear`` and ``pair``, neither with a config."""
    root = tmp_path / "models"
    linear(root / "linear" / "1")
    two_inputs(root / "pair" / "1")
    return root
