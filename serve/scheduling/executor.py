"""Makes the executor that runs a model's requests, from the model's signature and its scheduling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from accel.errors import BadConfig
from accel.signature import BATCH

from ..protocol.inference import Executor
from .batcher import Batching, RowBatching
from .cost_table import CostTable, grid, measure_costs
from .decoupled import DecoupledExecutor, StreamingSession
from .instances import QueuedExecutor
from .lengths import LengthBatchingRows, check_lengths
from .options import QueuePolicy, Scheduling
from .rate_limit import RateLimiter
from .response_cache import CachingExecutor, ResponseCache
from .sequence import SequenceExecutor
from .sequence_state import check_sequence

if TYPE_CHECKING:
    from accel.runtimes.base import Session
    from accel.signature import Signature

_LOG = logging.getLogger(__name__)
_MOST_LEVELS = 1 << 16
OWN_CACHE_BYTES = 64 << 20


class Forms(NamedTuple):
    """The classes that run a model's requests: one by one response, decoupled, and how requests become batches."""

    queued: type[QueuedExecutor] = QueuedExecutor
    decoupled: type[DecoupledExecutor] = DecoupledExecutor
    rows: type[RowBatching] = RowBatching


def make_executor(
    signature: Signature,
    scheduling: Scheduling,
    open_session: Callable[[], Session],
    *,
    name: str,
    version: str,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    start: bool = True,
    costs: CostTable | None = None,
    cache: ResponseCache | None = None,
    limiter: RateLimiter | None = None,
    forms: Forms = Forms(),  # noqa: B008 - a tuple of classes doesn't change
) -> Executor:
    """Opens ``scheduling.instances`` sessions and returns an executor that queues, batches and runs requests on the
    sessions.

    ``clock`` returns the time in seconds that every scheduling decision uses. ``wall`` returns seconds since 1970, for
    ``last_inference_ms``. With ``start=False``, no thread is started (see ``QueuedExecutor``). For batching by length,
    ``costs`` holds the duration of a run for each batch size and length. If batching by length has no ``costs``, the
    first session is measured for about two seconds. ``cache`` is the server's response cache. Without ``cache``, a
    model with ``response_cache`` gets a private cache. ``limiter`` limits the resources that models share. ``forms``
    are the classes of the executor.

    Raises ``BadConfig`` if the scheduling options contradict each other or the model. Also raises the errors of
    ``open_session``. Closes every opened session before raising an error.
    """
    check_scheduling(signature, scheduling, name=name)
    if scheduling.decoupled:
        # Requests for streams are never batched, because a stream takes long. A stream runs on an instance's thread, so
        # that the caller's thread can still cancel the stream.
        scheduling = replace(scheduling, dynamic=False, eager=False)
    if scheduling.sequence is not None and scheduling.max_batch_size:
        scheduling = replace(scheduling, dynamic=True)  # batches steps of different sequences, as Triton does
    sessions: list[Session] = []
    try:
        for _ in range(scheduling.instances):
            opened = open_session()
            sessions += [opened] * getattr(opened, "streams", 1)  # a session may allow several runs at once
        if scheduling.decoupled and not isinstance(sessions[0], StreamingSession):
            raise BadConfig(f"model '{name}' is decoupled, but its session has no method stream; remove decoupled")
        batching = _batching(signature, scheduling, sessions[0], costs, forms, name=name)
        kind = forms.decoupled if scheduling.decoupled else forms.queued
        queued = kind(
            sessions,
            batching,
            scheduling,
            name=name,
            version=version,
            clock=clock,
            wall=wall,
            start=start,
            limiter=limiter,
        )
    except BaseException:
        for session in sessions:
            session.close()
        raise
    if scheduling.sequence is not None:
        return SequenceExecutor(
            queued, signature, scheduling, scheduling.sequence, name=name, version=version, clock=clock
        )
    if scheduling.response_cache:
        kept = ResponseCache(OWN_CACHE_BYTES) if cache is None else cache  # an empty cache is falsy
        return CachingExecutor(queued, kept, name=name, version=version, clock=clock)
    return queued


def _batching(
    signature: Signature, scheduling: Scheduling, session: Session, costs: CostTable | None, forms: Forms, *, name: str
) -> Batching:
    rows = forms.rows(signature, scheduling, name=name)
    lengths = scheduling.lengths
    if lengths is None:
        return rows
    if costs is None:
        costs = _measured(session, signature, lengths.dim, rows, name=name)
    return LengthBatchingRows(signature, scheduling, lengths, name=name, costs=costs)


def _measured(session: Session, signature: Signature, dim: str, rows: RowBatching, *, name: str) -> CostTable:
    lengths = grid(signature.dims[dim].min, signature.dims[dim].max)
    sizes = [size for size in grid(rows.sizes[0] if rows.sizes else 1, rows.limit) if size in (rows.sizes or (size,))]
    try:
        return measure_costs(session, dim=dim, batch=signature.batch_dim or BATCH, sizes=sizes, lengths=lengths)
    except Exception as error:
        # A model that refuses random inputs can still be served.
        _LOG.warning("model %s: run costs could not be measured (%s); positions are counted instead", name, error)
        return CostTable.proportional()


def check_scheduling(signature: Signature, scheduling: Scheduling, *, name: str) -> None:
    """Raises ``BadConfig`` if the options contradict each other or the model."""

    def refuse(what: str) -> BadConfig:
        return BadConfig(f"model '{name}': {what}")

    for field in ("max_batch_size", "max_delay_us", "priority_levels", "queue_rows", "queue_bytes"):
        if getattr(scheduling, field) < 0:
            raise refuse(f"the option {field} is negative; write 0 or more")
    if scheduling.instances < 1:
        raise refuse(f"the number of instances is {scheduling.instances}; write at least 1")
    if scheduling.dynamic and scheduling.max_batch_size < 1:
        raise refuse("dynamic batching needs a max_batch_size of at least 1; set max_batch_size")
    for size in scheduling.preferred:
        if not 1 <= size <= scheduling.max_batch_size:
            raise refuse(f"preferred batch size {size} is not between 1 and max_batch_size {scheduling.max_batch_size}")
    if scheduling.allowed is not None and scheduling.max_batch_size > 0:
        if not any(1 <= size <= scheduling.max_batch_size for size in scheduling.allowed):
            raise refuse(f"max_batch_size is below all allowed batch sizes {scheduling.allowed}; raise max_batch_size")
        if any(size < 1 for size in scheduling.allowed):
            raise refuse(f"one of the allowed batch sizes {scheduling.allowed} is below 1; remove this size")
    levels = scheduling.priority_levels
    if levels > _MOST_LEVELS:
        raise refuse(f"{levels} priority levels are too many; write at most {_MOST_LEVELS}")
    if levels and not 1 <= scheduling.default_priority <= levels:
        raise refuse(f"default priority {scheduling.default_priority} is not a level from 1 to {levels}; set a level")
    if levels > 1 and scheduling.preserve_ordering:
        raise refuse("preserve_ordering and several priority levels contradict each other; choose one")
    for level, policy in scheduling.policies.items():
        if not 1 <= level <= levels:
            raise refuse(
                f"there is a queue policy for level {level}, but the levels are 1 to {levels}; remove the policy"
            )
        _check_policy(policy, refuse)
    _check_policy(scheduling.default_policy, refuse)
    if scheduling.sequence is not None:
        check_sequence(signature, scheduling.sequence, name=name)
    for other in ("sequence", "response_cache", "preserve_ordering", "lengths"):
        if scheduling.decoupled and getattr(scheduling, other):
            raise refuse(f"decoupled and {other} exclude each other; remove one of them")
    for other in ("response_cache", "preserve_ordering", "lengths"):
        if scheduling.sequence is not None and getattr(scheduling, other):
            raise refuse(f"sequence batching and {other} exclude each other; remove one of them")
    if scheduling.lengths is not None:
        check_lengths(signature, scheduling, scheduling.lengths, name=name)
    if scheduling.max_batch_size:
        for spec in signature.inputs:
            if not spec.shape:
                raise refuse(f"input '{spec.name}' has no dims, so max_batch_size has to be 0")


def _check_policy(policy: QueuePolicy, refuse: Callable[[str], BadConfig]) -> None:
    if policy.timeout_action not in ("reject", "delay"):
        raise refuse(f"timeout action '{policy.timeout_action}' is neither reject nor delay; write one of them")
    if policy.max_queue_size < 0 or policy.timeout_us < 0:
        raise refuse("a queue policy has a negative bound; write 0 for no bound")
