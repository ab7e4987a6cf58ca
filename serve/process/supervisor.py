"""Starts one or several serving processes on one port, restarts a process that crashes, and ends all processes
together.

Each process has its own interpreter and its own share of the cores. The operating system spreads the connections over
the processes (SO_REUSEPORT). A crash loses only the requests of the crashed process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from accel.child import import_path
from accel.errors import BadRepository, UnsupportedHere
from accel.machine import available_cores

from .options import ServeOptions
from .stop_request import StopRequest

log = logging.getLogger("accel.serve")

# The supervisor gives up if a process dies _ATTEMPTS times in a row before any process has served.
_ATTEMPTS = 5
_LONGEST_PAUSE = 10.0  # the maximum number of seconds before a dead process is restarted


@dataclass
class _Running:
    """One process. ``advice`` tells users how to send a first request. ``again`` is the value of ``time.monotonic()``
    at which a dead process is restarted. ``again`` is None while the process lives."""

    process: subprocess.Popen[str]
    listener: threading.Thread | None = None
    failures: int = 0
    ready: bool = False
    advice: str = ""
    reason: str = ""
    again: float | None = None


def _bind(held: socket.socket, host: str, port: int) -> None:
    """Binds the socket ``held`` to a port on which no program listens. The bind works even if an earlier server left
    connections in TIME_WAIT on the port."""
    try:
        held.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Try to bind without SO_REUSEADDR first, because two programs that both set SO_REUSEADDR could bind the same
        # port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


class Supervisor:
    """Runs and supervises ``options.processes`` serving processes."""

    def __init__(self, options: ServeOptions) -> None:
        self._held: list[socket.socket] = []
        self.options = self._with_ports(options)
        cores = sorted(os.sched_getaffinity(0))
        count = options.processes
        # If there are enough cores, each process gets cores of its own, so that processes don't compete for cores.
        self._cores = [cores[i * len(cores) // count : (i + 1) * len(cores) // count] for i in range(count)]
        if count > 1:
            self.options = replace(self.options, cores=max(1, available_cores() // count))
        self._key = secrets.token_bytes(32)
        self._running: dict[int, _Running] = {}
        self._served = False  # True after any process has served
        self._stop = StopRequest()

    def _with_ports(self, options: ServeOptions) -> ServeOptions:
        """Reserves the ports with sockets that are bound but don't listen. A bound socket that doesn't listen gets no
        connections, and keeps other programs off the port."""
        found = {}
        for name, port in (("grpc_port", options.grpc_port), ("http_port", options.http_port)):
            if port is None:
                continue
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            held = socket.socket(family, socket.SOCK_STREAM)
            self._held.append(held)
            try:
                # Test the port with a socket without SO_REUSEPORT. If a server already uses the port, ``bind`` fails.
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((options.host, port))
                    port = probe.getsockname()[1]
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                _bind(held, options.host, port)
            except OSError as error:
                flag = name.replace("_", "-")
                raise UnsupportedHere(
                    f"can't listen on {options.host}:{port} ({error.strerror}); choose another port with --{flag}"
                ) from None
            found[name] = port
        return replace(options, **found)

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serves until SIGTERM or SIGINT. Calls ``ready`` with the advice for users once all processes serve. Raises
        ``BadRepository`` if no process can start."""

        def asked(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if self._stop.made:
                for running in self._running.values():
                    running.process.kill()
                os._exit(128 + number)
            self._stop.make()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, asked)
        with tempfile.TemporaryDirectory(prefix="accel-serve-") as folder:
            try:
                self._watch(Path(folder), ready)
            finally:
                self._end()
        for held in self._held:
            held.close()

    def _watch(self, folder: Path, ready: Callable[[str], None] | None) -> None:
        for index in range(self.options.processes):
            self._running[index] = self._begin(folder, index)
        said = False
        while not self._stop.wait(0.05):
            if not said and all(running.ready for running in self._running.values()):
                said = True
                ports = {"grpc": self.options.grpc_port, "http": self.options.http_port}
                pids = [running.process.pid for running in self._running.values()]
                log.info("all processes serve", extra={"ports": ports, "processes": pids})
                if ready is not None:
                    ready(self._running[0].advice)
            for index, running in self._running.items():
                self._served = self._served or running.ready
                code = running.process.poll()
                if code is None:
                    continue
                if running.again is None:
                    running.again = time.monotonic() + self._died(index, running, code)
                if time.monotonic() >= running.again:
                    again = self._begin(folder, index)
                    again.failures = running.failures
                    self._running[index] = again

    def _died(self, index: int, running: _Running, code: int) -> float:
        """Logs that a process died, and returns the number of seconds until the restart.

        Raises ``BadRepository`` if no process has served yet and the dead process either reports a reason or has died
        too often. Once a process has served, the supervisor always restarts a dead process, because the cause may be
        temporary, for example a missing file.
        """
        if running.listener is not None:
            running.listener.join(5)  # waits until the last line of the dead process's output is read
        self._served = self._served or running.ready
        died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if not self._served and running.reason:
            raise BadRepository(running.reason)
        running.failures = 0 if running.ready else running.failures + 1
        said: dict[str, object] = {"index": index, "pid": running.process.pid, "died": died}
        if running.reason:
            said["reason"] = running.reason
        log.error("a process died and is started again", extra=said)
        if not self._served and running.failures >= _ATTEMPTS:
            raise BadRepository(f"a serving process died {running.failures} times in a row ({died}); see the log above")
        return min(_LONGEST_PAUSE, 0.1 * 2 ** min(running.failures, 16)) if running.failures > 1 else 0.0

    def _begin(self, folder: Path, index: int) -> _Running:
        cores = self._cores[index]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "accel.serve.process.serving"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which then ends the serving processes
            env={**os.environ, "PYTHONPATH": import_path()},
        )
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores)
        body = {
            "options": self.options.to_text(),
            "folder": str(folder),
            "index": index,
            "key": self._key.hex(),
            "parent": os.getpid(),
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(body) + "\n")
            process.stdin.flush()
        running = _Running(process)
        running.listener = threading.Thread(target=self._listen, args=(running,), daemon=True)
        running.listener.start()
        return running

    @staticmethod
    def _listen(running: _Running) -> None:
        assert running.process.stdout is not None
        for line in running.process.stdout:
            if line.startswith("ready "):
                running.advice = json.loads(line[len("ready ") :])
                running.ready = True
            elif line.startswith("error "):
                running.reason = line[len("error ") :].strip()

    def _end(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.options.drain_delay + self.options.drain + 10
        for running in self._running.values():
            try:
                running.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            for pipe in (running.process.stdin, running.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
