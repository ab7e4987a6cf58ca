"""Defines the types of an inference inside the server: request, response, error, statistics and the ``Executor``
protocol.

The types depend only on numpy, and not on protobuf, grpcio or HTTP. The transports convert their wire formats to the
types of this module and back. An ``Executor`` (in ``scheduling`` and ``models/ensembles``) turns a request into
responses.
"""

from __future__ import annotations

import bisect
import enum
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

from accel.errors import AccelError

from .gathering import Gathering

if TYPE_CHECKING:
    import numpy as np

Parameter = bool | int | float | str


class Code(enum.Enum):
    """Status codes with their gRPC names. The property ``http`` is the status code over HTTP."""

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
    """The error that a request gets instead of a response. The client gets the message unchanged."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code

    def detached(self) -> ServeError:
        """Returns this error without the traceback and without the error that caused it.

        Tracebacks hold the frames of the call, and the frames hold the request's tensors. If such a frame also holds
        the error, the tensors stay in memory until Python's garbage collector runs. An error that is passed on, and not
        raised, therefore has to be detached.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    def __reduce__(self) -> tuple[type[ServeError], tuple[Code, str]]:
        """Keeps the error's code when the error is pickled and sent to another process."""
        return ServeError, (self.code, str(self))


@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """A request for a model. ``inputs`` are arrays that were checked against the model's signature, including the batch
    dim.

    ``outputs`` names the requested outputs, or is None to request all outputs. The most urgent ``priority`` is 1, and 0
    means the model's default priority. ``timeout_us`` is the requested queue timeout in microseconds, or 0 for the
    model's default. The client stops waiting at ``deadline``, in seconds on the server's clock. If ``deadline`` is
    None, the client's wait has no limit. A ``sequence_id`` of 0 or "" means that the request belongs to no sequence. If
    ``inline`` is True, the submitting thread may run the request itself. A thread with further requests to submit sets
    ``inline`` to False, so that the requests can be batched. ``gathering`` holds the requests that arrived together
    with this one. The thread of a gathering runs requests itself only if the model's runs are brief.
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
    gathering: Gathering | None = None


@dataclass(slots=True, kw_only=True)
class InferenceResponse:
    """A response of a model. ``outputs`` are in the order of the request. ``final`` is True if no further response
    follows. Only decoupled models send several responses to a request. ``durations`` are the response's queue and
    compute times for the statistics."""

    model: str
    version: str
    id: str = ""
    outputs: Mapping[str, np.ndarray]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = True
    durations: Durations | None = None


@dataclass(slots=True, kw_only=True)
class Durations:
    """The time in nanoseconds that a request or a batch spent in each phase."""

    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    total: int = 0
    steps: list[StepDurations] | None = None  # the finished steps of an ensemble


@dataclass(frozen=True, slots=True)
class StepDurations:
    """The durations of one step of an ensemble. ``end`` is in nanoseconds since 1970."""

    model: str
    version: str
    durations: Durations
    end: int


# The callback for the responses to a request. An executor calls the callback exactly once with the final response or an
# error. The executor of a decoupled model also calls the callback for each response before the final response.
Answer = Callable[[InferenceResponse | ServeError], None]


class Ticket(Protocol):
    """A request that an executor has accepted."""

    durations: Durations

    def cancel(self) -> None:
        """Cancels the request, because the client no longer waits. A request that is still queued doesn't run, and is
        answered with CANCELLED."""


class Executor(Protocol):
    """Runs the requests of one version of one model."""

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Takes the request. If the queue is full, raises ``ServeError`` UNAVAILABLE at once.

        ``answer`` can be called on any thread. An idle instance runs the request inline, so ``answer`` may be called
        before this method returns.
        """
        ...

    def statistics(self) -> ModelStatistics:
        """Returns a consistent copy of the statistics."""
        ...

    def pending(self) -> int:
        """Returns the number of accepted requests that are not answered yet."""
        ...

    def close(self, timeout: float) -> None:
        """Refuses new requests with UNAVAILABLE. Waits at most ``timeout`` seconds for the accepted requests, then
        fails the remaining requests with UNAVAILABLE. Releases the sessions."""
        ...


@dataclass(slots=True)
class DurationStatistic:
    """The number of events of one kind, and the sum of their durations in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


# The upper bounds of the histograms' buckets in nanoseconds, with three bounds in each decade from 100 us to 10 s.
LATENCIES_NS = (*(step * 10**decade for decade in range(4, 9) for step in (10, 25, 50)), 10**10)


@dataclass(slots=True)
class Histogram:
    """A histogram of durations, which counts the durations in each bucket. The last bucket counts durations above the
    highest bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES_NS) + 1))

    def add(self, ns: int, count: int = 1) -> None:
        self.counts[bisect.bisect_left(LATENCIES_NS, ns)] += count

    def extend(self, many: list[int]) -> None:
        """Adds several durations at once."""
        many.sort()
        below = 0
        for at, bound in enumerate(LATENCIES_NS):
            count = bisect.bisect_right(many, bound)
            self.counts[at] += count - below
            below = count
        self.counts[-1] += len(many) - below

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]


@dataclass(slots=True)
class ModelStatistics:
    """Holds the fields of Triton's ModelStatistics. While no request is pending, ``received`` is the sum of the counts
    of ``success`` and ``fail``. ``request_times`` counts the same requests as ``success``.

    ``add`` sums the numbers of two processes. If a field has ``metadata={"merge": function}``, ``add`` calls the
    function instead of summing.
    """

    received: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = field(default=0, metadata={"merge": max})
    success: DurationStatistic = field(default_factory=DurationStatistic)
    fail: DurationStatistic = field(default_factory=DurationStatistic)
    cancel: DurationStatistic = field(default_factory=DurationStatistic)
    queue: DurationStatistic = field(default_factory=DurationStatistic)
    compute_input: DurationStatistic = field(default_factory=DurationStatistic)
    compute_infer: DurationStatistic = field(default_factory=DurationStatistic)
    compute_output: DurationStatistic = field(default_factory=DurationStatistic)
    cache_hit: DurationStatistic = field(default_factory=DurationStatistic)
    cache_miss: DurationStatistic = field(default_factory=DurationStatistic)
    # Maps a batch size to the durations compute_input, compute_infer and compute_output.
    batches: dict[int, tuple[DurationStatistic, DurationStatistic, DurationStatistic]] = field(default_factory=dict)
    request_times: Histogram = field(default_factory=Histogram)
    queue_times: Histogram = field(default_factory=Histogram)
    compute_times: Histogram = field(default_factory=Histogram)
    queue_depth: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0

    def add(self, other: ModelStatistics) -> None:
        """Adds ``other``, which holds the statistics of the same model from another process or from an outer
        executor."""
        for known in fields(ModelStatistics):
            mine, further = getattr(self, known.name), getattr(other, known.name)
            if isinstance(mine, DurationStatistic):
                mine.add(further.ns, further.count)
            elif isinstance(mine, Histogram):
                mine.merge(further)
            elif isinstance(mine, dict):
                for size, durations in further.items():
                    known_size = mine.setdefault(size, tuple(DurationStatistic() for _ in durations))
                    for one, more in zip(known_size, durations, strict=True):
                        one.add(more.ns, more.count)
            else:
                setattr(self, known.name, known.metadata.get("merge", operator.add)(mine, further))


# A row has the name, the version and the statistics of a model.
StatisticsRow = tuple[str, str, ModelStatistics]


def infer(executor: Executor, request: InferenceRequest, timeout: float | None = None) -> InferenceResponse:
    """Submits a request, waits for its last response, and returns this response. If the answer is a ``ServeError``, the
    function raises the error. Cancels the request and raises ``TimeoutError`` after ``timeout`` seconds."""
    waiting = threading.Lock()  # held until the last response comes; a Lock is cheaper than an Event
    waiting.acquire()
    found: list[InferenceResponse | ServeError] = []

    def answer(response: InferenceResponse | ServeError) -> None:
        found.append(response)
        if isinstance(response, ServeError) or response.final:
            waiting.release()

    ticket = executor.submit(request, answer)
    if not waiting.acquire(timeout=-1 if timeout is None else timeout):
        ticket.cancel()
        raise TimeoutError
    last = found[-1]
    if isinstance(last, ServeError):
        raise last
    return last
