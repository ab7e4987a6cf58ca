"""Tests where the library of the native transport comes from, and that ``--transport auto`` takes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.kernels.native.compilers import Compilers
from accel.serve.transports.grpc.choice import AUTO, CYGRPC, NATIVE, chosen
from accel.serve.transports.native import build
from tests.support.serving import WEIGHTS, Served, ask, client


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the compiled library, which is not in the cache of the test."""
    if reason := build.why_not():
        pytest.skip(reason)
    found = build.build()
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCEL_PORT_LIBRARY", raising=False)
    build.port_library.cache_clear()
    yield found
    build.port_library.cache_clear()


def test_auto_takes_the_library_that_is_built(library: Path, repository: Path, tmp_path: Path, cli: Any) -> None:
    """Fails if ``--transport auto`` compiles, if it doesn't take a library that is there, if it takes a damaged one, or
    if `accel doctor` says otherwise."""

    def doctor() -> dict[str, str]:
        found: dict[str, str] = json.loads(cli("doctor", "--json").stdout)["serve"]
        return found

    assert chosen(AUTO) == CYGRPC
    assert doctor() == {"transport": CYGRPC, "why_not": build.NOT_BUILT, "native_why_not": ""}
    built = tmp_path / "cache" / "native" / library.parent.name / library.name
    built.parent.mkdir(parents=True)
    built.write_bytes(b"nothing")
    assert chosen(AUTO) == CYGRPC
    assert "remove the file" in doctor()["why_not"]
    built.unlink()
    shutil.copy(library, built)
    assert doctor() == {"transport": NATIVE, "why_not": "", "native_why_not": ""}
    assert "gRPC calls with --transport native" in cli("doctor").stdout
    served = Served(str(repository), "--grpc-port", "0", "--no-http")
    assert served.wait_for("gRPC calls are answered")["transport"] == NATIVE
    with client(served.wait_for("serving")["ports"]["grpc"]) as made:
        np.testing.assert_allclose(ask(made), [WEIGHTS.sum(0)], rtol=1e-5)
    assert served.end() == 0
    served.wait_for("end of log")
    for pipe in (served.process.stdout, served.process.stderr):
        assert pipe is not None
        pipe.close()


def test_a_library_is_used_without_a_compiler(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a library that was compiled elsewhere, as in the builder of an image, needs a compiler to be used."""
    monkeypatch.setenv("ACCEL_PORT_LIBRARY", str(library))
    monkeypatch.setenv("PATH", str(tmp_path))
    build.why_not.cache_clear()
    try:
        assert build.why_not()
        assert (chosen(NATIVE), chosen(AUTO)) == (NATIVE, NATIVE)
    finally:
        build.why_not.cache_clear()


def test_two_builds_at_once(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a build fails because another process has finished the same build meanwhile, as processes of one server
    do."""

    def run(self: Compilers, words: list[str]) -> str:
        made = Path(words[words.index("-o") + 1])
        shutil.copy(library, made)
        shutil.copytree(made.parent, tmp_path / "folder" / library.parent.name)  # the other process
        return ""

    monkeypatch.setattr(Compilers, "run", run)
    found = build.build(folder=tmp_path / "folder")
    assert found.read_bytes() == library.read_bytes()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [library.parent.name]
