"""Defines the interface between a transport and the server. The types of calls and replies don't depend on gRPC or
HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.gathering import Gathering
from ..protocol.inference import Parameter, ServeError

if TYPE_CHECKING:
    import numpy as np

    from ..security.tls import Tls


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a registered shared-memory region. The slice starts at byte ``offset`` of the region and has
    ``byte_size`` bytes."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(slots=True)
class WireInput:
    """An input of a request, in the encoding that the client sent. The input's data is in ``raw`` (bytes), in
    ``values`` (a list) or in ``slice`` (shared memory). A ``name`` of None means the model's only input; the server
    then finds the datatype and the shape."""

    name: str | None
    datatype: str
    shape: Sequence[int]
    raw: bytes | memoryview | None = None
    values: Sequence[Any] | None = None
    slice: Slice | None = None


@dataclass(slots=True)
class WantedOutput:
    """An output that the client requests. If ``classification`` is above 0, the reply has the top ``classification``
    classes instead of the tensor. Only the transport reads ``parameters``."""

    name: str
    classification: int = 0
    slice: Slice | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(slots=True)
class InferCall:
    """One request for inference.

    ``outputs`` is None if the client requests all outputs. ``deadline`` is the value of ``time.monotonic()`` after
    which the client no longer waits. ``token`` is the caller's bearer token. ``owner`` is the token's name, which the
    server fills in. ``single`` is True if the transport can send only one response. ``holds_place`` is True if the
    transport has a limited number of places for waiting calls, such as its threads. If the client names no outputs,
    ``binary=True`` sends all outputs in binary. ``gathering`` holds the calls that arrived together with this one; the
    transport then calls ``gathering.run``. ``release`` gives back the shared memory of the call; the server fills it
    in. ``trace`` holds the ``TRACE_HEADERS`` of the request, or None if the server does not trace.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: list[WireInput] = field(default_factory=list)
    outputs: list[WantedOutput] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    token: str | None = None
    owner: str = ""
    single: bool = True
    binary: bool = False
    holds_place: bool = False
    gathering: Gathering | None = None
    release: Callable[[], None] | None = None
    trace: Mapping[str, str] | None = None


@dataclass(slots=True)
class ReplyTensor:
    """An output of a reply. ``array`` is None if the data was written to the shared memory at ``slice``."""

    name: str
    datatype: str
    shape: Sequence[int]
    array: np.ndarray | None
    slice: Slice | None = None


@dataclass(slots=True)
class InferReply:
    """One response to a call. ``final`` is True if no further response follows. ``hidden`` is True if the response is
    empty and final, and the client didn't ask for an empty final response."""

    model: str
    version: str
    id: str
    outputs: list[ReplyTensor]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = True
    hidden: bool = False


Reply = Callable[[InferReply | ServeError], None]


class Transport(Protocol):
    """Listens on a port, speaks one wire protocol, and calls ``InferenceServer``."""

    def start(self) -> int:
        """Starts to listen and returns the port."""
        ...

    def renew(self, tls: Tls) -> None:
        """Uses the certificates of ``tls`` for new connections. Keeps the old certificates and raises
        ``UnsupportedHere`` if the new certificates can't be used."""
        ...

    def finish(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until the answers of all taken calls are sent. Called after the server has
        stopped to take requests, and just before the process ends. The end of the process closes the connections."""
        ...

    def stop(self, grace: float) -> None:
        """Refuses new calls. Aborts the calls that are still running after ``grace`` seconds."""
        ...
