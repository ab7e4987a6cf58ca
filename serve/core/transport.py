"""The seam between the wire and the server: what a transport hands over and gets back, in no wire's own types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from accel.serve.inference import Parameter, ServeError

if TYPE_CHECKING:
    import numpy as np

    from accel.serve.tls import Tls


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a registered shared-memory region, in bytes."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(slots=True)
class WireInput:
    """An input as it came: ``raw`` bytes, or ``values`` one by one, or a ``slice`` of shared memory."""

    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes | memoryview | None = None
    values: Sequence[Any] | None = None
    slice: Slice | None = None


@dataclass(slots=True)
class WantedOutput:
    """An output that is asked for. ``classification``: how many classes, 0 for the tensor itself. ``parameters``: what
    the transport alone understands."""

    name: str
    classification: int = 0
    slice: Slice | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(slots=True)
class InferCall:
    """One request for inference. ``outputs`` None is all of them. ``deadline``: seconds on ``time.monotonic()``'s clock
    after which nobody waits. ``token``: the bearer token it came with; ``owner``: whose it is, which the server finds
    out. ``single``: one response is all there can be.
    ``holds_thread``: one of the transport's waits for the reply. ``binary``: how the transport gives back outputs that
    weren't asked for by name. ``trace``: the ``TRACE_HEADERS`` that it came with; looked for where the server
    traces."""

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
    """``array`` None: the data lies in the shared memory that was asked for."""

    name: str
    datatype: str
    shape: Sequence[int]
    array: np.ndarray | None
    slice: Slice | None = None


@dataclass(slots=True)
class InferReply:
    """``final``: nothing follows for this request. ``hidden``: it says only that, to a client that didn't ask."""

    model: str
    version: str
    id: str
    outputs: list[ReplyTensor]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = True
    hidden: bool = False


Reply = Callable[[InferReply | ServeError], None]


class Transport(Protocol):
    """Something that listens, calls ``InferenceServer`` and knows its own wire."""

    def start(self) -> int:
        """Listen; the port."""
        ...

    def renew(self, tls: Tls) -> None:
        """Take these certificates for new connections. ``UnsupportedHere`` where they can't be used: the old stay."""
        ...

    def stop(self, grace: float) -> None:
        """Take no new calls, let those under way end for at most ``grace`` seconds, then cut them off."""
        ...
