"""The other processes of the same server: what one is told, all do, and statistics are summed over them.

Clients reach one process of several by chance. So each listens on a socket in a private folder, and the one that got a
command hands it on. A process that was started again asks one of the others what it missed.
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
from collections.abc import Iterator, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError
from accel.serve.inference import Code, DurationStatistic, Histogram, ModelStatistics, ServeError
from accel.serve.model import ServedModel

if TYPE_CHECKING:
    from accel.serve.server import InferenceServer

log = logging.getLogger("accel.serve")

# Seconds that a process has to answer the others; to load a model takes longer. Of one that was silent once less is
# expected until it answers again, so that nothing that needs them all waits long each time.
_PATIENCE, _LOAD_PATIENCE, _SILENT_PATIENCE = 15.0, 600.0, 1.0
_TURN_PATIENCE = 60.0

Row = tuple[str, str, ModelStatistics]


def add_statistics(total: ModelStatistics, other: ModelStatistics) -> None:
    """Add ``other`` to ``total``."""
    for field in fields(ModelStatistics):
        mine, theirs = getattr(total, field.name), getattr(other, field.name)
        if isinstance(mine, DurationStatistic):
            mine.add(theirs.ns, theirs.count)
        elif isinstance(mine, Histogram):
            mine.merge(theirs)
        elif field.name == "batches":
            for size, durations in theirs.items():
                known = mine.setdefault(size, tuple(DurationStatistic() for _ in durations))
                for one, more in zip(known, durations, strict=True):
                    one.add(more.ns, more.count)
        elif field.name == "last_inference_ms":
            setattr(total, field.name, max(mine, theirs))
        else:
            setattr(total, field.name, mine + theirs)


class Peers:
    """This process among the ``count`` of its server; alone until ``join``."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._folder: Path | None = None
        self._index, self._count, self._key = 0, 1, b""
        self._listener: Listener | None = None
        self._silent: set[int] = set()
        # What was commanded so far, for a process that comes later: overridden configs by model.
        self._overrides: dict[str, str] = {}

    def join(self, folder: Path, index: int, count: int, key: bytes) -> None:
        """Listen for the others. ``folder`` is one that only this user can enter."""
        self._folder, self._index, self._count, self._key = folder, index, count, key
        path = folder / f"{index}.sock"
        path.unlink(missing_ok=True)
        self._listener = Listener(str(path), family="AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, name="accel-peers", daemon=True).start()

    def everywhere(self, what: str, *arguments: Any) -> None:
        """Run a control command here, then in every other process. ``INTERNAL`` names one that failed alone."""
        with self._turn(_LOAD_PATIENCE if what in ("load", "unload") else _TURN_PATIENCE):
            self._apply(what, arguments)
            failed = [
                f"process {index}: {answer[2]}"
                for index, answer in self._ask("apply", what, arguments)
                if answer[0] == "error"
            ]
        if failed:
            raise ServeError(Code.INTERNAL, f"{what} worked in one process and not in another: {'; '.join(failed)}")

    @contextlib.contextmanager
    def _turn(self, patience: float) -> Iterator[None]:
        """One command of the whole server at a time: two that crossed would leave the processes in different states.
        ``UNAVAILABLE`` after ``patience`` seconds. The system ends the turn of a process that dies."""
        if self._folder is None:
            yield
            return
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

    def _apply(self, what: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._server.apply(what, arguments)
        except ServeError:
            raise
        except AccelError as error:
            raise ServeError(Code.INVALID_ARGUMENT, str(error)) from None
        if what in ("load", "unload"):
            self._overrides.pop(arguments[0], None)
        if what == "load" and arguments[1] is not None:
            self._overrides[arguments[0]] = arguments[1]

    def statistics(self, models: Sequence[ServedModel]) -> list[Row]:
        """The statistics of these models, every process's added up."""
        rows = {(m.name, m.version): m.statistics() for m in models}
        for _, answer in self._ask("statistics", list(rows)):
            if answer[0] == "done":
                for name, version, statistics in answer[1]:
                    add_statistics(rows[name, version], statistics)
        return [(name, version, statistics) for (name, version), statistics in rows.items()]

    def catch_up(self) -> None:
        """Do what the others were told before this process was there."""
        with self._turn(_LOAD_PATIENCE):  # what they know must not change meanwhile
            for _, answer in self._ask("state"):
                if answer[0] != "done":
                    continue
                for what, arguments in answer[1]:
                    try:
                        self._apply(what, arguments)
                    except ServeError as error:
                        log.error("could not catch up", extra={"command": what, "reason": str(error)})
                return

    def _state(self) -> list[tuple[str, tuple[Any, ...]]]:
        server = self._server
        commands: list[tuple[str, tuple[Any, ...]]] = []
        if server.repository.mode == "explicit":
            loaded = server.repository.loaded()
            commands += [("load", (name, self._overrides.get(name))) for name in loaded]
            commands.append(("unload_others", (loaded,)))
        commands += server.memory.commands()
        commands += [("trace_settings", change) for change in server.trace.changed().items()]
        logging_changes = {k: v for k, v in server.logging.all().items() if k != "log_file"}
        return [*commands, ("log_settings", (logging_changes,))]

    def _ask(self, *request: Any) -> Iterator[tuple[int, Any]]:
        """What each of the others answers. One that isn't there (it is being started again) is left out; one that is
        there and says nothing answers with an error."""
        for index in range(self._count):
            if index == self._index or self._folder is None:
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
        assert self._folder is not None
        with _connect(str(self._folder / f"{index}.sock"), self._key, patience) as connection:
            connection.send(request)
            if not connection.poll(_LOAD_PATIENCE if request[:2] == ("apply", "load") else patience):
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
            except Exception:  # a stranger without the key, or one that says nothing
                log.warning("a connection between processes was refused")
                return
            kind, *arguments = connection.recv()
            try:
                connection.send(("done", self._do(kind, arguments)))
            except ServeError as error:
                connection.send(("error", error.code.name, str(error)))
            except Exception as error:
                log.exception("a command between processes failed")
                connection.send(("error", Code.INTERNAL.name, str(error)))

    def _do(self, kind: str, arguments: list[Any]) -> Any:
        if kind == "apply":
            return self._apply(arguments[0], tuple(arguments[1]))
        if kind == "state":
            return self._state()
        wanted = {tuple(row) for row in arguments[0]}
        models = [m for m in self._server.repository.models() if (m.name, m.version) in wanted]
        return [(m.name, m.version, m.statistics()) for m in models]

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _connect(path: str, key: bytes, patience: float) -> Connection:
    """As ``multiprocessing.connection.Client``; ``TimeoutError`` where a step takes more than ``patience`` seconds."""
    with socket.socket(socket.AF_UNIX) as made:
        _limit(made, patience)
        try:
            made.connect(path)
        except BlockingIOError:  # it accepts nobody, and the line before it is full
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
    """Let no single read or write take longer; it raises ``BlockingIOError`` then."""
    given = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, given)
