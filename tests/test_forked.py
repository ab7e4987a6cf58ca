"""Proves that a process that is forked for a test equals the new interpreter that a user's command starts."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.child import Child
from accel.errors import ChildCrashed
from tests.forked import KINDS, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("child")
    yield made
    made.end()


def facts() -> dict[str, Any]:
    """Returns what a process knows of itself."""
    return {
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "folder": str(Path.cwd()),
        "environment": {name: os.environ.get(name) for name in ("ACCEL_MARK", "HOME", "TMPDIR", "PYTHONPATH")},
        "cores": sorted(os.sched_getaffinity(0)),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "path": sys.path,
        "arguments": sys.argv[3:],
        "name": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "torch": sys.modules.get("torch", "not imported"),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[2:4],
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "open": sorted(int(file.name) for file in Path("/proc/self/fd").iterdir() if int(file.name) < 3),
    }


def found(server: Server | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], bool]:
    """Returns the ``facts`` of a child, without its own temporary folder, and whether the child was forked."""
    from contextlib import nullcontext

    monkeypatch.setenv("ACCEL_MARK", "1")
    with server.installed() if server else nullcontext(), Child(folder=folder, hidden=("torch",)) as child:
        made: dict[str, Any] = child.call("tests.test_forked:facts")
        assert made["environment"].pop("TMPDIR").startswith("/")
        return made, child.call("tests.test_forked:was_forked")


def was_forked() -> bool:
    return set(KINDS["child"].imported) <= set(sys.modules)


@pytest.mark.usefixtures("fresh_interpreters")
def test_the_simplifier_has_imported_onnxsim() -> None:
    """Fails if a forked child that simplifies has to import onnxsim, or has a module that it hides."""
    from accel.converters.graph.simplify import _HIDDEN

    server = Server("simplifier")
    with server.installed():
        with Child(hidden=_HIDDEN) as child:
            found = child.call("tests.test_forked:imported")
        with Child(hidden=("torch",)) as child:
            assert not child.call("tests.test_forked:imported")["onnxsim"]
    server.end()
    assert found == {"onnxsim": True, "torch": False, "sympy": False}


def imported() -> dict[str, bool]:
    return {name: sys.modules.get(name) is not None for name in ("onnxsim", "torch", "sympy")}


@pytest.mark.usefixtures("fresh_interpreters")
def test_it_equals_a_new_interpreter(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a forked child has another parent, folder, environment, limit or command than a new interpreter, or
    has imported a module that it hides."""
    new, forked = found(None, tmp_path, monkeypatch), found(server, tmp_path, monkeypatch)
    assert (new[1], forked[1]) == (False, True)
    assert forked[0] == new[0]
    assert new[0]["parent"] == os.getpid()


@pytest.mark.usefixtures("fresh_interpreters")
def test_what_only_a_new_interpreter_does(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a process is forked although a new interpreter would start in another way: with another setting that it
    reads when it starts, or with another module in the place of an imported one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "7")
        assert not found(server, tmp_path, monkeypatch)[1]
    (tmp_path / "onnx.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with server.installed(), Child() as child:
        assert child.call("onnx:__file__.__str__") == str(tmp_path / "onnx.py")


@pytest.mark.usefixtures("fresh_interpreters")
def test_its_crash_is_the_caller_s_to_see(server: Server) -> None:
    """Fails if the caller doesn't learn how a forked child died, or the server dies with it."""
    with server.installed():
        for _ in range(2):
            with pytest.raises(ChildCrashed, match="SIGABRT"), Child() as child:
                child.call("os:abort")
