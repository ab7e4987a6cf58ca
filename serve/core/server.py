"""Defines ``InferenceServer``. Every transport calls the methods of ``InferenceServer``. The methods take and return
the types of ``transport.py``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel.errors import BadRepository
from accel.version import __version__

from ..models.config import ModelConfig
from ..models.entries import IndexRow
from ..models.model import Retired, ServedModel, ServedTensor, unknown
from ..models.repository import Repository
from ..protocol.inference import (
    Code,
    InferenceRequest,
    InferenceResponse,
    Parameter,
    ServeError,
    StatisticsRow,
    Ticket,
)
from ..security.access import Access
from . import cuda_regions
from .calls import make_reply, read_request
from .control import Processes
from .cuda_regions import CudaRegion
from .local_control import LocalControl, read_config
from .settings import LogSettings, TraceSettings
from .shared_memory import OwnedMemory, Region
from .tracing import Tracing
from .transport import InferCall, InferReply, Reply
from .uploads import read_parameters

log = logging.getLogger("accel.serve")

NAME = "accel"
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


@dataclass(frozen=True)
class ModelMetadata:
    """Holds the metadata of a model: its versions, platform, inputs and outputs."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]


class InferenceServer:
    """Answers every call of a client. Methods take the caller's ``token``, and raise ``ServeError`` if a call fails."""

    def __init__(
        self,
        repository: Repository,
        *,
        access: Access | None = None,
        strict_readiness: bool = False,
        max_waiting: int = 0,
        tracing: Tracing | None = None,
        name: str = NAME,
        extensions: Sequence[str] = (),
        allow_upload: bool = False,
    ) -> None:
        """At most ``max_waiting`` calls that hold a place of their transport wait for one model, so that a hanging
        model leaves some places free. A ``max_waiting`` of 0 means no limit. Calls that hold no place are limited only
        by the queue of their model. ``name`` and ``extensions`` are what clients are told; without ``extensions``, they
        are told what the server has. ``allow_upload`` lets clients send the files of a model with the command to load
        it."""
        self.repository = repository
        self.access = access or Access()
        self.memory = OwnedMemory()
        self.tracing = tracing
        trace = tracing.settings if tracing else TraceSettings()
        self.local = LocalControl(repository, self.memory, trace, LogSettings())
        self.processes: Processes = self.local
        self._strict, self._upload = strict_readiness, allow_upload
        self._name, self._extensions = name, tuple(extensions)
        self._watchers: list[Callable[[], None]] = []
        repository.changed = self._changed
        self._max_waiting = max_waiting
        self._leaving = self._draining = False
        self._lock = threading.Condition()
        self._under_way = 0
        self.answered = 0  # the number of requests that have ended
        self._waiting: dict[str, int] = {}

    # Health and metadata

    def live(self, token: str | None = None) -> bool:
        self.access.check(token)
        return True

    def ready(self, token: str | None = None) -> bool:
        """Tells whether the server takes requests. With ``strict_readiness``, returns False if any model is broken."""
        self.access.check(token)
        return self.healthy()

    def healthy(self) -> bool:
        """Returns the same value as ``ready``, but needs no token."""
        if self.leaving or not self.repository.started:
            return False
        return not (self._strict and self.repository.broken())

    def on_change(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call ``watcher``, on any thread, whenever ``healthy`` or ``taking`` may have changed. Returns a function that
        ends this."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def _changed(self) -> None:
        for watcher in tuple(self._watchers):
            try:
                watcher()
            except Exception:
                log.exception("a change of the server's health could not be reported")

    def metadata(self, token: str | None = None) -> tuple[str, str, tuple[str, ...]]:
        """Returns the name, the version and the extensions of the server."""
        self.access.check(token)
        cuda = ("cuda_shared_memory",) if cuda_regions.available() else ()
        return self._name, __version__, self._extensions or (*EXTENSIONS, *cuda)

    def model_ready(self, name: str, version: str = "", token: str | None = None) -> bool:
        """Tells whether the model is served. Returns False if the repository lacks the model."""
        self.access.check(token, model=name)
        try:
            self.repository.get(name, version)
        except ServeError as error:
            if error.code is Code.INVALID_ARGUMENT:
                raise
            return False
        return not self.leaving

    def model_metadata(self, name: str, version: str = "", token: str | None = None) -> ModelMetadata:
        self.access.check(token, model=name)
        model = self.repository.get(name, version)
        versions = (version,) if version else tuple(m.version for m in self.repository.versions(name))
        return ModelMetadata(
            name, versions, model.config.platform, tuple(model.inputs.values()), tuple(model.outputs.values())
        )

    def model_config(self, name: str, version: str = "", token: str | None = None) -> ModelConfig:
        self.access.check(token, model=name)
        return self.repository.get(name, version).config

    def statistics(self, name: str = "", version: str = "", token: str | None = None) -> list[StatisticsRow]:
        """Returns the statistics of one version, of all versions of a model, or of every model that the token allows.
        The statistics are summed over the processes of the server."""
        self.access.check(token, model=name or None)
        if version:
            models = [self.repository.get(name, version)]
        elif name:
            models = self.repository.versions(name)
            if not models:
                raise unknown(name)
        else:
            models = [m for m in self.repository.models() if self.access.allowed(token, m.name)]
        return self.processes.statistics(models)

    def counts(self, token: str | None = None) -> dict[str, int]:
        """Returns what the transports have counted, summed over the processes of the server."""
        self.access.check(token)
        return self.processes.counts()

    # Inference

    def infer(self, call: InferCall, reply: Reply) -> Ticket:
        """Check the call, run the model, and pass each response to ``reply``. Only a decoupled model gives several
        responses. ``reply`` is called on any thread, possibly before this method returns. Raises ``ServeError`` if the
        call is refused."""
        return self._infer(call, reply) if self.tracing is None else self.tracing.infer(self._infer, call, reply)

    def _infer(self, call: InferCall, reply: Reply) -> Ticket:
        call.owner = self.access.check(call.token, model=call.model)
        arrived = time.monotonic_ns()
        try:
            model = self._find(call)
            try:
                self._enter(call)
            except ServeError as error:
                model.refused(error, time.monotonic_ns() - arrived)
                raise
            try:
                while True:
                    request = self._read(model, call, arrived)
                    try:
                        return model.submit(request, self._answer(model, call, reply))
                    except Retired:
                        model = self._find(call)  # another version of the model has replaced this version
            except BaseException:
                self._leave(call)
                raise
        except ServeError as error:
            where = call.id or "<id_unknown>"
            text = str(error) if error.code is not Code.INVALID_ARGUMENT else f"[request id: {where}] {error}"
            raise ServeError(error.code, text) from None

    def check_served(self, name: str, version: str = "") -> None:
        """Raises ``ServeError`` if the model can't answer requests, for example because the repository lacks it."""
        self._get(name, version)

    def _find(self, call: InferCall) -> ServedModel:
        return self._get(call.model, call.version)

    def _get(self, name: str, version: str) -> ServedModel:
        try:
            return self.repository.get(name, version)
        except ServeError:
            if self._draining:
                raise stopping() from None
            raise

    def _read(self, model: ServedModel, call: InferCall, arrived: int) -> InferenceRequest:
        """Returns the request that ``call`` describes. The model's statistics count malformed calls and refused
        requests as failures."""
        try:
            if call.single and model.scheduling.decoupled:
                raise ServeError(
                    Code.UNIMPLEMENTED,
                    "ModelInfer RPC doesn't support models with decoupled transaction policy; send the request over "
                    "gRPC with ModelStreamInfer, e.g. with InferenceClient.stream",
                )
            return read_request(model, call, self.memory.of(call.owner))
        except ServeError as error:
            model.refused(error, time.monotonic_ns() - arrived)
            raise
        except Exception as error:
            model.refused(ServeError(Code.INTERNAL, str(error)), time.monotonic_ns() - arrived)
            raise

    def is_decoupled(self, name: str, version: str = "") -> bool:
        """Tells whether a request may get several responses. Returns False if the repository lacks the model."""
        try:
            return self.repository.get(name, version).scheduling.decoupled
        except ServeError:
            return False

    def _answer(self, model: ServedModel, call: InferCall, reply: Reply) -> Any:
        memory = self.memory.of(call.owner)
        spoiled = False  # set to True if ``make_reply`` fails for a response

        def answer(found: InferenceResponse | ServeError) -> None:
            nonlocal spoiled
            made: InferReply | ServeError
            final = isinstance(found, ServeError) or found.final
            try:
                made = found if isinstance(found, ServeError) else make_reply(model, call, found, memory)
            except ServeError as error:
                made = error
            except Exception as error:
                log.exception("a response could not be made", extra={"model": model.name})
                made = ServeError(Code.INTERNAL, f"the response of model '{model.name}' could not be made: {error}")
            if isinstance(made, ServeError):
                made, spoiled = made.detached(), True
            if final:
                if spoiled and isinstance(found, InferenceResponse):
                    model.spoiled(found)
                self._leave(call)
            reply(made)

        return answer

    def _enter(self, call: InferCall) -> None:
        name = call.model
        with self._lock:
            if self._draining:
                raise stopping()
            if call.holds_place:
                count = self._waiting.get(name, 0)
                if self._max_waiting and count >= self._max_waiting:
                    raise ServeError(
                        Code.UNAVAILABLE,
                        f"Exceeds maximum queue size: {count} requests wait for '{name[:256]}'; "
                        "raise --grpc-threads to let more requests wait",
                    )
                self._waiting[name] = count + 1
            self._under_way += 1
        if regions := {part.slice.region for part in (*call.inputs, *(call.outputs or ())) if part.slice is not None}:
            call.release = self.memory.of(call.owner).hold(regions)

    def _leave(self, call: InferCall) -> None:
        if call.release is not None:
            call.release()
        with self._lock:
            self._under_way -= 1
            self.answered += 1
            if call.holds_place:
                if self._waiting[call.model] == 1:
                    del self._waiting[call.model]
                else:
                    self._waiting[call.model] -= 1
            if not self._under_way:
                self._lock.notify_all()

    # Control

    def index(self, *, ready: bool = False, token: str | None = None) -> list[IndexRow]:
        self.access.check(token)
        return [row for row in self.repository.index(ready=ready) if self.access.allowed(token, row.name)]

    def load(self, name: str, parameters: Mapping[str, Any] | None = None, token: str | None = None) -> None:
        """Load or reload a model. The parameter ``config`` is a ModelConfig as JSON that replaces the model's
        ``config.pbtxt``. The parameters ``file:PATH`` are the files of a model, which replace the model's folder."""
        self.access.check(token, model=name, control=True)
        text, files = read_parameters(name, parameters or {}, allow_upload=self._upload)
        if not self.access.open:
            try:
                steps = self.repository.steps_to_load(name, read_config(name, text))
            except BadRepository as error:
                raise ServeError(Code.INVALID_ARGUMENT, str(error)) from None
            for step in steps:
                self.access.check(token, model=step, control=True)
        self.processes.load(name, text, files)

    def unload(self, name: str, parameters: Mapping[str, Any] | None = None, token: str | None = None) -> None:
        """Unload a model. The only parameter is ``unload_dependents``. A value of True also unloads the steps of an
        ensemble."""
        self.access.check(token, model=name, control=True)
        dependents = (parameters or {}).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise ServeError(Code.INVALID_ARGUMENT, "unload_dependents has to be a boolean")
        for step in self.repository.steps_of(name) if dependents else ():
            self.access.check(token, model=step, control=True)
        self.processes.unload(name, dependents)

    def register_memory(self, name: str, key: str, offset: int, byte_size: int, token: str | None = None) -> None:
        owner = self.access.check(token, control=True)
        self.processes.register_memory(owner, name, key, offset, byte_size)

    def unregister_memory(self, name: str, token: str | None = None) -> None:
        owner = self.access.check(token, control=True)
        self.processes.unregister_memory(owner, name)

    def memory_status(self, name: str, token: str | None = None) -> list[Region]:
        return self.memory.of(self.access.check(token)).status(name)

    def register_cuda_memory(
        self, name: str, handle: bytes, device: int, byte_size: int, token: str | None = None
    ) -> None:
        owner = self.access.check(token, control=True)
        self.processes.register_cuda_memory(owner, name, handle, device, byte_size)

    def unregister_cuda_memory(self, name: str, token: str | None = None) -> None:
        owner = self.access.check(token, control=True)
        if name and not cuda_regions.available():
            text = f"failed to unregister CUDA shared memory region: '{name}', GPUs not supported"
            raise ServeError(Code.UNIMPLEMENTED, text)
        self.processes.unregister_cuda_memory(owner, name)

    def cuda_memory_status(self, name: str, token: str | None = None) -> list[CudaRegion]:
        return self.memory.of(self.access.check(token)).cuda_status(name)

    def trace_settings(
        self, model: str, changes: Mapping[str, list[str] | None], token: str | None = None
    ) -> dict[str, list[str]]:
        """Make ``changes`` to the trace settings of ``model``, or of the server if ``model`` is empty, and return the
        settings. None clears a setting."""
        self.access.check(token, model=model or None, control=bool(changes))
        if model:
            self.repository.get(model)
        if changes:
            self.processes.change_trace_settings(model, dict(changes))
        return self.local.trace.of(model)

    def log_settings(self, changes: Mapping[str, Parameter], token: str | None = None) -> dict[str, Parameter]:
        """Make ``changes`` to the log settings, and return the settings."""
        self.access.check(token, control=bool(changes))
        if changes:
            self.processes.change_log_settings(dict(changes))
        return self.local.logging.all()

    # Ending

    def leave(self) -> None:
        """Report that the server isn't ready, so that load balancers choose other servers. Requests are still taken."""
        self._leaving = True
        self._changed()

    def drain(self, timeout: float) -> bool:
        """Take no new requests, and wait until every request is answered. Returns False if the wait exceeds ``timeout``
        seconds."""
        self._draining = True
        self._changed()
        with self._lock:
            return self._lock.wait_for(lambda: not self._under_way, timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Release every model and every region of shared memory. Waits at most ``timeout`` seconds for the models to
        answer."""
        self._draining = True
        self.repository.close(timeout)
        self.memory.keep(())
        self.local.uploads.close()
        if self.tracing is not None:
            self.tracing.close()

    @property
    def taking(self) -> bool:
        """Tells whether the server takes new requests. Returns False after ``drain``."""
        return not self._draining

    @property
    def leaving(self) -> bool:
        """Tells whether the server is about to end, or ends. Returns True after ``leave`` or ``drain``."""
        return self._leaving or self._draining

    @property
    def under_way(self) -> int:
        """Returns the number of accepted requests that are not answered yet."""
        return self._under_way


def stopping() -> ServeError:
    """Returns the error of a request that comes too late. Clients send a request again after this error."""
    return ServeError(Code.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new requests")
