"""The interface between a transport and the server: calls and replies, in types that belong to neither gRPC nor
HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.inference import Parameter, ServeError

if TYPE_CHECKING:
    import numpy as np

    from ..security.tls import Tls


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a registered shared-memory region: ``byte_size`` bytes from ``offset``."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(slots=True)
class WireInput:
    """An input in the client's encoding. The input's data is either in ``raw`` (bytes), in ``values`` (a list) or in
    ``slice`` (shared memory)."""

    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes | memoryview | None = None
    values: Sequence[Any] | None = None
    slice: Slice | None = None


@dataclass(slots=True)
class WantedOutput:
    """An output that the client requests. ``classification`` is the number of classes, or 0 for the tensor itself.
    ``parameters`` are the parameters that only the transport understands."""

    name: str
    classification: int = 0
    slice: Slice | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(slots=True)
class InferCall:
    """One request for inference.

    ``outputs`` is None if the client requests all outputs. ``deadline`` is the time, by ``time.monotonic()``, after
    which the client no longer waits. ``token`` is the caller's bearer token. ``owner`` is the token's name, which the
    server fills in. ``single`` is True if the transport can send one response only. ``holds_thread`` is True if a
    thread of the transport waits for the reply. ``binary=True`` sends the outputs in binary if the client did not name
    any outputs. ``trace`` holds the ``TRACE_HEADERS`` of the request, or None if the server does not trace.
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
    holds_thread: bool = False
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
    empty and final, and the client didn't ask for such a response."""

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
        """Listen, and return the port."""
        ...

    def renew(self, tls: Tls) -> None:
        """Use these certificates for new connections. Raises ``UnsupportedHere``, and keeps the old certificates, if
        the new certificates can't be used."""
        ...

    def stop(self, grace: float) -> None:
        """Take no new calls. Cut off the running calls that have not ended after ``grace`` seconds."""
        ...
