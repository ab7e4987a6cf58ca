"""The options by which a model's requests are queued, batched and run. The repository's config gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .profiles import Profile


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """Bounds of the queue of one priority level. 0 means no bound.

    ``max_queue_size``: requests that may wait. ``timeout_us``: how long a request may wait. ``timeout_action``:
    ``reject`` fails an expired request (UNAVAILABLE, "Request timeout expired"); ``delay`` serves it after the requests
    that are in time. ``allow_override``: a request may set a shorter timeout.
    """

    max_queue_size: int = 0
    timeout_us: int = 0
    timeout_action: str = "reject"
    allow_override: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthBatching:
    """Batching of inputs that differ in one dim.

    ``dim``: the name of the dim in the signature. ``mask``: the input that says which positions are real; the server
    makes it if the client sent none. ``pad``: the padding value of each input, 0 by default. ``outputs``: the outputs
    to cut to the request's own length, each with the axis to cut. ``grouped``: True groups requests by length; False
    makes batches in the order of arrival and pads each to its longest request.
    """

    dim: str
    mask: str | None = None
    pad: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    grouped: bool = True


@dataclass(frozen=True, kw_only=True)
class SequenceBatching:
    """Options of a stateful model.

    ``states``: output name -> name of the input that gets this output at the sequence's next request. ``controls``:
    START, END, READY, CORRID -> input name. ``values``: by control its value for false and for true, 0 and 1 by
    default. ``initial``: by input name the state of a new sequence, without the batch dim, zeros by default.
    ``max_idle_us``: a sequence without a request for longer ends. ``max_sequences``: open sequences at a time.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    controls: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    initial: Mapping[str, np.ndarray] = field(default_factory=dict)
    max_idle_us: int = 1_000_000_000
    max_sequences: int = 1024


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Options of one model.

    ``max_batch_size``: rows of the largest batch; 0 means that the model has no batch dim and runs each request alone.
    ``dynamic``: requests of several callers may be run together. ``preferred``: batch sizes to wait for.
    ``max_delay_us``: how long the oldest request may wait for others. ``allowed``: the batch sizes that the model
    takes; None means every size. ``profiles``: the optimization profiles of an engine. ``queue_rows``/``queue_bytes``:
    rows and bytes that may wait in total, over all priority levels. ``response_cache``: equal requests are answered
    from the server's cache. ``eager``: True runs a request at once that finds an instance idle and the queue empty,
    whatever ``max_delay_us`` and ``preferred`` say; False lets the request wait for others, as Triton does.
    ``resources``: by name the amount of a shared resource that one run takes. ``resource_priority``: see
    ``rate_limit.py``.
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
        """Returns the inputs that only the server makes: states and controls of a sequence."""
        sequence = self.sequence
        return frozenset() if sequence is None else frozenset([*sequence.states.values(), *sequence.controls.values()])

    @property
    def optional_inputs(self) -> frozenset[str]:
        """Returns the inputs that the server makes if a client leaves them out: the mask of lengths."""
        return frozenset([self.lengths.mask] if self.lengths is not None and self.lengths.mask is not None else [])
