"""One process that serves: it loads, listens, waits for SIGTERM, and ends when what it took is answered."""

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
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from accel.serve.options import ServeOptions
from accel.serve.renewal import Renewal
from accel.serve.server import InferenceServer
from accel.serve.transport import Transport

log = logging.getLogger("accel.serve")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LAME_DUCK = 1.0
_MOST_FILES = 1 << 20
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, message, process, and whatever the record was given as ``extra``."""

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


def start_logging(options: ServeOptions) -> None:
    """JSON lines to stderr, or to ``log_file`` (opened again when it was moved away)."""
    logging.raiseExceptions = False  # a full disk costs log lines, not requests
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
    for name in ("aiohttp.server", "asyncio"):  # what they say of a connection, a line each, too
        other = logging.getLogger(name)
        other.handlers, other.propagate = [made], False


def keep_freed_memory() -> None:
    """Let glibc keep what large tensors free: giving it back and fetching it again costs more than the copy itself."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def raise_file_limit() -> None:
    """Every connection is an open file: take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_transports(options: ServeOptions, server: InferenceServer) -> dict[str, Transport]:
    """What it listens with, by name."""
    found: dict[str, Transport] = {}
    common: dict[str, Any] = {
        "host": options.host,
        "threads": options.grpc_threads,
        "max_message": options.max_message,
        "tls": options.tls(),
        "shared": options.supervised,
    }
    if options.grpc_port is not None:
        from accel.serve.grpc_front import GrpcTransport

        found["grpc"] = GrpcTransport(server, port=options.grpc_port, **common)
    if options.http_port is not None:
        from accel.serve.http_front import HttpTransport

        found["http"] = HttpTransport(server, port=options.http_port, **common)
    return found


class ServingProcess:
    """``place``: folder, index and key among the processes of one server; None where it is alone."""

    def __init__(self, options: ServeOptions, place: tuple[Path, int, bytes] | None = None) -> None:
        self.options, self._place = options, place
        self.server = options.open_server()
        self.transports = open_transports(options, self.server)
        self.renewal = Renewal(options, self.server, self.transports.values())
        self.ports: dict[str, int] = {}
        self._stop = threading.Event()

    def start(self) -> dict[str, int]:
        """Load and listen; the ports."""
        keep_freed_memory()
        if self._place is None:
            self._listen()  # first, so that a probe that comes early hears that it isn't ready
            self.server.repository.start()
            return self.ports
        folder, index, key = self._place
        self.server.repository.start()
        self.server.peers.join(folder, index, self.options.processes, key)
        self.server.peers.catch_up()
        self._listen()  # last: the others answer until this one is as they are
        return self.ports

    def _listen(self) -> None:
        self.ports = {name: transport.start() for name, transport in self.transports.items()}
        self.renewal.start()

    def stop(self) -> None:
        """Answer what was taken (new requests hear UNAVAILABLE), for at most the options' ``drain`` seconds; end."""
        self.renewal.stop()
        done = self.server.drain(self.options.drain if self.server.taking else 0.0)
        if not done:
            log.warning("stopped before all was answered", extra={"requests": self.server.under_way})
        for transport in self.transports.values():
            transport.stop(5.0 if done else 1.0)  # what is answered still has to reach the wire
        self.server.close(1.0)

    def run(self, ready: Any = None) -> None:
        """Start, call ``ready``, wait for SIGTERM or SIGINT, stop. A second signal ends it at once."""

        def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if self._stop.is_set():
                os._exit(128 + number)
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, asked)
        with contextlib.suppress(OSError, ValueError):  # no stderr to write to
            faulthandler.enable(all_threads=False)  # a native crash says where it was
        raise_file_limit()
        self.start()
        log.info("serving", extra={"ports": self.ports, "models": sorted(self.server.repository.loaded())})
        if ready is not None:
            ready()
        while not self._stop.wait(3600):
            pass
        log.info("stopping", extra={"requests": self.server.under_way})
        if self.server.drain(self.options.drain):
            # Clients hear UNAVAILABLE for a moment and go elsewhere; a closed door would cut off what is on its way.
            time.sleep(_LAME_DUCK)
        self.stop()
        log.info("stopped")


def end(code: int = 0) -> NoReturn:
    """End this process now. The interpreter's own end would wait for threads that a session holds, for ever where it
    hangs, and native libraries that crash while they unload would turn a good end into a bad one."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """A process of several: options and place come on stdin, ``ready`` goes to stdout."""
    from accel.child import die_with_parent
    from accel.errors import AccelError

    given = json.loads(sys.stdin.readline())
    die_with_parent(given["parent"])
    options = ServeOptions.from_text(given["options"])
    start_logging(options)
    try:
        place = (Path(given["folder"]), int(given["index"]), bytes.fromhex(given["key"]))
        process = ServingProcess(options, place)
        process.run(ready=lambda: print("ready", flush=True))
    except AccelError as error:
        log.error("could not start", extra={"reason": str(error)})
        print(f"error {error}", flush=True)
        end(error.exit_code)
    end()


if __name__ == "__main__":
    main()
