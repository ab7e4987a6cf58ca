"""Connects the processes of one server. Runs each command in all processes, and sums the statistics of all processes.

The operating system chooses the process that gets a client's connection. Each process listens on a socket in a private
folder. The process that gets a client's command forwards the command to all other processes. A restarted process asks
another process for the commands that came before the restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from ..core.control import Command, Control
from ..core.local_control import LocalControl
from ..models.model import ServedModel
from ..protocol.inference import (
    Code,
    Parameter,
    ServeError,
    StatisticsRow,
)

log = logging.getLogger("accel.serve")

# A process has _PATIENCE seconds to answer another process, or _LOAD_PATIENCE seconds for a load. If the last answer of
# a process was late or missing, the process has only _SILENT_PATIENCE seconds. The short time keeps a stopped process
# from delaying every command.
_PATIENCE, _LOAD_PATIENCE, _SILENT_PATIENCE = 15.0, 600.0, 1.0
# The maximum number of seconds that a command waits for earlier commands to end.
_TURN_PATIENCE = 60.0
_LONG_TURNS = {Control.load.__name__, Control.unload.__name__}


class Peers:
    """Implements ``Processes`` for process ``index`` of the ``count`` processes of a server.

    ``folder`` holds the sockets, and is private to the user of this process. ``key`` is the secret that the processes
    share.
    """

    def __init__(self, local: LocalControl, folder: Path, index: int, count: int, key: bytes) -> None:
        self._local = local
        self._folder, self._index, self._count, self._key = folder, index, count, key
        self._listener: Listener | None = None
        self._silent: set[int] = set()
        self._answers: dict[str, Callable[..., Any]] = {
            "run": self._run_here,
            "commands": local.commands,
            "statistics": self._statistics_here,
            "counts": local.counts,
        }

    def listen(self) -> None:
        """Starts to answer the other processes."""
        path = self._folder / f"{self._index}.sock"
        path.unlink(missing_ok=True)
        self._listener = Listener(str(path), family="AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, name="accel-peers", daemon=True).start()

    def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self._run(Command.of(Control.load, name, config, files))

    def unload(self, name: str, dependents: bool) -> None:
        self._run(Command.of(Control.unload, name, dependents))

    def unload_others(self, kept: Collection[str]) -> None:
        self._run(Command.of(Control.unload_others, kept))

    def register_memory(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        self._run(Command.of(Control.register_memory, owner, name, key, offset, byte_size))

    def unregister_memory(self, owner: str, name: str) -> None:
        self._run(Command.of(Control.unregister_memory, owner, name))

    def register_cuda_memory(self, owner: str, name: str, handle: bytes, device: int, byte_size: int) -> None:
        self._run(Command.of(Control.register_cuda_memory, owner, name, handle, device, byte_size))

    def unregister_cuda_memory(self, owner: str, name: str) -> None:
        self._run(Command.of(Control.unregister_cuda_memory, owner, name))

    def change_trace_settings(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        self._run(Command.of(Control.change_trace_settings, model, changes))

    def change_log_settings(self, changes: Mapping[str, Parameter]) -> None:
        self._run(Command.of(Control.change_log_settings, changes))

    def _run(self, command: Command) -> None:
        """Runs ``command`` in this process, then in every other process. Raises ``ServeError`` INTERNAL if the command
        worked in this process and failed in another process. The error names the failed processes."""
        with self._turn(_LOAD_PATIENCE if command.name in _LONG_TURNS else _TURN_PATIENCE):
            command.run(self._local)
            failed = [
                f"process {index}: {answer[2]}" for index, answer in self._ask("run", command) if answer[0] == "error"
            ]
        if failed:
            raise ServeError(
                Code.INTERNAL,
                f"the command {command.name} succeeded in one process, but failed in: {'; '.join(failed)}",
            )

    @contextlib.contextmanager
    def _turn(self, patience: float) -> Iterator[None]:
        """Holds a lock, so that the whole server runs one command at a time. Interleaved commands would leave the
        processes in different states. If a process dies, the operating system releases its lock. Raises ``ServeError``
        UNAVAILABLE if the lock is not free after ``patience`` seconds."""
        with (self._folder / "turn").open("a") as file:
            end = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise ServeError(
                            Code.UNAVAILABLE, "another command to the server has not ended; try again"
                        ) from None
                    time.sleep(0.005)
            yield

    def statistics(self, models: Sequence[ServedModel]) -> list[StatisticsRow]:
        """Returns the statistics of ``models``, summed over the processes that answer."""
        rows = {(name, version): found for name, version, found in self._local.statistics(models)}
        for _, answer in self._ask("statistics", list(rows)):
            if answer[0] == "done":
                for name, version, statistics in answer[1]:
                    rows[name, version].add(statistics)
        return [(name, version, statistics) for (name, version), statistics in rows.items()]

    def counts(self) -> dict[str, int]:
        """Returns what the transports have counted, summed over the processes that answer."""
        found = Counter(self._local.counts())
        for _, answer in self._ask("counts"):
            if answer[0] == "done":
                found.update(answer[1])
        return dict(found)

    def catch_up(self) -> None:
        """Asks another process for all commands that the server ran before this process started. Runs the commands in
        this process."""
        with self._turn(_LOAD_PATIENCE):  # while the lock is held, no process runs a command
            for _, answer in self._ask("commands"):
                if answer[0] != "done":
                    continue
                for command in answer[1]:
                    try:
                        command.run(self._local)
                    except ServeError as error:
                        log.error("could not catch up", extra={"command": command.name, "reason": str(error)})
                return

    def _ask(self, *request: Any) -> Iterator[tuple[int, Any]]:
        """Sends ``request`` to all other processes, and yields the index and the answer of each process. Skips
        processes that aren't listening, such as a process that the supervisor is restarting. If a listening process
        doesn't answer, yields an error as the answer."""
        for index in range(self._count):
            if index == self._index:
                continue
            try:
                answer = self._ask_one(index, request)
            except (TimeoutError, BlockingIOError):
                self._silent.add(index)
                log.error("a process doesn't answer the others", extra={"index": index, "asked": request[0]})
                yield index, ("error", Code.UNAVAILABLE.name, "it doesn't answer")
                continue
            except (OSError, EOFError):
                continue
            self._silent.discard(index)
            yield index, answer

    def _ask_one(self, index: int, request: tuple[Any, ...]) -> Any:
        patience = _SILENT_PATIENCE if index in self._silent else _PATIENCE
        with _connect(str(self._folder / f"{index}.sock"), self._key, patience) as connection:
            connection.send(request)
            if not connection.poll(_LOAD_PATIENCE if _is_load(request) else patience):
                raise TimeoutError
            return connection.recv()

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while self._listener is not None:
            try:
                connection = listener.accept()
            except (OSError, EOFError):
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            _limit(connection, _PATIENCE)
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            except Exception:  # the connecting program lacks the key or sends nothing
                log.warning("a connection between processes was refused")
                return
            kind, *arguments = connection.recv()
            try:
                connection.send(("done", self._answers[kind](*arguments)))
            except ServeError as error:
                connection.send(("error", error.code.name, str(error)))
            except Exception as error:
                log.exception("a command between processes failed")
                connection.send(("error", Code.INTERNAL.name, str(error)))

    def _run_here(self, command: Command) -> None:
        command.run(self._local)

    def _statistics_here(self, versions: Collection[tuple[str, str]]) -> list[StatisticsRow]:
        return self._local.statistics_of(set(versions))

    def close(self) -> None:
        """Stops answering the other processes."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _is_load(request: tuple[Any, ...]) -> bool:
    """Tells whether ``request`` asks another process to load a model, which may take minutes."""
    return any(isinstance(part, Command) and part.name == Control.load.__name__ for part in request)


def _connect(path: str, key: bytes, patience: float) -> Connection:
    """Connects in the same way as ``multiprocessing.connection.Client``. Raises ``TimeoutError`` if a single read or
    write takes more than ``patience`` seconds."""
    with socket.socket(socket.AF_UNIX) as made:
        _limit(made, patience)
        try:
            made.connect(path)
        except BlockingIOError:  # the process accepts no connection, and its backlog is full
            raise TimeoutError from None
        connection = Connection(made.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BlockingIOError:
        connection.close()
        raise TimeoutError from None
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: Connection | socket.socket, seconds: float) -> None:
    """Sets the timeout of ``connection``. A read or write that exceeds the timeout raises ``BlockingIOError``."""
    given = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, given)
