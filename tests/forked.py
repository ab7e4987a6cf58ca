"""Runs ``python -m MODULE`` by forking each process from a server that has already imported the libraries. Forking
saves up to seconds per process, because the forked process doesn't import the libraries again.

Inside ``Server.installed``, ``subprocess.Popen`` runs a module of the server's ``Kind`` in a fork of the server,
instead of a new interpreter. A forked process becomes a child of the caller, so ``waitpid`` and signals work. It has
its own session, environment, working folder, limits and command line in ``/proc``. What the system shows of its
environment (``/proc/PID/environ``), and the seed of Python's hashes, are the server's.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from accel.child import bound, die_with_parent


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The server imports the modules in ``imported`` before the first fork. No import may start a thread, because a
    forked process has only a copy of the thread that forked.

    Modules in ``forked`` run in a fork of the server. Of these, ``starting`` start further processes. The server
    imports no module in ``absent``, so that a process may hide them (``Child(hidden=)``). If ``hidden`` isn't empty,
    the server hides these modules before its imports, and forks only processes that hide exactly these."""

    forked: tuple[str, ...]
    imported: tuple[str, ...]
    starting: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


KINDS = {
    "training": Kind(
        forked=("torch.distributed.run", "accel.train.run.rank", "accel", "tests.accel.train.parallel.suite"),
        starting=("torch.distributed.run", "accel"),
        imported=(
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
        ),
    ),
    # The runtimes are left to the child that needs them, so that a child has the size and the libraries of a user's.
    "child": Kind(
        forked=("accel.child",),
        imported=(
            "accel.converters.graph.onnx_from_onnx",
            "accel.converters.graph.simplify",
            "accel.converters.to_openvino.openvino_from_onnx",
            "accel.runtimes.openvino",
            "accel.sources.onnx.file",
            "accel.timing.blocks",
            "onnx",
        ),
        absent=("onnxruntime", "onnxsim", "openvino", "sympy", "tensorflow", "torch", "transformers"),
    ),
    # Importing onnxsim takes longer than simplifying a small model.
    "simplifier": Kind(
        forked=("accel.child",),
        imported=("accel.converters.graph.simplify", "onnx", "onnxsim"),
        hidden=("torch", "sympy"),
    ),
}
# A new interpreter reads these variables when it starts, so a fork needs the same.
_AT_START = ("GLIBC_", "LD_", "MALLOC_", "OPENBLAS_", "PYTHON")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_PR_SET_CHILD_SUBREAPER = 36
_PADDING = "-" * 8000  # reserves memory for the command line of a forked process
_MOST_FILES = 32
_whole = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def serve(requests: socket.socket, kind: Kind) -> None:
    """Forks a process for each request until the caller closes the socket. This function never returns, because the
    server and the forked processes exit."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, _MOST_FILES)
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
                _become(files, kind)
            os.write(writer, str(process).encode())
            os._exit(0)
        for file in (writer, *files):
            os.close(file)
        os.waitpid(middle, 0)
        requests.send(os.read(reader, 32))
        os.close(reader)


def _become(files: Sequence[int], kind: Kind) -> None:
    """Runs the module of a request in this process, and then ends the process as ``python -m`` would."""
    with os.fdopen(files[0]) as stream:
        stream.seek(0)
        request = json.load(stream)
    _place(files[1:], [0, 1, 2, *request["passed"]])
    if request["session"]:
        os.setsid()
    while os.getppid() != request["parent"]:  # the intermediate process is about to exit
        time.sleep(0.001)
    if request["bound"]:
        die_with_parent(request["parent"])
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in zip(_LIMITS, request["limits"], strict=True):
        if resource.getrlimit(limit) != tuple(values):
            resource.setrlimit(limit, values)
    os.environ.clear()
    os.environ.update(request["environment"])
    module, words = request["module"], request["words"]
    server = _forked_server(kind) if module in kind.starting else None
    _show(request["line"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    here = [] if request["safe_path"] else [request["cwd"]]
    added = [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = dict.fromkeys([*added, *sys.path])
    sys.argv = [module, *words]
    tempfile.tempdir = None
    _draw_anew()
    if server is not None:
        _install(lambda: server, kind, os.environ)
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


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives the open ``files`` these ``numbers``."""
    above = max(*files, *numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _draw_anew() -> None:
    """Gives this process random numbers and a number of threads of its own."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _show(line: Sequence[str]) -> None:
    """Makes ``/proc`` show ``line`` as the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(line).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _forked_server(kind: Kind) -> socket.socket:
    """Forks a server that serves only this process, and returns a socket to the server. Call this function before this
    process starts a second thread."""
    own, requests = socket.socketpair()
    if os.fork() == 0:
        own.close()
        serve(requests, kind)
    requests.close()
    return own


def _install(server: Callable[[], socket.socket], kind: Kind, started_with: Mapping[str, str]) -> None:
    lock = threading.Lock()
    prctl = ctypes.CDLL(None).prctl
    otherwise = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def forked(popen: Any, args: Any, *rest: Any) -> None:
        bare = _without_binding(args)
        module, words, safe_path = _module_of(bare)
        named = inspect.signature(_whole).bind(popen, args, *rest).arguments
        environment = dict(os.environ if named["env"] is None else named["env"])
        if module not in kind.forked or not _is_alike(kind, named, environment, started_with, module, words):
            otherwise(popen, args, *rest)
            return
        pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        given = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        passed = list(named["pass_fds"])
        body = {
            "module": module,
            "words": words,
            "line": [str(word) for word in bare],
            "parent": os.getpid(),
            "bound": bare is not args,
            "cwd": str(named["cwd"] or Path.cwd()),
            "environment": environment,
            "session": bool(named["start_new_session"]),
            "safe_path": safe_path,
            "passed": passed,
            "cores": list(os.sched_getaffinity(0)),
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        }
        file = os.memfd_create("request")
        try:
            os.write(file, json.dumps(body).encode())
            with lock:
                asked = server()
                prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                try:
                    socket.send_fds(asked, [b"+"], [file, *given, *passed])
                    popen.pid = int(asked.recv(32) or _ended())
                finally:
                    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        finally:
            os.close(file)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = forked  # type: ignore[attr-defined]


def _ended() -> NoReturn:
    raise RuntimeError("the server that forks processes has ended; see its error in the output of pytest")


def _is_alike(
    kind: Kind,
    named: Mapping[str, Any],
    environment: Mapping[str, str],
    started_with: Mapping[str, str],
    module: str,
    words: list[str],
) -> bool:
    """Tells whether a fork is what a new interpreter would be."""
    if named["preexec_fn"] is not None or (named["shell"], named["executable"]) != (False, None):
        return False
    for name in {*environment, *started_with}:
        if name.startswith(_AT_START) and name != "PYTHONPATH" and environment.get(name) != started_with.get(name):
            return False
    if module == "accel.child" and not _can_hide(kind, set(words[2:])):
        return False
    known = {*started_with.get("PYTHONPATH", "").split(os.pathsep), *sys.path[-3:]}
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in known]
    return not any(_replaces_a_module(Path(folder), kind) for folder in others)


def _can_hide(kind: Kind, modules: set[str]) -> bool:
    """Tells whether a fork of the server can hide ``modules`` as a new interpreter would."""
    return modules == set(kind.hidden) if kind.hidden else modules <= set(kind.absent)


def _replaces_a_module(folder: Path, kind: Kind) -> bool:
    """Tells whether a new interpreter might find another module in ``folder`` than the server has imported."""
    names = {"sitecustomize", "usercustomize", "accel", *(name.partition(".")[0] for name in kind.imported)}
    if not folder.is_dir():
        return False
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return bool(found & (names | sys.stdlib_module_names))


def _without_binding(args: Any) -> Any:
    """Returns the command inside a command of ``accel.child.bound``, and any other ``args`` unchanged."""
    before = bound([])
    return args[len(before) :] if isinstance(args, list) and args[: len(before)] == before else args


def _module_of(args: Any) -> tuple[str, list[str], bool]:
    """Returns the module and its arguments if ``args`` is a ``python -m`` command, and whether the working folder stays
    out of Python's path. For any other command, returns ("", [], False)."""
    words = [str(word) for word in args] if isinstance(args, list | tuple) else []
    if words[:1] == [sys.executable]:
        flags = words[1 : words.index("-m")] if "-m" in words else []
        rest = words[1 + len(flags) :]
        if rest[:1] == ["-m"] and set(flags) <= {"-u", "-P"}:
            return rest[1], rest[2:], "-P" in flags
    return "", [], False


class Server:
    """Starts the server that forks processes of a kind of ``KINDS`` for one pytest worker. The server starts when a
    test first needs a process. ``end`` ends the server."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._asked: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        path = os.pathsep.join(filter(None, sys.path))
        self._environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def _ask(self) -> socket.socket:
        if self._asked is None:
            self._asked, requests = socket.socketpair()
            line = [sys.executable, "-m", "tests.forked", self._kind, str(requests.fileno()), _PADDING]
            number = requests.fileno()
            self._process = subprocess.Popen(line, pass_fds=[number], env=self._environment, stdin=subprocess.DEVNULL)
            requests.close()
        return self._asked

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the context, makes ``subprocess.Popen`` run a module of the server's kind in a fork of the server."""
        before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        _install(self._ask, KINDS[self._kind], self._environment)
        try:
            yield
        finally:
            subprocess.Popen._execute_child = before  # type: ignore[attr-defined]

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
    chosen = KINDS[sys.argv[1]]
    sys.modules.update(dict.fromkeys(chosen.hidden))  # type: ignore[arg-type]  # None makes an import fail
    for name in chosen.imported:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import started a thread"
    assert not set(chosen.absent) & set(sys.modules), "an import brought a module that a child may hide"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=int(sys.argv[2])), chosen)
