"""Runs code in child processes, so that the code can't crash or slow down the caller. Native parsers, engine builders
and timed candidates run in child processes.

A child process is a new Python interpreter. The child does not inherit the parent's thread pools, and does not run the
caller's script again. A child process calls any importable ``module:function``, can keep an object between calls,
reports progress, and ends when its parent ends.
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

from accel.cancel import INTERVAL, Interrupted, cancellable, check_cancelled, uninterrupted
from accel.errors import AccelError, ChildCrashed
from accel.machine import collect_rarely
from accel.progress import report, watched_by
from accel.spelling import is_command_line, on_command_line

_PR_SET_PDEATHSIG = 1
_PROGRAM = "program"


def resolve(target: str) -> Callable[..., Any]:
    """Imports the object that ``module:attribute`` names."""
    module, attributes = target.split(":")
    return operator.attrgetter(attributes)(importlib.import_module(module))  # type: ignore[no-any-return]


def own_temporary(folder: str) -> dict[str, str]:
    """Returns environment variables that make a process write its temporary files to ``folder``.

    The caller removes ``folder`` after the process has ended, because libraries leave files behind, such as
    TensorFlow's generated code, torchrun's logs and multiprocessing's sockets. torch still writes compiled code to its
    usual folder, so that later processes can use the code.
    """
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # the user of a container may have no name
        user = f"uid_{os.getuid()}"
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    return {**dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder), "TORCHINDUCTOR_CACHE_DIR": compiled}


class Child:
    """Starts a child process that answers one call at a time. ``close`` removes the temporary files of the process.

    ``make`` (``module:factory`` with ``arguments``) builds an object in the child. ``call("name", ...)`` calls a method
    of the object that ``make`` built, and ``call("module:function", ...)`` calls a function. The child gets the
    environment variables ``inherited`` (by default those of this process) and the variables in ``env``. ``folder`` is
    the working directory of the child, for libraries that write to the working directory. ``hidden`` lists modules that
    the child can't import. For example, hiding torch saves seconds, because some libraries import torch whenever torch
    is installed.

    If the child process dies, raises ``ChildCrashed`` with the signal and the last line that the process wrote during
    the call. An ``AccelError`` that is raised in the child is raised again in the parent, unchanged.
    """

    def __init__(
        self,
        make: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        with uninterrupted():
            self._start(dict(inherited), dict(env or {}), folder, hidden)
        if make is not None:
            try:
                self._reply(("make", make, dict(arguments or {})), None)
            except BaseException:
                self._abandon()
                raise

    def _start(
        self, inherited: dict[str, str], env: dict[str, str], folder: Path | None, hidden: Sequence[str]
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._before = 0  # the size of the log when the current call began
        ours, theirs = Pipe()
        self._pipe: Connection = ours
        # The parent removes this folder, because the child ends with ``os._exit`` or is killed, and never cleans up.
        self._temporary = tempfile.TemporaryDirectory(prefix="accel-", ignore_cleanup_errors=True)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "accel.child", str(theirs.fileno()), str(os.getpid()), *hidden],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # The child runs in its own session, so that a Ctrl-C reaches only the parent. After a Ctrl-C, the
                # parent ends the child.
                start_new_session=True,
                cwd=folder,
                env={**inherited, "PYTHONPATH": import_path(), **own_temporary(self._temporary.name), **env},
            )

    def call(self, name: str, /, timeout: float | None = None, **arguments: Any) -> Any:
        """Calls ``name`` in the child and returns the result.

        Kills the child if the call is canceled (``accel.cancel``) or takes more than ``timeout`` seconds. Raises
        ``TimeoutError`` after ``timeout`` seconds.
        """
        return self._reply(("call", name, arguments), timeout)

    def _reply(self, request: tuple[str, str, dict[str, Any]], timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._before = os.fstat(self._log.fileno()).st_size
        try:
            self._pipe.send((*request, is_command_line()))
            while True:
                while not self._pipe.poll(_wait(deadline)):
                    self._give_up_in_time(deadline, f"{request[1]} took longer than {timeout or 0:g} s")
                kind, *body = self._pipe.recv()
                if kind == "progress":
                    report(body[0], body[1])
                elif kind == "error":
                    raise body[0]
                else:
                    return body[0]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._crash(request[1]) from None
        except (KeyboardInterrupt, Interrupted):
            self.kill()
            raise

    def _give_up_in_time(self, deadline: float | None, late: str) -> None:
        """Kills the child and raises an error if the call was canceled or ``deadline`` has passed."""
        try:
            _check_time(deadline, late)
        except BaseException:
            self.kill()
            raise

    def _crash(self, doing: str) -> ChildCrashed:
        code = self._process.wait()
        died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = self._written(self._before).strip().splitlines()  # the lines that the child wrote during this call
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        crash = ChildCrashed(f"the process running {doing} died ({died}){last}")
        crash.died = died
        return crash

    def output(self) -> str:
        """Returns everything that the child wrote to stdout and stderr so far."""
        return self._written(0)

    def _written(self, start: int) -> str:
        """Returns the child's output after the first ``start`` bytes."""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size - start, start).decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Pauses every thread of the child, including spinning thread pools. Returns after all threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets a paused child continue."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills the child and waits until the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the child and removes the child's temporary files. Kills the child if it is still running after 5
        seconds."""
        with uninterrupted():
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

    def _abandon(self) -> None:
        """Kills the child and removes its temporary files."""
        with uninterrupted():
            self.kill()
            self.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()


def run_in_child(target: str, /, timeout: float | None = None, *, hidden: Sequence[str] = (), **arguments: Any) -> Any:
    """Calls ``target(**arguments)`` in a new child process and returns the result. The class ``Child`` explains
    ``hidden``."""
    with Child(hidden=hidden) as child:
        return child.call(target, timeout=timeout, **arguments)


def bound(words: Sequence[str]) -> list[str]:
    """Returns a command that runs the program ``words``, and that the system kills when this process ends, even if this
    process is killed. The program's first word is a path. The program's environment needs ``import_path()``."""
    return [sys.executable, "-P", "-m", "accel.child", _PROGRAM, str(os.getpid()), *words]


def run_program(words: Sequence[str], *, folder: Path, timeout: float) -> str:
    """Runs a program in ``folder`` and returns the program's stdout, followed by its stderr.

    The program is killed when this process ends, also after a Ctrl-C. The program is killed if the work is canceled
    (``accel.cancel``). After ``timeout`` seconds, kills the program and raises ``TimeoutError``.
    """
    deadline = time.monotonic() + timeout
    with uninterrupted():
        started = subprocess.Popen(
            bound(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": import_path()},
            text=True,
            errors="replace",
            start_new_session=True,
        )
    with started as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=_wait(deadline))
                except subprocess.TimeoutExpired:
                    _check_time(deadline, f"{Path(words[0]).name} took longer than {timeout:g} s")
                else:
                    return output + errors
        except BaseException:
            process.kill()
            raise


def _wait(deadline: float | None) -> float | None:
    """Returns how many seconds to wait for an answer before the next ``_check_time``. None means no limit."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not cancellable():
        return left
    return INTERVAL if left is None else min(INTERVAL, left)


def _check_time(deadline: float | None, late: str) -> None:
    """Raises the error of ``check_cancelled`` if the work was canceled. After ``deadline``, raises a TimeoutError with
    the message ``late``."""
    check_cancelled()
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(late)


def import_path() -> str:
    """Returns the import path of this interpreter with absolute folders, because the child may have another working
    directory. The child adds no folder of its own (``-P``), so that a user's file such as ``queue.py`` in the working
    directory replaces no module that the child imports."""
    return os.pathsep.join(str(Path(p).absolute()) for p in sys.path)


def die_with_parent(parent: int) -> None:
    """Makes this process end when ``parent`` ends. Exits at once if ``parent`` has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent may have died before the prctl call
        sys.exit(1)


def _sendable(error: BaseException) -> BaseException:
    """Returns ``error`` if instances of its class can be pickled, or else a ``ChildCrashed`` with the text of
    ``error``."""
    if isinstance(error, AccelError | OSError):
        return error
    return ChildCrashed(f"{type(error).__name__}: {error}")


def serve(pipe: Connection) -> None:
    """Answers the parent's calls until the parent closes the pipe."""
    made: Any = None
    with watched_by(lambda message, fraction: pipe.send(("progress", message, fraction))):
        while True:
            try:
                kind, name, arguments, command_line = pipe.recv()
            except EOFError:
                return
            try:
                with on_command_line(command_line):
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
    if sys.argv[1] == _PROGRAM:  # the parent-death signal stays set after exec
        os.execv(sys.argv[3], sys.argv[3:])
    collect_rarely()
    sys.modules.update(dict.fromkeys(sys.argv[3:]))  # type: ignore[arg-type]  # None makes an import fail
    serve(Connection(int(sys.argv[1])))
    # Skips the unloading of native libraries, because a crash while unloading would turn a good answer into a failure.
    os._exit(0)
