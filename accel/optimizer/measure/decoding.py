"""Times the steps of a decoder with the cache in the form in which a generation holds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from accel.decoders.stateful import StatefulCache
from accel.proof.gates import cast_feeds
from accel.runtimes.base import BaseSession, open_session
from accel.runtimes.kv.cache import open_cache
from accel.signature import Feeds, Signature
from accel.signature.decoder import IDS, LOGITS, MASK, POSITIONS, Cache, is_stateful

from .workload import PassCandidate

if TYPE_CHECKING:
    import numpy as np


# A cache that the runtime keeps grows with each step. After this many steps, it is filled again.
_STEPS = 32


class DecodingPass:
    """A session in which one call of ``run`` is one step of a decoder for each request of a ``PassCandidate``. Every
    call begins with the caches of the requests. A cache that the runtime keeps may have up to 31 tokens more."""

    def __init__(self, candidate: PassCandidate) -> None:
        self._session: BaseSession = open_session(candidate.artifact, candidate.runtime, candidate.options)
        self._repeats = candidate.repeats
        self._signature = candidate.signature or self._session.signature
        layout = Cache.of(self._signature)
        assert layout is not None, "the model is a decoder"
        make = self._stateful_step if is_stateful(self._session.signature) else self._step
        self._steps = [make(layout, cast_feeds(self._session, feeds)) for feeds in candidate.mix]

    def _step(self, layout: Cache, feeds: Feeds) -> Callable[[], np.ndarray]:
        cache = open_cache(self._session, layout, len(feeds[IDS]))
        cache.load({spec.name: feeds[spec.name] for spec in layout.past})
        return partial(cache.peek, {name: value for name, value in feeds.items() if name not in layout.presents})

    def _stateful_step(self, layout: Cache, feeds: Feeds) -> Callable[[], np.ndarray]:
        import numpy as np

        past = {spec.name: feeds[spec.name] for spec in layout.past}
        takes = {spec.name for spec in self._session.signature.inputs}
        given = {name: value for name, value in feeds.items() if name in takes}
        rows = len(feeds[IDS])
        cache, done = StatefulCache(self._session, rows, past), 0

        def step() -> np.ndarray:
            nonlocal cache, done
            if done == _STEPS:
                cache, done = StatefulCache(self._session, rows, past), 0
            more = dict(given)
            if MASK in more:
                more[MASK] = np.concatenate([more[MASK], np.ones((rows, done), more[MASK].dtype)], axis=1)
            if POSITIONS in more:
                more[POSITIONS] = more[POSITIONS] + done
            done += 1
            return cache.step(more)

        return step

    @property
    def signature(self) -> Signature:
        return self._signature

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:  # noqa: ARG002 - the requests are known beforehand
        """Returns the logits of each request. The name of an output contains the number of the request."""
        for _ in range(self._repeats):
            found = [step() for step in self._steps]
        return {f"{LOGITS} of request {n}": logits for n, logits in enumerate(found)}

    def close(self) -> None:
        """Closes the session."""
        self._session.close()
