"""Computes the logits of tokens that read a filled KV cache, so that a cache in lower precision shows in them.

The first step of a text reads its own keys and values before they are rounded, so a text that runs at once is as exact
as with any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.decoders.replay import Replay
from accel.runtimes.base import Session

if TYPE_CHECKING:
    import numpy as np

# The tokens in the cache if the user names no numbers.
_USUAL = 128
# The texts for each number of tokens in the cache, and the tokens of a text that are judged.
_TEXTS, _JUDGED = 4, 64
# A step of several tokens reads the cache as single tokens do, and takes less time.
_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class CachedText:
    """A text of which the first ``context`` tokens are in the cache, and the source's ``logits`` [length - context,
    vocabulary] of the others."""

    ids: np.ndarray
    context: int
    logits: np.ndarray

    @property
    def judged(self) -> np.ndarray:
        """Returns the ids of the tokens after the context."""
        return self.ids[self.context :]


def contexts_to_judge(asked: Sequence[int], most: int | None) -> tuple[int, ...]:
    """Returns the numbers of tokens in the cache at which a decoder that takes ``most`` tokens is judged. Two tokens
    have to fit behind them."""
    usual = _USUAL if most is None else min(_USUAL, most // 2)
    return tuple(sorted({size for size in asked if most is None or size <= most - 2})) or (usual,)


def cached_texts(
    session: Session, windows: Sequence[np.ndarray], contexts: Sequence[int], most: int | None
) -> list[CachedText]:
    """Returns texts for each of ``contexts``, with the logits of the source ``session``. The texts consist of
    ``windows``, which are repeated if they are too short."""
    import numpy as np

    tokens, found = np.concatenate(windows), []
    for context in contexts:
        length = context + (_JUDGED if most is None else min(_JUDGED, most - context))
        for number in range(_TEXTS):
            ids = np.resize(np.roll(tokens, -(number * len(tokens) // _TEXTS)), length)
            found.append(CachedText(ids=ids, context=context, logits=logits_after(session, ids, context)))
    return found


def logits_after(session: Session, ids: np.ndarray, context: int) -> np.ndarray:
    """Returns the logits of the tokens behind the first ``context`` tokens of ``ids``, which read the others from the
    cache."""
    import numpy as np

    running = Replay(session, 1)
    running.step(ids[None, :context])
    parts = (ids[None, start : start + _AT_ONCE] for start in range(context, len(ids), _AT_ONCE))
    return np.concatenate([running.step(part)[0] for part in parts])
