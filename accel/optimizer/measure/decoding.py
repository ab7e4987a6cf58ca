"""Times the steps of a decoder with the cache in the form in which a generation holds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from accel.proof.gates import cast_feeds
from accel.runtimes.base import BaseSession, open_session
from accel.runtimes.kv.cache import open_cache
from accel.signature import Feeds, Signature
from accel.signature.decoder import IDS, LOGITS, Cache

from .workload import PassCandidate

if TYPE_CHECKING:
    import numpy as np


class DecodingPass:
    """A session in which one call of ``run`` is one step of a decoder for each request of a ``PassCandidate``. Every
    call begins with the caches of the requests."""

    def __init__(self, candidate: PassCandidate) -> None:
        self._session: BaseSession = open_session(candidate.artifact, candidate.runtime, candidate.options)
        layout = Cache.of(self._session.signature)
        assert layout is not None, "the model is a decoder"
        self._steps = [self._step(layout, cast_feeds(self._session, feeds)) for feeds in candidate.mix]

    def _step(self, layout: Cache, feeds: Feeds) -> Callable[[], np.ndarray]:
        cache = open_cache(self._session, layout, len(feeds[IDS]))
        cache.load({spec.name: feeds[spec.name] for spec in layout.past})
        return partial(cache.peek, {name: value for name, value in feeds.items() if name not in layout.presents})

    @property
    def signature(self) -> Signature:
        return self._session.signature

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:  # noqa: ARG002 - the requests are known beforehand
        """Returns the logits of each request. The name of an output contains the number of the request."""
        return {f"{LOGITS} of request {n}": step() for n, step in enumerate(self._steps)}

    def close(self) -> None:
        """Closes the session."""
        self._session.close()
