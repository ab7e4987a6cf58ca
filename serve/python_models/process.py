"""The process that runs a ``model.py``. The server starts it with three file descriptors: a connection for commands,
and the shared memory for inputs and for outputs."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from . import interface
from .arena import CANCELLED, Arena

MODULE = "triton_python_backend_utils"


class Host:
    """Runs the commands of the server, one at a time."""

    def __init__(self, connection: Connection, inputs: Arena, outputs: Arena) -> None:
        self._connection, self._inputs, self._outputs = connection, inputs, outputs
        self._lock = threading.Lock()  # a model may send responses on several threads
        self._class: Any = None
        self._model: Any = None
        self._module: ModuleType | None = None

    def run(self) -> None:
        while True:
            try:
                command = json.loads(self._connection.recv_bytes())
            except EOFError:
                return
            kind = command.pop("call")
            try:
                getattr(self, f"_{kind}")(**command)
            except Exception as error:
                self._say("failed", text=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            if kind == "finalize":
                return

    def _say(self, kind: str, **fields: Any) -> None:
        self._connection.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def _open(self, path: str) -> None:
        """Imports the model's code. The model's folders are searched for other modules first."""
        file = Path(path)
        sys.path[:0] = [str(file.parent), str(file.parent.parent)]
        spec = importlib.util.spec_from_file_location("model", file)
        assert spec is not None
        self._module = sys.modules["model"] = importlib.util.module_from_spec(spec)
        # An import would take the compiled file in __pycache__, even if model.py was rewritten in the same second with
        # the same size.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(self._module))
        self._class = getattr(self._module, "TritonPythonModel", None)
        if self._class is None or not callable(getattr(self._class, "execute", None)):
            raise TypeError(f"{file.name} has no class TritonPythonModel with a method execute")
        self._say("done")

    def _complete(self, config: dict[str, Any]) -> None:
        """Lets the model complete its config. Answers with the config."""
        complete = getattr(self._class, "auto_complete_config", None)
        if complete is not None:
            made = complete(interface.ModelConfig(config))
            if made is None:
                raise TypeError("auto_complete_config returned None; return the config that it got")
            config = made.as_dict()
        self._say("done", config=config)

    def _initialize(self, arguments: dict[str, str]) -> None:
        self._model = self._class()
        if hasattr(self._model, "initialize"):
            self._model.initialize(arguments)
        self._say("done")

    def _finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        self._say("done")

    def _execute(self, requests: list[dict[str, Any]], decoupled: bool) -> None:
        """Runs the model. Sends one response for each request, or any number of responses if ``decoupled``."""
        senders: list[interface.InferenceResponseSender] = []
        senders += [interface.InferenceResponseSender(self._giver(at, senders)) for at in range(len(requests))]
        made = [self._request(row, sender) for row, sender in zip(requests, senders, strict=True)]
        try:
            found = self._model.execute(made)
            if found is not None:
                self._give_returned(list(found), senders, decoupled)
        except Exception as error:
            traceback.print_exc()
            text = interface.TritonError(f"{type(error).__name__}: {error}")
            for sender in senders:
                if not sender.finished.is_set():
                    sender.send(interface.InferenceResponse(error=text), interface.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        for sender in senders:
            sender.finished.wait()
        self._say("done")

    def _give_returned(
        self, found: list[Any], senders: list[interface.InferenceResponseSender], decoupled: bool
    ) -> None:
        if decoupled:
            raise ValueError("a decoupled model has to send its responses with the response sender and return None")
        if len(found) != len(senders):
            raise ValueError(
                f"execute returned {len(found)} responses for {len(senders)} requests; return one for each request"
            )
        for response, sender in zip(found, senders, strict=True):
            if response is not None:  # the model sends the response with the response sender
                sender.send(response, interface.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _request(self, row: dict[str, Any], sender: interface.InferenceResponseSender) -> interface.InferenceRequest:
        inputs = [interface.Tensor(name, value) for name, value in self._inputs.read(row.pop("inputs")).items()]
        return interface.InferenceRequest(inputs=inputs, sender=sender, **row)

    def _giver(self, at: int, senders: list[interface.InferenceResponseSender]) -> Any:
        def give(response: interface.InferenceResponse | None, final: bool) -> None:
            with self._lock:
                fields: dict[str, Any] = {"request": at, "final": final}
                if response is not None and response.has_error():
                    error: Any = response.error()
                    fields |= {"error": str(error), "code": error.code() if hasattr(error, "code") else 1}
                elif response is not None:
                    tensors = [(t.name(), interface._datatype(t.as_numpy()), t.as_numpy()) for t in response._tensors]
                    fields["outputs"] = self._outputs.write(tensors)
                self._say("response", **fields)
                if self._connection.recv_bytes() == CANCELLED:  # the server has copied the outputs
                    senders[at].cancelled = True

        return give


def _end_with(parent: int) -> None:
    """Ends this process soon after the server has ended, even if the model hangs. Linux could do so on its own, but
    does so when the server's thread ends that started this process."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Reads the file descriptors and the parent's process id from the command line, and runs commands."""
    connection, inputs, outputs, parent = map(int, sys.argv[1:5])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    sys.modules[MODULE] = interface
    Host(Connection(connection), Arena(inputs), Arena(outputs)).run()


if __name__ == "__main__":
    main()
