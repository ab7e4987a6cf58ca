"""Starts the process of a Python model, and runs requests in it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.child import import_path
from accel.errors import InvalidModel
from accel.signature import Signature

from ..protocol.inference import Code, InferenceRequest, ServeError
from ..protocol.tensors import BY_FIELD
from .arena import CANCELLED, TAKEN, Arena

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("accel.serve")

_CODES = (
    Code.INTERNAL, Code.INTERNAL, Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.UNAVAILABLE, Code.UNIMPLEMENTED,
    Code.ALREADY_EXISTS, Code.CANCELLED,
)  # fmt: skip
_START, _END = 1, 2
_FINALIZE_SECONDS = 10.0
_LAST_LINES = 5


class ProcessDied(Exception):
    """Raised if the process of a model has ended. The text tells how."""


class PythonProcess:
    """A process that has imported the code in ``file``. ``name`` is the model's name in the log.

    Raises ``InvalidModel`` if the code can't be imported.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self._inputs, self._outputs = Arena.new(), Arena.new()
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), self._inputs.fd, self._outputs.fd)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.process", *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C reaches only the server, which then ends the process
                env={**os.environ, "PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"},
            )
        self._connection = Connection(ours.detach())
        self._printed: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader = threading.Thread(target=self._read_printed, name=f"accel-python-{name}", daemon=True)
        self._reader.start()
        try:
            self.call("open", path=str(file.absolute()))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_printed(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip("\n")
            self._printed.append(text)
            log.info("a Python model prints", extra={"model": self.name, "text": text[:1000]})

    def call(self, call: str, **fields: Any) -> dict[str, Any]:
        """Runs a command in the process, and returns its answer. Raises ``InvalidModel`` if the command fails or the
        process ends."""
        try:
            self._send({"call": call, **fields})
            found = self._receive()
        except ProcessDied as error:
            raise InvalidModel(f"the Python code of model '{self.name}' ended its process: {error}") from None
        if found["kind"] == "failed":
            log.error("a Python model failed", extra={"model": self.name, "exception": found["trace"][-4000:]})
            raise InvalidModel(f"the Python code of model '{self.name}' failed in {call}: {found['text']}")
        return found

    def _send(self, body: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(body).encode())
        except OSError:
            raise ProcessDied(self._how()) from None

    def _receive(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError):
            raise ProcessDied(self._how()) from None
        return found

    def _how(self) -> str:
        """Returns how the process ended, and its last line."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection to the server"
        self._reader.join(1.0)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return how + (f" after it printed {self._printed[-1][:200]!r}" if self._printed else "")

    def execute(
        self,
        requests: Sequence[InferenceRequest],
        datatypes: Mapping[str, str],
        *,
        decoupled: bool,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, dict[str, np.ndarray] | ServeError, bool]]:
        """Yields the responses to ``requests``: the place of the request, the outputs or the error, and whether the
        response is final. Raises ``ProcessDied`` if the process ends. With each response that was taken, the model
        learns whether its requests are ``cancelled``."""
        tensors = [(name, datatypes[name], value) for one in requests for name, value in one.inputs.items()]
        rows = iter(self._inputs.write(tensors))
        made = [{**_fields(one), "inputs": [next(rows) for _ in one.inputs]} for one in requests]
        self._send({"call": "execute", "requests": made, "decoupled": decoupled})
        while (found := self._receive())["kind"] == "response":
            outputs: dict[str, np.ndarray] | ServeError
            if "error" in found:
                code = found["code"] if 0 <= found["code"] < len(_CODES) else 0
                outputs = ServeError(_CODES[code], found["error"])
            else:
                outputs = self._outputs.read(found.get("outputs", ()))
            with contextlib.suppress(OSError):  # the next _receive tells how the process ended
                self._connection.send_bytes(CANCELLED if cancelled() else TAKEN)
            yield found["request"], outputs, found["final"]
        self._inputs.shrink()
        self._outputs.shrink()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Lets the model finalize, and ends the process. Waits some seconds at most."""
        with contextlib.suppress(ProcessDied):
            if self.alive:
                self._send({"call": "finalize"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_FINALIZE_SECONDS)
        if self.alive:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._connection.close()
        self._inputs.close()
        self._outputs.close()


def _fields(request: InferenceRequest) -> dict[str, Any]:
    return {
        "request_id": request.id,
        "correlation_id": request.sequence_id,
        "requested_output_names": list(request.outputs or ()),
        "flags": _START * request.sequence_start + _END * request.sequence_end,
        "timeout": request.timeout_us,
        "parameters": dict(request.parameters),
    }


class RequestFeeds(dict[str, Any]):
    """The feeds of a run that keep the requests apart, because Python code gets a list of requests."""

    requests: Sequence[InferenceRequest] = ()


class Answers(dict[str, Any]):
    """The outputs of a run by request: the outputs or the error of each."""

    parts: Sequence[dict[str, Any] | ServeError] = ()

    @classmethod
    def of(cls, parts: Sequence[dict[str, Any] | ServeError]) -> Answers:
        made = cls()
        made.parts = parts
        return made


class PythonSession:
    """A session that runs requests in a process. If the process dies, its requests fail, and the next run starts a new
    process. ``first`` is a process that has imported the code already, or None."""

    def __init__(
        self,
        name: str,
        file: Path,
        signature: Signature,
        arguments: Mapping[str, str],
        *,
        first: PythonProcess | None = None,
    ) -> None:
        self.name, self.file, self.signature = name, file, signature
        self._arguments = dict(arguments)
        self._inputs = {spec.name: BY_FIELD[spec.dtype] for spec in signature.inputs}
        self._outputs = {spec.name: BY_FIELD[spec.dtype] for spec in signature.outputs}
        self._process: PythonProcess | None = self._started(first)

    def _started(self, process: PythonProcess | None = None) -> PythonProcess:
        process = process or PythonProcess(self.name, self.file)
        try:
            process.call("initialize", arguments=self._arguments)
        except BaseException:
            process.close()
            raise
        return process

    def _ready(self) -> PythonProcess:
        """Returns the process, or a new one if it has died. Raises ``ServeError`` UNAVAILABLE if none can be
        started."""
        if self._process is not None and not self._process.alive:
            self._dropped()
        if self._process is None:
            try:
                self._process = self._started()
            except InvalidModel as error:
                raise ServeError(Code.UNAVAILABLE, str(error)) from None
            log.warning("a Python model's process is started again", extra={"model": self.name})
        return self._process

    def _dropped(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def run(self, feeds: Mapping[str, Any]) -> Any:
        """Returns the ``Answers`` to the requests of ``feeds``."""
        requests = feeds.requests if isinstance(feeds, RequestFeeds) else (InferenceRequest(model="", inputs=feeds),)
        parts: list[dict[str, Any] | ServeError | None] = [None] * len(requests)
        try:
            process = self._ready()
            for at, outputs, _ in process.execute(requests, self._inputs, decoupled=False):
                if parts[at] is None and outputs:
                    parts[at] = self._checked(outputs)
        except ProcessDied as error:
            return Answers.of([part if part is not None else self._died(error) for part in parts])
        except ServeError as error:
            return Answers.of([error] * len(requests))
        nothing = f"the Python code of model '{self.name}' sent no response"
        return Answers.of([part if part is not None else ServeError(Code.INTERNAL, nothing) for part in parts])

    def stream(self, feeds: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the responses to the only request of ``feeds``. Raises ``ServeError`` if a response is an error. The
        model runs on until it has sent its final response, because its other requests need the same process."""
        requests = feeds.requests if isinstance(feeds, RequestFeeds) else (InferenceRequest(model="", inputs=feeds),)
        process = self._ready()
        failed: ServeError | None = None
        unwanted = False
        found = process.execute(requests, self._inputs, decoupled=True, cancelled=lambda: unwanted)
        try:
            for _, outputs, final in found:
                if failed is not None or (final and not outputs):
                    continue
                checked = self._checked(outputs)
                if isinstance(checked, ServeError):
                    failed, unwanted = checked, True  # the client gets no response after an error
                else:
                    yield Answers.of([checked])
        except GeneratorExit:  # the client has left; the model learns that with its next response
            unwanted = True
            with contextlib.suppress(ProcessDied):
                deque(found, maxlen=0)
            raise
        except ProcessDied as error:
            raise self._died(error) from None
        if failed is not None:
            raise failed

    def _died(self, error: ProcessDied) -> ServeError:
        self._dropped()
        return ServeError(Code.INTERNAL, f"the Python code of model '{self.name}' ended its process: {error}")

    def _checked(self, outputs: dict[str, Any] | ServeError) -> dict[str, Any] | ServeError:
        """Returns the outputs that the model declares, or the error of an output with a wrong dtype."""
        if isinstance(outputs, ServeError):
            return outputs
        known = {name: value for name, value in outputs.items() if name in self._outputs}
        for name, value in known.items():
            wanted = self._outputs[name]
            given = "BYTES" if value.dtype.kind == "O" else BY_FIELD.get(value.dtype.name, str(value.dtype))
            if given != wanted:
                return ServeError(
                    Code.INTERNAL,
                    f"the Python code of model '{self.name}' gave {given} for the output '{name}', but the config has "
                    f"{wanted}",
                )
        return known

    def close(self) -> None:
        self._dropped()
