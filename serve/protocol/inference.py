"""What one inference is inside the server: request, response, failure, and who runs it.

Everything here knows numpy only: no protobuf, no grpcio type, no HTTP. The transports (``grpc_front.py``,
``http_front.py``) turn their wire into these and back; an ``Executor`` (``executor.py``, ``sequence.py``,
``ensemble.py``) turns a request into responses.
"""

from __future__ import annotations

import bisect
import enum
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from accel.errors import AccelError

if TYPE_CHECKING:
    import numpy as np

Parameter = bool | int | float | str


class Code(enum.Enum):
    """Status codes by their gRPC names; ``http`` is the status of the REST face."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    ALREADY_EXISTS = 409
    FAILED_PRECONDITION = 412
    CANCELLED = 499
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504

    @property
    def http(self) -> int:
        return self.value


class ServeError(AccelError):
    """A request that gets an error instead of an answer. The text is what the client sees."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[ServeError], tuple[Code, str]]:
        """It crosses processes with its code."""
        return ServeError, (self.code, str(self))


@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """``inputs``: arrays that were checked against the model's signature (batch dim included).

    ``outputs``: the names asked for, None for all. ``priority``: 1 is the most urgent, 0 the model's default.
    ``timeout_us``: the queue timeout asked for, 0 for the model's default. ``deadline``: seconds on the server's
    clock after which nobody waits for the answer any more, None for never. ``sequence_id``: 0 or "" for none.
    ``inline``: whether the thread that submits it may run it; one that has further requests to submit may not, so that
    they can be run together.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: Mapping[str, np.ndarray]
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    deadline: float | None = None
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    inline: bool = True


@dataclass(slots=True, kw_only=True)
class InferenceResponse:
    """``outputs`` in the order asked for. ``final``: no further response of this request follows (decoupled models).
    ``durations``: what the statistics say of it."""

    model: str
    version: str
    id: str = ""
    outputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = True
    durations: Durations | None = None


@dataclass(slots=True, kw_only=True)
class Durations:
    """Nanoseconds a request (or a batch) spent: for statistics, metrics and traces."""

    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    total: int = 0
    steps: list[StepDurations] | None = None  # of an ensemble, those that have ended


@dataclass(frozen=True, slots=True)
class StepDurations:
    """One step of an ensemble. ``end``: in nanoseconds since 1970."""

    model: str
    version: str
    durations: Durations
    end: int


# Called exactly once with ``final=True`` or an error; before that with each partial response of a decoupled model.
Answer = Callable[[InferenceResponse | ServeError], None]


class Ticket(Protocol):
    """A request that was taken."""

    durations: Durations

    def cancel(self) -> None:
        """Nobody waits any more: it is not run if it hasn't been; answered with ``CANCELLED`` where it can be."""


class Executor(Protocol):
    """Runs the requests of one version of one model."""

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Take the request, or raise ``ServeError`` (UNAVAILABLE at once where the queue is full).

        ``answer`` may be called before this returns (an idle instance runs the request inline) and on any thread.
        """
        ...

    def statistics(self) -> ModelStatistics:
        """A consistent copy."""
        ...

    def pending(self) -> int:
        """Requests that were taken and not answered."""
        ...

    def close(self, timeout: float) -> None:
        """Take nothing new (UNAVAILABLE), answer what was taken for at most ``timeout`` seconds, then fail the rest
        with UNAVAILABLE; release the sessions."""
        ...


@dataclass(slots=True)
class DurationStatistic:
    """How often and for how many nanoseconds in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


# Upper ends of the histograms' buckets in nanoseconds: 100 us to 10 s, three to a decade.
LATENCIES_NS = (*(step * 10**decade for decade in range(4, 9) for step in (10, 25, 50)), 10**10)


@dataclass(slots=True)
class Histogram:
    """How many durations fell into which bucket; the last one is for what is above every bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES_NS) + 1))

    def add(self, ns: int, count: int = 1) -> None:
        self.counts[bisect.bisect_left(LATENCIES_NS, ns)] += count

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]


@dataclass(slots=True)
class ModelStatistics:
    """The fields of Triton's ModelStatistics. success + fail = received, always, once nothing is pending. The
    histograms are of the requests that ``success`` counts."""

    received: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    success: DurationStatistic = field(default_factory=DurationStatistic)
    fail: DurationStatistic = field(default_factory=DurationStatistic)
    cancel: DurationStatistic = field(default_factory=DurationStatistic)
    queue: DurationStatistic = field(default_factory=DurationStatistic)
    compute_input: DurationStatistic = field(default_factory=DurationStatistic)
    compute_infer: DurationStatistic = field(default_factory=DurationStatistic)
    compute_output: DurationStatistic = field(default_factory=DurationStatistic)
    cache_hit: DurationStatistic = field(default_factory=DurationStatistic)
    cache_miss: DurationStatistic = field(default_factory=DurationStatistic)
    # By batch size: input, infer, output.
    batches: dict[int, tuple[DurationStatistic, DurationStatistic, DurationStatistic]] = field(default_factory=dict)
    request_times: Histogram = field(default_factory=Histogram)
    queue_times: Histogram = field(default_factory=Histogram)
    compute_times: Histogram = field(default_factory=Histogram)
    queue_depth: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0


def infer(executor: Executor, request: InferenceRequest, timeout: float | None = None) -> InferenceResponse:
    """Submit and wait for the one response. Raises what it was answered with; TimeoutError after ``timeout`` s,
    the request being cancelled."""
    arrived = threading.Event()
    found: list[InferenceResponse | ServeError] = []

    def answer(response: InferenceResponse | ServeError) -> None:
        found.append(response)
        if isinstance(response, ServeError) or response.final:
            arrived.set()

    ticket = executor.submit(request, answer)
    if not arrived.wait(timeout):
        ticket.cancel()
        raise TimeoutError
    last = found[-1]
    if isinstance(last, ServeError):
        raise last
    return last
