"""From a model's signature and scheduling to the executor that runs its requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from accel.errors import BadConfig
from accel.serve.batcher import Batching, RowBatching
from accel.serve.cost_table import CostTable, grid, measure_costs
from accel.serve.decoupled import DecoupledExecutor, StreamingSession
from accel.serve.inference import Executor
from accel.serve.instances import QueuedExecutor
from accel.serve.lengths import LengthBatchingRows, check_lengths
from accel.serve.rate_limit import RateLimiter
from accel.serve.response_cache import CachingExecutor, ResponseCache
from accel.serve.scheduling import QueuePolicy, Scheduling
from accel.serve.sequence import SequenceExecutor
from accel.serve.sequence_state import check_sequence
from accel.signature import BATCH

if TYPE_CHECKING:
    from accel.runtimes.base import Session
    from accel.signature import Signature

_LOG = logging.getLogger(__name__)
_MOST_LEVELS = 1 << 16
OWN_CACHE_BYTES = 64 << 20


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
) -> Executor:
    """Open ``scheduling.instances`` sessions and put the queue, the batching and what else is asked for before them.

    ``clock``: seconds, what every decision is made by; ``wall``: seconds since 1970, for ``last_inference_ms``.
    ``start`` False starts no thread, see ``QueuedExecutor``. ``costs``: what runs of which size and length cost, for
    batching by length; without it that is measured on the first session, which takes about two seconds. ``cache``:
    the server's, for a model that asks for one; without it the model gets one of its own. ``limiter``: the server's,
    for a model whose runs take resources that others take, too. Raises ``BadConfig`` where the scheduling contradicts
    itself or the model, and whatever ``open_session`` raises; nothing stays open then.
    """
    check_scheduling(signature, scheduling, name=name)
    if scheduling.decoupled:
        # Streams run one by one, and long: on the instances' own threads, so that the caller can still cancel.
        scheduling = replace(scheduling, dynamic=False, eager=False)
    if scheduling.sequence is not None and scheduling.max_batch_size:
        scheduling = replace(scheduling, dynamic=True)  # steps of different sequences, as in Triton
    sessions: list[Session] = []
    try:
        for _ in range(scheduling.instances):
            opened = open_session()
            sessions += [opened] * getattr(opened, "streams", 1)  # so many runs of it may be under way at once
        if scheduling.decoupled and not isinstance(sessions[0], StreamingSession):
            raise BadConfig(f"model '{name}' is said to be decoupled, but its session has no stream(feeds)")
        batching = _batching(signature, scheduling, sessions[0], costs, name=name)
        kind = DecoupledExecutor if scheduling.decoupled else QueuedExecutor
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
        kept = ResponseCache(OWN_CACHE_BYTES) if cache is None else cache  # an empty one is false
        return CachingExecutor(queued, kept, name=name, version=version, clock=clock)
    return queued


def _batching(
    signature: Signature, scheduling: Scheduling, session: Session, costs: CostTable | None, *, name: str
) -> Batching:
    rows = RowBatching(signature, scheduling, name=name)
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
        # Random inputs can be ones that the model refuses: no reason not to serve it.
        _LOG.warning("model %s: what runs cost could not be measured (%s); positions are counted instead", name, error)
        return CostTable.proportional()


def check_scheduling(signature: Signature, scheduling: Scheduling, *, name: str) -> None:
    """Raise ``BadConfig`` where the options contradict one another or the model."""

    def refuse(what: str) -> BadConfig:
        return BadConfig(f"model '{name}': {what}")

    for field in ("max_batch_size", "max_delay_us", "priority_levels", "queue_rows", "queue_bytes"):
        if getattr(scheduling, field) < 0:
            raise refuse(f"{field} is negative; 0 leaves it out")
    if scheduling.instances < 1:
        raise refuse("there has to be at least one instance")
    if scheduling.dynamic and scheduling.max_batch_size < 1:
        raise refuse("dynamic batching needs a max_batch_size of at least 1")
    for size in scheduling.preferred:
        if not 1 <= size <= scheduling.max_batch_size:
            raise refuse(f"preferred batch size {size} is not between 1 and max_batch_size {scheduling.max_batch_size}")
    if scheduling.allowed is not None and scheduling.max_batch_size > 0:
        if not any(1 <= size <= scheduling.max_batch_size for size in scheduling.allowed):
            raise refuse(f"none of the allowed batch sizes {scheduling.allowed} is within max_batch_size")
        if any(size < 1 for size in scheduling.allowed):
            raise refuse(f"an allowed batch size of {scheduling.allowed} is below 1")
    levels = scheduling.priority_levels
    if levels > _MOST_LEVELS:
        raise refuse(f"{levels} priority levels are more than {_MOST_LEVELS}")
    if levels and not 1 <= scheduling.default_priority <= levels:
        raise refuse(f"default priority {scheduling.default_priority} is not one of the levels 1 to {levels}")
    if levels > 1 and scheduling.preserve_ordering:
        raise refuse("preserve_ordering and several priority levels contradict each other; choose one")
    for level, policy in scheduling.policies.items():
        if not 1 <= level <= levels:
            raise refuse(f"there is a queue policy for level {level}, but the levels are 1 to {levels}")
        _check_policy(policy, refuse)
    _check_policy(scheduling.default_policy, refuse)
    if scheduling.sequence is not None:
        check_sequence(signature, scheduling.sequence, name=name)
    for other in ("sequence", "response_cache", "preserve_ordering", "lengths"):
        if scheduling.decoupled and getattr(scheduling, other):
            raise refuse(f"a decoupled model can't have {other} too")
    for other in ("response_cache", "preserve_ordering", "lengths"):
        if scheduling.sequence is not None and getattr(scheduling, other):
            raise refuse(f"a model with sequences can't have {other} too")
    if scheduling.lengths is not None:
        check_lengths(signature, scheduling, scheduling.lengths, name=name)
    if scheduling.max_batch_size:
        for spec in signature.inputs:
            if not spec.shape:
                raise refuse(f"input '{spec.name}' has no dims, so max_batch_size has to be 0")


def _check_policy(policy: QueuePolicy, refuse: Callable[[str], BadConfig]) -> None:
    if policy.timeout_action not in ("reject", "delay"):
        raise refuse(f"timeout action '{policy.timeout_action}' is neither reject nor delay")
    if policy.max_queue_size < 0 or policy.timeout_us < 0:
        raise refuse("a queue policy has a negative bound; 0 is none")
