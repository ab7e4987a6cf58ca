"""Runs one serving process, which loads models, listens and waits for SIGTERM. The process ends after every request is
answered."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import logging.handlers
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from accel.errors import BadRepository, one_line

from ..core.server import InferenceServer
from ..core.transport import Transport
from ..models.entries import UNAVAILABLE
from .first_request import first_request
from .message_limit import message_limit
from .options import ServeOptions
from .peers import Peers
from .renewal import Renewal
from .stop_request import StopRequest

log = logging.getLogger("accel.serve")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LAST_ANSWERS = 5.0  # seconds that clients have to read their answers
_IDLE_SECONDS = 5.0
_MOST_FILES = 1 << 20
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, which has the time, level, message, process and the fields of
    ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "process": record.process,
        }
        body |= {key: value for key, value in vars(record).items() if key not in _KNOWN}
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


class ClientErrors(logging.Filter):
    """Logs a request that isn't HTTP in one line at the level info. Any client can send such requests, so they must not
    fill the log with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
            record.reason = one_line(error)
            return log.isEnabledFor(logging.INFO)
        return True


def start_logging(options: ServeOptions) -> None:
    """Starts to log JSON lines to stderr or to ``options.log_file``. The file is reopened after a log rotation."""
    logging.raiseExceptions = False  # if the disk is full, log lines are lost but requests don't fail
    made: logging.Handler = (
        logging.handlers.WatchedFileHandler(options.log_file, encoding="utf-8")
        if options.log_file
        else logging.StreamHandler()
    )
    made.setFormatter(JsonLines())
    logger = logging.getLogger("accel.serve")
    logger.handlers = [made]
    logger.propagate = False
    logger.setLevel(options.log_level.upper())
    for name in ("aiohttp.server", "asyncio"):  # formats the messages of both loggers as JSON lines
        other = logging.getLogger(name)
        other.handlers, other.propagate, other.filters = [made], False, [ClientErrors()]


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed large tensors. Returning memory to the system takes longer than copying a
    tensor."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def give_back_memory() -> None:
    """Returns freed memory, which glibc keeps for the next request, to the system. Takes some milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def raise_file_limit() -> None:
    """Raises the limit of open files to the highest allowed limit, because every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_transports(options: ServeOptions, server: InferenceServer) -> dict[str, Transport]:
    """Returns a dict of the transports that the options enable. The keys are ``grpc`` and ``http``."""
    found: dict[str, Transport] = {}
    common: dict[str, Any] = {
        "host": options.host,
        "threads": options.grpc_threads,
        "max_message": message_limit(server.repository, options.max_message),
        "tls": options.tls(),
        "shared": options.supervised,
    }
    if options.grpc_port is not None:
        from ..transports.grpc_port import open_grpc

        found["grpc"] = open_grpc(
            server,
            port=options.grpc_port,
            transport=options.transport,
            max_resets=options.max_resets,
            max_connections=options.max_connections,
            **common,
        )
    if options.http_port is not None:
        from ..transports.http.front import HttpTransport

        found["http"] = HttpTransport(server, port=options.http_port, **common)
    return found


class ServingProcess:
    """A server in this process. ``place`` holds the private folder, the index and the key for ``Peers``. If the server
    has only this process, ``place`` is None."""

    def __init__(self, options: ServeOptions, place: tuple[Path, int, bytes] | None = None) -> None:
        self.options = options
        self.server = options.open_server()
        self._peers: Peers | None = None
        if place is not None:
            folder, index, key = place
            self._peers = Peers(self.server.local, folder, index, options.processes, key)
        self.transports = open_transports(options, self.server)
        self.renewal = Renewal(options, self.server, self.transports.values())
        self.ports: dict[str, int] = {}
        self._stop = StopRequest()
        self._given_back_at = 0

    def start(self) -> dict[str, int]:
        """Loads the models and starts to listen. Returns the port of each transport."""
        keep_freed_memory()
        if self._peers is None:
            self._listen()  # opens the ports first, so that an early probe gets the answer that the server isn't ready
            self._load()
            return self.ports
        self._load()
        self._peers.listen()
        self.server.processes = self._peers
        self._peers.catch_up()
        self._listen()  # opens the ports last, so that clients reach only processes that are ready
        return self.ports

    def _load(self) -> None:
        """Loads the models. Raises ``BadRepository`` if a model that the command line names can't be loaded. A broken
        model of a repository leaves the other models serving."""
        self.server.repository.start()
        if self.options.named:
            broken = [row for row in self.server.repository.index() if row.state == UNAVAILABLE]
            if broken:
                raise BadRepository(f"can't serve {broken[0].name}: {broken[0].reason}")

    def first_request(self) -> str:
        """Returns the text that tells users how to send a first request (see ``first_request.py``)."""
        return first_request(self.options, self.ports, sorted(self.server.repository.models(), key=lambda m: m.name))

    def _listen(self) -> None:
        self.ports = {name: transport.start() for name, transport in self.transports.items()}
        self.renewal.start()

    def _give_back_memory(self) -> None:
        """Returns the memory of past requests to the system, if there were requests and none is under way."""
        answered = self.server.answered
        if answered != self._given_back_at and not self.server.under_way:
            self._given_back_at = answered
            give_back_memory()

    def stop(self) -> None:
        """Refuses new requests with UNAVAILABLE, waits at most ``options.drain`` seconds for open requests, and
        stops."""
        self.renewal.stop()
        done = self.server.drain(self.options.drain if self.server.taking else 0.0)
        if not done:
            log.warning("stopped before every request was answered", extra={"requests": self.server.under_way})
        for transport in self.transports.values():
            transport.stop(_LAST_ANSWERS if done else 1.0)
        if self._peers is not None:
            self._peers.close()
        self.server.close(1.0)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Starts the server, calls ``ready`` with the text of ``first_request``, waits for SIGTERM or SIGINT, and
        answers the open requests. The caller has to end the process then. A second signal ends the process at once.
        """

        def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if self._stop.made:
                os._exit(128 + number)
            self._stop.make()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, asked)
        with contextlib.suppress(OSError, ValueError):  # ``faulthandler.enable`` fails if the process has no stderr.
            faulthandler.enable(all_threads=False)  # If native code crashes, Python prints the stack.
        raise_file_limit()
        self.start()
        log.info("serving", extra={"ports": self.ports, "models": sorted(self.server.repository.loaded())})
        if ready is not None:
            ready(self.first_request())
        while not self._stop.wait(_IDLE_SECONDS):
            self._give_back_memory()
        self._end()

    def _end(self) -> None:
        """Ends the service so that no request is lost. First only the probes say that the server ends. Then new
        requests get UNAVAILABLE, and the open requests are answered. The caller has to end the process afterwards."""
        log.info("stopping", extra={"requests": self.server.under_way})
        self.server.leave()
        time.sleep(self.options.drain_delay)
        self.renewal.stop()
        done = self.server.drain(self.options.drain)
        if not done:
            log.warning("stopped before every request was answered", extra={"requests": self.server.under_way})
        for transport in self.transports.values():
            transport.finish(_LAST_ANSWERS if done else 1.0)
        if self._peers is not None:
            self._peers.close()
        self.server.close(1.0)
        log.info("stopped")


def end(code: int = 0) -> NoReturn:
    """Ends this process at once, without the Python interpreter's shutdown. The shutdown would wait for the threads of
    sessions, and a session may hang forever. A native library that crashes during the shutdown would change the exit
    code."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Runs one of several serving processes. Reads the options and the process's index, folder and key from stdin, and
    writes ``ready`` and the text for users, as JSON, to stdout."""
    from accel.child import die_with_parent
    from accel.errors import AccelError

    given = json.loads(sys.stdin.readline())
    die_with_parent(given["parent"])
    options = ServeOptions.from_text(given["options"])
    start_logging(options)
    try:
        place = (Path(given["folder"]), int(given["index"]), bytes.fromhex(given["key"]))
        process = ServingProcess(options, place)
        process.run(ready=lambda text: print(f"ready {json.dumps(text)}", flush=True))
    except AccelError as error:
        log.error("could not start", extra={"reason": str(error)})
        print(f"error {error}", flush=True)
        end(error.exit_code)
    end()


if __name__ == "__main__":
    main()
