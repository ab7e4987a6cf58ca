"""Runs ``python -m MODULE`` by forking each process from a server that has already imported torch. Forking saves
seconds per process, because the forked process doesn't import torch again.

Inside ``Server.installed``, ``subprocess.Popen`` runs a module of ``FORKED`` in a fork of the server, instead of a new
interpreter. A forked process becomes a child of the caller, so ``waitpid`` and signals work. The forked process has its
own session, environment, working folder and command line in ``/proc``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accel.child import bound, die_with_parent

FORKED = ("torch.distributed.run", "accel.train.run.rank", "accel", "tests.accel.train.parallel.suite")
# The modules in _STARTING start further processes.
_STARTING = ("torch.distributed.run", "accel")
# The server imports the modules in _IMPORTED before the first fork. No import may start a thread, because a forked
# process has only a copy of the thread that forked.
_IMPORTED = (
    "accel.cli",
    "accel.train.loop",
    "accel.train.parallel.pipeline",
    "accel.train.parallel.layout",
    "accel.sources.python_object",
    "accel.sources.torch.source",
    "safetensors.torch",
    "torch._dynamo.utils",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.pipelining",
    "tests.support.small_gpt",
)
_PR_SET_CHILD_SUBREAPER = 36
_PADDING = "-" * 8000  # reserves memory for the command line of a forked process
_whole = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def serve(requests: socket.socket) -> None:
    """Forks a process for each request until the caller closes the socket. This function never returns, because the
    server and the forked processes exit."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (middle := os.fork()) == 0:
            # This intermediate process exits at once. The caller then becomes the parent of the forked process, because
            # the caller is a subreaper.
            if (process := os.fork()) == 0:
                requests.close()
                os.close(reader)
                os.close(writer)
                _become(files)
            os.write(writer, str(process).encode())
            os._exit(0)
        for file in (writer, *files):
            os.close(file)
        os.waitpid(middle, 0)
        requests.send(os.read(reader, 32))
        os.close(reader)


def _become(files: Sequence[int]) -> None:
    """Runs the module of a request in this process, and then ends the process as ``python -m`` would."""
    with os.fdopen(files[3]) as stream:
        stream.seek(0)
        request = json.load(stream)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    if request["session"]:
        os.setsid()
    while os.getppid() != request["parent"]:  # the intermediate process is about to exit
        time.sleep(0.001)
    if request["bound"]:
        die_with_parent(request["parent"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, words = request["module"], request["words"]
    server = _forked_server() if module in _STARTING else None
    _show(request["line"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    added = [request["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*added, *(path for path in sys.path if path not in added)]
    sys.argv = [module, *words]
    random.seed()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    if server is not None:
        _install(lambda: server)
    code: Any = 0
    try:
        sys.modules.pop(module, None) if module != "accel" else None
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _show(line: Sequence[str]) -> None:
    """Makes ``/proc`` show ``line`` as the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(line).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _forked_server() -> socket.socket:
    """Forks a server that serves only this process, and returns a socket to the server. Call this function before this
    process starts a second thread."""
    own, requests = socket.socketpair()
    if os.fork() == 0:
        own.close()
        serve(requests)
    requests.close()
    return own


def _install(server: Callable[[], socket.socket]) -> None:
    lock = threading.Lock()
    prctl = ctypes.CDLL(None).prctl

    def forked(popen: Any, args: Any, *rest: Any) -> None:
        bare = _without_binding(args)
        module, words = _module_of(bare)
        if module not in FORKED:
            _whole(popen, args, *rest)
            return
        named = inspect.signature(_whole).bind(popen, args, *rest).arguments
        pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        given = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        body = {
            "module": module,
            "words": words,
            "line": [str(word) for word in bare],
            "parent": os.getpid(),
            "bound": bare is not args,
            "cwd": str(named["cwd"] or Path.cwd()),
            "environment": dict(os.environ if named["env"] is None else named["env"]),
            "session": bool(named["start_new_session"]),
        }
        file = os.memfd_create("request")
        try:
            os.write(file, json.dumps(body).encode())
            with lock:
                asked = server()
                prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                try:
                    socket.send_fds(asked, [b"+"], [*given, file])
                    popen.pid = int(asked.recv(32))
                finally:
                    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        finally:
            os.close(file)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = forked  # type: ignore[attr-defined]


def _without_binding(args: Any) -> Any:
    """Returns the command inside a command of ``accel.child.bound``, and any other ``args`` unchanged."""
    before = bound([])
    return args[len(before) :] if isinstance(args, list) and args[: len(before)] == before else args


def _module_of(args: Any) -> tuple[str, list[str]]:
    """Returns the module and its arguments if ``args`` is a ``python -m`` command. For any other command, returns ("",
    [])."""
    words = [str(word) for word in args] if isinstance(args, list | tuple) else []
    if words[:1] == [sys.executable]:
        rest = words[2:] if words[1:2] == ["-u"] else words[1:]
        if rest[:1] == ["-m"]:
            return rest[1], rest[2:]
    return "", []


class Server:
    """Starts the server that forks processes for one pytest worker. The server starts when a test first needs a
    process. ``end`` ends the server."""

    def __init__(self) -> None:
        self._asked: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _ask(self) -> socket.socket:
        if self._asked is None:
            self._asked, requests = socket.socketpair()
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
            line = [sys.executable, "-m", "tests.accel.train.forked", str(requests.fileno()), _PADDING]
            number = requests.fileno()
            self._process = subprocess.Popen(line, pass_fds=[number], env=environment, stdin=subprocess.DEVNULL)
            requests.close()
        return self._asked

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the context, makes ``subprocess.Popen`` run a module of FORKED in a fork of the server."""
        _install(self._ask)
        try:
            yield
        finally:
            subprocess.Popen._execute_child = _whole  # type: ignore[attr-defined]

    def end(self) -> None:
        """Ends the server, but not the processes that the server has forked."""
        if self._asked is not None and self._process is not None:
            self._asked.shutdown(socket.SHUT_RDWR)  # ends the server even if another process has a copy of the socket
            self._asked.close()
            self._process.wait(60)


@contextmanager
def fresh() -> Iterator[None]:
    """Inside the context, makes ``subprocess.Popen`` start new interpreters instead of forking."""
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _whole  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import started a thread"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[1])))
