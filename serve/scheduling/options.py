"""How the requests of a model are queued, batched and run: the options, as the repository's config gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from accel.serve.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """Bounds of one queue (one for each priority level). 0 is unbounded.

    ``timeout_us``: how long a request may wait; ``timeout_action``: ``reject`` (UNAVAILABLE, "Request timeout expired")
    or ``delay`` (behind those that are in time). ``allow_override``: a request may ask for a shorter timeout.
    """

    max_queue_size: int = 0
    timeout_us: int = 0
    timeout_action: str = "reject"
    allow_override: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthBatching:
    """Batching of inputs that differ in one dim. ``dim``: its name in the signature. ``mask``: the input that says
    which positions are real (made where the client sent none). ``pad``: value by input, 0 where not named.
    ``outputs``: axis to cut back to the request's own length, by output. ``grouped`` False makes batches in the order
    of arrival, whatever the lengths, and pads them to their longest."""

    dim: str
    mask: str | None = None
    pad: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    grouped: bool = True


@dataclass(frozen=True, kw_only=True)
class SequenceBatching:
    """Stateful models. ``states``: output name -> input name that gets it at the sequence's next request.
    ``controls``: START, END, READY, CORRID -> input name. ``values``: what a control holds where it doesn't apply and
    where it does, 0 and 1 where not named. ``initial``: by input name the state of a new sequence, without the batch;
    zeros where not named. ``max_idle_us``: a sequence silent for longer ends."""

    states: Mapping[str, str] = field(default_factory=dict)
    controls: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    initial: Mapping[str, np.ndarray] = field(default_factory=dict)
    max_idle_us: int = 1_000_000_000
    max_sequences: int = 1024


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """``max_batch_size``: 0 where the model has no batch dim (each request is run alone). ``dynamic``: requests of
    several callers may be run together. ``preferred``: batch sizes to wait for. ``max_delay_us``: how long the oldest
    may wait for company. ``allowed``: batch sizes that the model takes at all, None for every. ``profiles``: of an
    engine, which say what sizes it takes at which other shapes. ``queue_rows``/``queue_bytes``: what may wait in all,
    over every priority. ``response_cache``: equal requests are answered from the cache of the server. ``eager``: a
    request that finds an instance idle and the queue empty is run at once, whatever ``max_delay_us`` and ``preferred``
    say; False waits for company even then, as Triton does.
    ``resources``: what a run takes of what the models share, by name; ``resource_priority``: see ``rate_limit.py``.
    """

    max_batch_size: int = 0
    dynamic: bool = False
    preferred: tuple[int, ...] = ()
    max_delay_us: int = 0
    allowed: tuple[int, ...] | None = None
    profiles: tuple[Profile, ...] = ()
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority: int = 0
    default_policy: QueuePolicy = field(default_factory=QueuePolicy)
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    instances: int = 1
    threads: int = 0
    queue_rows: int = 4096
    queue_bytes: int = 1 << 30
    lengths: LengthBatching | None = None
    sequence: SequenceBatching | None = None
    decoupled: bool = False
    response_cache: bool = False
    eager: bool = True
    resources: Mapping[str, int] = field(default_factory=dict)
    resource_priority: int = 1

    @property
    def server_inputs(self) -> frozenset[str]:
        """Inputs that the server makes (states and controls of a sequence): a client doesn't send them."""
        sequence = self.sequence
        return frozenset() if sequence is None else frozenset([*sequence.states.values(), *sequence.controls.values()])

    @property
    def optional_inputs(self) -> frozenset[str]:
        """Inputs that a client may leave out, because the server then makes them (the mask of lengths)."""
        return frozenset([self.lengths.mask] if self.lengths is not None and self.lengths.mask is not None else [])
