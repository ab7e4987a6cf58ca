"""Defines the options for queueing, batching and running a model's requests, as read from ``config.pbtxt``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .profiles import Profile


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """Limits on the queue of one priority level. The value 0 means no limit.

    ``max_queue_size`` is the number of requests that may wait. ``timeout_us`` is the longest wait of a request. With
    ``timeout_action="reject"``, a request that has waited for more than ``timeout_us`` fails with UNAVAILABLE. With
    ``timeout_action="delay"``, a request that has waited for more than ``timeout_us`` is served after the requests that
    are in time. ``allow_override`` lets a request set a shorter timeout.
    """

    max_queue_size: int = 0
    timeout_us: int = 0
    timeout_action: str = "reject"
    allow_override: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthBatching:
    """Options for batching inputs that differ in one dim.

    ``dim`` is the name of the dim in the signature. ``mask`` is the input that marks the real positions. The server
    makes the mask if the client sends no mask. ``pad`` maps an input to its padding value, 0 by default. ``outputs``
    maps each output to the axis that is cut to the request's length. With ``grouped=True``, requests are grouped by
    length. With ``grouped=False``, batches are formed in the order of arrival and padded to the longest request.
    """

    dim: str
    mask: str | None = None
    pad: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    grouped: bool = True


@dataclass(frozen=True, kw_only=True)
class SequenceBatching:
    """Options of a stateful model.

    ``states`` maps an output to the input that receives the output's value in the sequence's next request. ``controls``
    maps START, END, READY and CORRID to input names. ``values`` maps a control to its values for false and true, which
    are 0 and 1 by default. ``initial`` maps an input to the state of a new sequence, without the batch dim. The default
    state is zeros. A sequence ends after ``max_idle_us`` without a request. At most ``max_sequences`` sequences are
    open at a time.
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

    ``max_batch_size`` is the number of rows in the largest batch. If ``max_batch_size`` is 0, the model has no batch
    dim and runs each request alone. With ``dynamic``, requests of several callers may share a batch. ``preferred``
    lists the batch sizes to wait for. The oldest request waits at most ``max_delay_us`` for other requests. ``allowed``
    lists the batch sizes that the model takes, or is None if the model takes every size. ``profiles`` are the
    optimization profiles of an engine. ``queue_rows`` and ``queue_bytes`` limit the waiting rows and bytes over all
    priority levels. With ``response_cache``, repeated requests are answered from the server's cache. With
    ``eager=True``, a request runs at once if an instance is idle and the queue is empty, whatever ``max_delay_us`` and
    ``preferred`` say. With ``eager=False``, a request waits for further requests even if an instance is idle, as in
    Triton. ``resources`` maps a shared resource to the amount that one run takes. ``rate_limit.py`` explains
    ``resource_priority``.
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
        """Returns the inputs that only the server makes: the states and controls of a sequence."""
        sequence = self.sequence
        return frozenset() if sequence is None else frozenset([*sequence.states.values(), *sequence.controls.values()])

    @property
    def optional_inputs(self) -> frozenset[str]:
        """Returns the inputs that the server makes if a client doesn't send them. The only input of this kind is the
        mask of the real positions."""
        return frozenset([self.lengths.mask] if self.lengths is not None and self.lengths.mask is not None else [])
