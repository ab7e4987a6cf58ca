"""The processes of one server among each other, where one of them says nothing."""

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

from accel.serve import peers
from accel.serve.inference import ServeError
from accel.serve.repository import Repository
from accel.serve.server import InferenceServer
from accel.serve.transport import Slice

KEY = b"k" * 32


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[InferenceServer]]:
    """The first two of three processes."""
    (tmp_path / "models").mkdir()
    made = [InferenceServer(Repository(tmp_path / "models")) for _ in range(2)]
    for index, server in enumerate(made):
        server.peers.join(tmp_path, index, 3, KEY)
    yield made
    for server in made:
        server.close()


def within_a_minute(call: Any) -> Any:
    """What ``call`` returns or raises; a failure where it hangs."""
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
    """Fails if a stopped process hangs what needs all of them, keeps a command from the others, or isn't named."""
    monkeypatch.setattr(peers, "_PATIENCE", 2.0)
    monkeypatch.setattr(peers, "_SILENT_PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "2.sock"))
        stopped.listen(backlog)  # it is connected to, and never answers
        error = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 3}))
        assert isinstance(error, ServeError)
        assert "process 2: it doesn't answer" in str(error)
        assert "process 1" not in str(error)
        assert two[1].log_settings({})["log_verbose_level"] == 3
        for _ in range(3):
            assert within_a_minute(lambda: two[0].statistics()) == []
    (tmp_path / "2.sock").unlink()
    within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 4}))  # one that is gone is no error
    assert two[1].log_settings({})["log_verbose_level"] == 4


def test_commands_of_two_clients(two: Any) -> None:
    """Fails if two commands that come at once to two processes leave these in different states."""
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
    """Fails if a process that stopped in the middle of a command holds up everybody for ever."""
    monkeypatch.setattr(peers, "_TURN_PATIENCE", 0.05)
    with (tmp_path / "turn").open("a") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        error = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 9}))
        assert isinstance(error, ServeError)
        assert "another command to the server has not ended; try again" in str(error)
    within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 9}))
    assert two[1].log_settings({})["log_verbose_level"] == 9


def test_one_that_comes_later_knows_whose_memory_it_is(two: Any, tmp_path: Path) -> None:
    """Fails if a process that is started again lacks a region that was registered, or gives it to somebody else."""
    key = f"accel-test-{uuid.uuid4().hex[:8]}"
    (Path("/dev/shm") / key).write_bytes(b"12345678")
    try:
        two[0].peers.everywhere("register_memory", "one", "r", key, 2, 4)
        third = InferenceServer(Repository(tmp_path / "models"))
        two.append(third)  # and closed with them
        third.peers.join(tmp_path, 2, 3, KEY)
        third.peers.catch_up()
        for server in two:
            assert bytes(server.memory.of("one").read(Slice("r", 4))) == b"3456"
            assert server.memory.of("").status() == server.memory.of("other").status() == []
        third.peers.everywhere("unregister_memory", "other", "")
        assert [len(server.memory.commands()) for server in two] == [1, 1, 1]
        third.peers.everywhere("unregister_memory", "one", "")
        assert [server.memory.commands() for server in two] == [[], [], []]
    finally:
        (Path("/dev/shm") / key).unlink()


def test_strangers(two: Any, tmp_path: Path) -> None:
    """Fails if a connection that never shows the key keeps the others from talking, or one with another key is
    served."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "1.sock"))
        found = within_a_minute(lambda: two[0].log_settings({"log_verbose_level": 5}))
        assert found["log_verbose_level"] == 5
        assert two[1].log_settings({})["log_verbose_level"] == 5
    for key in (b"x" * 32, b""):
        with pytest.raises(AuthenticationError):
            Client(str(tmp_path / "1.sock"), family="AF_UNIX", authkey=key)
