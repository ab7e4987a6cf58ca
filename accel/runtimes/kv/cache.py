"""Defines ``KvCache``: the keys and values of a decoder's tokens between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel.signature import Feeds
from accel.signature.decoder import LOGITS, MASK, Cache, reordered

from ..base import Session

if TYPE_CHECKING:
    import numpy as np


# The operator that writes new keys and values into the buffer of the old ones, if both have the same buffer.
_IN_PLACE = "GroupQueryAttention"


class KvCache:
    """Runs the steps of a batch of ``rows`` rows, and hands the cache from each step to the next."""

    def __init__(self, session: Session, layout: Cache, rows: int) -> None:
        self._session = session
        self._layout = layout
        self._arrays: Mapping[str, np.ndarray] = layout.empty(rows)

    def step(self, feeds: Feeds) -> np.ndarray:
        """Runs the model with the inputs ``feeds`` beside the cache. Returns the logits [rows, new tokens, vocabulary],
        and adds the new tokens to the cache."""
        outputs = self._session.run({**feeds, **self._arrays})
        self._arrays = self._layout.after(outputs)
        return outputs[LOGITS]

    def peek(self, feeds: Feeds) -> np.ndarray:
        """Runs the model as ``step`` does, and returns the logits. The cache keeps its tokens."""
        return self._session.run({**feeds, **self._arrays})[LOGITS]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces the cache by ``arrays``, which are as those of ``arrays()``."""
        self._arrays = dict(arrays)

    def reorder(self, rows: Iterable[int]) -> None:
        """Puts the rows into a new order. A row may be repeated or left out."""
        self._arrays = reordered(self._arrays, rows)

    def crop(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of each row."""
        self._arrays = {name: value[:, :, :tokens] for name, value in self._arrays.items()}

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Returns the keys and values of each layer by the names of the inputs, [rows, kv_heads, tokens, head_dim]."""
        return self._arrays


def open_cache(session: Session, layout: Cache, rows: int) -> KvCache:
    """Returns an empty cache for ``session``, in the form that is fastest for it."""
    own = getattr(session, "open_cache", None)
    found: KvCache | None = own(layout, rows) if own is not None else None
    return found or KvCache(session, layout, rows)


def grows_in_place(path: Path, layout: Cache) -> bool:
    """Tells whether nothing but ``_IN_PLACE`` reads the cache of the decoder ``path``. The buffers of such a cache may
    have more room than tokens."""
    from accel.sources.onnx.file import all_nodes, read_without_weights

    pasts = {spec.name for spec in layout.past}
    model = read_without_weights(path)
    readers = [node for node in all_nodes(model.graph) if pasts & set(node.input)]
    read = [name for node in readers for name in node.input if name in pasts]
    takes_mask = any(value.name == MASK for value in model.graph.input)
    return takes_mask and len(read) == len(pasts) and all(node.op_type == _IN_PLACE for node in readers)


def runs_by_row(rows: int, new: int, past: int) -> bool:
    """Tells whether ``_IN_PLACE`` refuses a step, which has to run for each row alone."""
    return rows > 1 and new > 1 and past > 0
