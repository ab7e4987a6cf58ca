"""Work that must not take the caller down or be slowed by it runs in a child process: native parsers that can crash,
builders, and each candidate of a benchmark.

A child is a fresh interpreter (never a fork of a process with thread pools, never a second run of the caller's
script). It can call any importable ``module:function``, keeps what that returns if asked to, reports progress,
and dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import importlib
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from accel.errors import AccelError, ChildCrashed
from accel.progress import report, watched_by

_PR_SET_PDEATHSIG = 1
_PROGRAM = "program"


def resolve(target: str) -> Callable[..., Any]:
    """The object behind ``module:attribute``."""
    module, attributes = target.split(":")
    return operator.attrgetter(attributes)(importlib.import_module(module))  # type: ignore[no-any-return]


def own_temporary(folder: str) -> dict[str, str]:
    """The environment of a process whose temporary files are to go into ``folder``, which is removed after it: its
    libraries leave some behind (TensorFlow its generated code, torchrun its logs, multiprocessing its sockets). What
    torch compiled stays where it is: it is there to be found again."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container whose user has no name
        user = f"uid_{os.getuid()}"
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    return {**dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder), "TORCHINDUCTOR_CACHE_DIR": compiled}


class Child:
    """A child process that answers calls one at a time. Its temporary files go when it is closed.

    ``make`` (``module:factory`` with ``arguments``) is built once in the child; ``call("name", ...)`` calls its method.
    ``call("module:function", ...)`` calls a function. ``folder``: where it runs, for libraries that write where they
    stand. ``ChildCrashed`` where the process died, with the signal and
    the last line it wrote in that call; an ``AccelError`` raised in the child is raised here as it was.
    """

    def __init__(
        self,
        make: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._before = 0  # bytes of it when the call began
        ours, theirs = Pipe()
        self._pipe: Connection = ours
        # It ends without its own clean-up (``os._exit``), or is killed.
        self._temporary = tempfile.TemporaryDirectory(prefix="accel-", ignore_cleanup_errors=True)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "accel.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Its own session: Ctrl-C reaches the parent alone, which then ends the child.
                start_new_session=True,
                cwd=folder,
                env={
                    **_importing(),
                    **own_temporary(self._temporary.name),
                    **(env or {}),
                },
            )
        if make is not None:
            try:
                self._reply(("make", make, dict(arguments or {})), None)
            except BaseException:
                self.kill()
                self.close()
                raise

    def call(self, name: str, /, timeout: float | None = None, **arguments: Any) -> Any:
        """What ``name`` returns in the child. ``TimeoutError`` (child killed) after ``timeout`` seconds."""
        return self._reply(("call", name, arguments), timeout)

    def _reply(self, request: tuple[str, str, dict[str, Any]], timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._before = os.fstat(self._log.fileno()).st_size
        try:
            self._pipe.send(request)
            while True:
                if deadline is not None and not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise TimeoutError(f"{request[1]} took longer than {timeout:g} s")
                kind, *body = self._pipe.recv()
                if kind == "progress":
                    report(body[0], body[1])
                elif kind == "error":
                    raise body[0]
                else:
                    return body[0]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._crash(request[1]) from None
        except KeyboardInterrupt:
            self.kill()
            raise

    def _crash(self, doing: str) -> ChildCrashed:
        code = self._process.wait()
        died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = self._written(self._before).strip().splitlines()  # by this call, not by one that was answered
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        return ChildCrashed(f"the process running {doing} died ({died}){last}")

    def output(self) -> str:
        """Everything the child wrote to stdout and stderr so far."""
        return self._written(0)

    def _written(self, start: int) -> str:
        """What it wrote from that byte on."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size - start, start).decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stop every thread of the child, spinning thread pools included; back when they have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._pipe.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.resume()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()
        self._temporary.cleanup()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.close()


def run_in_child(target: str, /, timeout: float | None = None, **arguments: Any) -> Any:
    """``target(**arguments)`` in a child process of its own."""
    with Child() as child:
        return child.call(target, timeout=timeout, **arguments)


def run_program(words: Sequence[str], *, folder: Path, timeout: float) -> str:
    """Run a program that isn't Python in ``folder``: what it wrote to stdout and stderr. It ends when this process
    does. ``subprocess.TimeoutExpired`` (killed) after ``timeout`` seconds."""
    command = [sys.executable, "-m", "accel.child", _PROGRAM, str(os.getpid()), *words]
    ran = subprocess.run(
        command,
        cwd=folder,
        env=_importing(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    return ran.stdout


def _importing() -> dict[str, str]:
    """The environment of an interpreter that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)}


def die_with_parent(parent: int) -> None:
    """End this process when ``parent`` ends, and at once where it has already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)


def _sendable(error: BaseException) -> BaseException:
    if isinstance(error, AccelError | OSError):
        return error
    return ChildCrashed(f"{type(error).__name__}: {error}")


def serve(pipe: Connection) -> None:
    """Answer the parent until it hangs up."""
    made: Any = None
    with watched_by(lambda message, fraction: pipe.send(("progress", message, fraction))):
        while True:
            try:
                kind, name, arguments = pipe.recv()
            except EOFError:
                return
            try:
                if kind == "make":
                    made = resolve(name)(**arguments)
                    answer = None
                else:
                    function = resolve(name) if ":" in name else getattr(made, name)
                    answer = function(**arguments)
                pipe.send(("done", answer))
            except Exception as error:
                import traceback

                traceback.print_exc()
                pipe.send(("error", _sendable(error)))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    if sys.argv[1] == _PROGRAM:
        os.execv(sys.argv[3], sys.argv[3:])  # the kernel's note to end it with its parent stays
    serve(Connection(int(sys.argv[1])))
    # Native libraries that crash while they unload must not turn a good answer into a failure.
    os._exit(0)
