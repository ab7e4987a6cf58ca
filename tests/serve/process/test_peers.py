"""Proves that the processes of a server exchange commands, even if a process doesn't answer."""

from __future__ import annotations

import fcntl
import socket
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from accel.serve.core.control import COMMANDS, Command
from accel.serve.core.server import InferenceServer
from accel.serve.core.transport import Slice
from accel.serve.models.repository import Repository
from accel.serve.process import peers
from accel.serve.protocol.inference import Code, ServeError

KEY = b"k" * 32


def join(folder: Path, index: int) -> InferenceServer:
    """Returns the server that runs as process ``index`` of three."""
    server = InferenceServer(Repository(folder / "models"))
    joined = peers.Peers(server.local, folder, index, 3, KEY)
    joined.listen()
    server.processes = joined
    return server


def leave(server: InferenceServer) -> None:
    assert isinstance(server.processes, peers.Peers)
    server.processes.close()
    server.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[InferenceServer]]:
    """Starts the first two of three processes."""
    (tmp_path / "models").mkdir()
    made = [join(tmp_path, index) for index in range(2)]
    yield made
    for server in made:
        leave(server)


def within_a_minute(call: Any) -> Any:
    """Returns the result of ``call``, or the ServeError that ``call`` raises. Fails if the call takes longer than a
    minute."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except ServeError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("backlog", [0, 8])
def test_a_process_that_says_nothing(two: Any, tmp_path: Path, monkeypatch: Any, backlog: int) -> None:
    """Checks that other processes still receive a command if one process has stopped, and that the error names the
    stopped process."""
    monkeypatch.setattr(peers, "_PATIENCE", 2.0)
    monkeypatch.setattr(peers, "_SILENT_PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "2.sock"))
        stopped.listen(backlog)  # this process accepts connections but never answers
        error = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 3}))
        assert isinstance(error, ServeError)
        assert "process 2: it doesn't answer" in str(error)
        assert "process 1" not in str(error)
        assert two[1].log_settings({})["log_verbose_level"] == 3
        for _ in range(3):
            assert within_a_minute(lambda: two[0].statistics()) == []
    (tmp_path / "2.sock").unlink()
    within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 4}))  # a process that has ended causes no error
    assert two[1].log_settings({})["log_verbose_level"] == 4


def test_commands_of_two_clients(two: Any) -> None:
    """Fails if simultaneous commands to two processes leave the processes in different states."""
    for level in range(1, 200, 2):
        both = threading.Barrier(2)

        def change(index: int, level: int = level, both: Any = both) -> None:
            both.wait(60)
            two[index].log_settings({"log_verbose_level": level + index})

        threads = [threading.Thread(target=change, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert two[0].log_settings({}) == two[1].log_settings({}), "the commands crossed"


def test_a_command_that_does_not_end(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a process that stopped during a command blocks the other processes forever."""
    monkeypatch.setattr(peers, "_TURN_PATIENCE", 0.05)
    with (tmp_path / "turn").open("a") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        error = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 9}))
        assert isinstance(error, ServeError)
        assert "another command to the server has not ended; try again" in str(error)
    within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 9}))
    assert two[1].log_settings({})["log_verbose_level"] == 9


def test_one_that_comes_later_knows_whose_memory_it_is(two: Any, tmp_path: Path) -> None:
    """Checks that a process that starts later knows each registered memory region and the region's owner."""
    key = f"accel-test-{uuid.uuid4().hex[:8]}"
    (Path("/dev/shm") / key).write_bytes(b"12345678")
    try:
        two[0].processes.register_memory("one", "r", key, 2, 4)
        third: Any = join(tmp_path, 2)
        two.append(third)  # the fixture closes this server together with the others
        third.processes.catch_up()
        for server in two:
            assert bytes(server.memory.of("one").read(Slice("r", 4))) == b"3456"
            assert server.memory.of("").status() == server.memory.of("other").status() == []
        third.processes.unregister_memory("other", "")
        assert [len(server.memory.regions()) for server in two] == [1, 1, 1]
        third.processes.unregister_memory("one", "")
        assert [server.memory.regions() for server in two] == [[], [], []]
    finally:
        (Path("/dev/shm") / key).unlink()


def test_strangers(two: Any, tmp_path: Path) -> None:
    """Fails if a connection that never sends the key blocks the processes, or if a process accepts a connection with
    another key."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "1.sock"))
        found = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 5}))
        assert found["log_verbose_level"] == 5
        assert two[1].log_settings({})["log_verbose_level"] == 5
    for key in (b"x" * 32, b""):
        with pytest.raises(AuthenticationError):
            Client(str(tmp_path / "1.sock"), family="AF_UNIX", authkey=key)


def test_commands_are_the_methods_of_control(two: Any) -> None:
    """Fails if a process can make another process execute anything but a command."""
    assert {"load", "unload", "register_memory", "change_log_settings"} <= COMMANDS
    assert all(callable(getattr(two[0].processes, name)) for name in COMMANDS)
    for name in ("statistics", "commands", "__init__", "nothing"):
        with pytest.raises(ServeError, match="unknown command") as failed:
            Command(name, ()).run(two[0].local)
        assert failed.value.code is Code.UNIMPLEMENTED
        with pytest.raises(ServeError, match="unknown command"):
            two[0].processes._run(Command(name, ()))
    (answer,) = two[0].processes._ask("run", Command("statistics", ([],)))
    assert answer == (1, ("error", "UNIMPLEMENTED", "unknown command 'statistics'"))
