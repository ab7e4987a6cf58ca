"""Caches responses, so that repeated requests are answered without running the model."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cachetools import LRUCache

from ..protocol.inference import (
    Answer,
    Durations,
    Executor,
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    ServeError,
    Ticket,
)
from .queue import request_bytes
from .statistics import Recorder, merged, ns

Key = tuple[int, bytes]
_Row = tuple[Mapping[str, np.ndarray], int]  # the outputs and their size in bytes

# The estimated number of bytes of an entry, without the entry's arrays.
_OVERHEAD = 512


class ResponseCache:
    """Keeps at most ``max_bytes`` of outputs and drops the least recently used entries first. Several models may share
    a cache."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._found: LRUCache[Key, _Row] = LRUCache(max_bytes, getsizeof=lambda row: row[1])
        self._owners = itertools.count()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes in the cache."""
        return int(self._found.currsize)

    def new_owner(self) -> int:
        """Returns a new number for each load of a model version, because the weights may have changed between two
        loads."""
        return next(self._owners)

    def get(self, key: Key) -> Mapping[str, np.ndarray] | None:
        """Returns the cached outputs as read-only arrays, or None if ``key`` is not in the cache."""
        with self._lock:
            row = self._found.get(key)
        return None if row is None else row[0]

    def put(self, key: Key, outputs: Mapping[str, np.ndarray]) -> None:
        """Caches a copy of ``outputs``, because a session's output is often a view of a larger array, and may be
        overwritten."""
        size = request_bytes(outputs) + _OVERHEAD
        if size > self.max_bytes:
            return
        kept = {name: np.array(value) for name, value in outputs.items()}
        for value in kept.values():
            value.flags.writeable = False
        with self._lock:
            self._found[key] = (kept, size)

    def forget(self, owner: int) -> None:
        """Drops the entries of an unloaded version."""
        with self._lock:
            for key in [key for key in self._found if key[0] == owner]:
                del self._found[key]


def request_digest(request: InferenceRequest, *, name: str, version: str) -> bytes:
    """Returns a hash of the model, its version, the inputs and the requested outputs.

    The hash is cryptographic. With a weak hash, a client could forge a request with the same hash as another client's
    request. The forged request would determine the other client's answer.
    """
    digest = hashlib.blake2b(repr((name, version, request.outputs)).encode(), digest_size=32)
    for key in sorted(request.inputs):
        value = request.inputs[key]
        digest.update(repr((key, value.dtype.name, value.shape)).encode())
        if value.dtype.hasobject:
            for item in value.flat:
                data = item if isinstance(item, bytes) else str(item).encode()
                digest.update(f"{type(item).__name__}{len(data)}:".encode())
                digest.update(data)
        elif value.dtype.kind in "US":
            digest.update(value.tobytes())
        else:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.digest()


@dataclass
class _Hit:
    """The ``Ticket`` of a request that was answered from the cache."""

    durations: Durations = field(default_factory=Durations)

    def cancel(self) -> None:
        """Does nothing, because the request already has its answer."""


class CachingExecutor:
    """An ``Executor`` that answers repeated requests from a cache and passes other requests to ``inner``. Errors are
    not cached."""

    def __init__(
        self, inner: Executor, cache: ResponseCache, *, name: str, version: str, clock: Callable[[], float]
    ) -> None:
        self.inner = inner
        self.name = name
        self.version = version
        self._cache = cache
        self._owner = cache.new_owner()
        self._clock = clock
        self._lock = threading.Lock()
        self._recorder = Recorder(time.time)
        self._closed = False

    def submit(self, request: InferenceRequest, answer: Answer) -> Ticket:
        """Answers the request from the cache, or passes the request to the inner executor. A cached answer is delivered
        before ``submit`` returns."""
        start = self._clock()
        if self._closed or (request.deadline is not None and request.deadline <= start):
            return self.inner.submit(request, answer)  # the inner executor refuses the request
        key = (self._owner, request_digest(request, name=self.name, version=self.version))
        outputs = self._cache.get(key)
        looked_up = ns(self._clock() - start)
        if outputs is None:
            return self.inner.submit(request, self._keeping(key, looked_up, answer))
        hit = _Hit(Durations(total=looked_up))
        with self._lock:
            self._recorder.found(looked_up)
        answer(
            InferenceResponse(
                model=self.name, version=self.version, id=request.id, outputs=outputs, durations=hit.durations
            )
        )
        return hit

    def _keeping(self, key: Key, looked_up: int, answer: Answer) -> Answer:
        """Wraps ``answer`` so that a response is cached before delivery."""

        def keep(result: InferenceResponse | ServeError) -> None:
            start = self._clock()
            if isinstance(result, InferenceResponse) and not self._closed:
                self._cache.put(key, result.outputs)
            with self._lock:
                self._recorder.figures.cache_miss.add(looked_up + ns(self._clock() - start))
            answer(result)

        return keep

    def statistics(self) -> ModelStatistics:
        """Returns the inner executor's statistics plus the cache hits. A cache hit counts as a received request and as
        a success, but not as an inference."""
        with self._lock:
            own = self._recorder.copy()
        return merged(self.inner.statistics(), own)

    def pending(self) -> int:
        return self.inner.pending()

    def poll(self) -> bool:
        """Does one step of the inner executor, which has no threads."""
        return bool(self.inner.poll())  # type: ignore[attr-defined]

    def close(self, timeout: float) -> None:
        self._closed = True
        self.inner.close(timeout)
        self._cache.forget(self._owner)
