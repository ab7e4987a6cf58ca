"""Feeds given texts through a decoder in several steps, as a generation would, and collects the logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from accel.cancel import check_cancelled
from accel.errors import BadSource
from accel.runtimes.base import Session
from accel.runtimes.kv.cache import open_cache
from accel.signature import Feeds, Signature
from accel.signature.decoder import IDS, MASK, PARTS, POSITIONS, Cache, is_stateful, precision_name
from accel.signature.encoder_decoder import Caches

if TYPE_CHECKING:
    import numpy as np

# The most tokens of a prompt that run at once. More would be no faster, and would need more memory for their logits: a
# prompt of 1,024 tokens of a Llama with 215 MiB of int4 weights takes 335 MiB instead of 506 with 512 tokens at once.
PROMPT_TOKENS = 128


class StepCache(Protocol):
    """The keys and values of a batch, wherever they are kept: in arrays, in the runtime, or beside an encoder's."""

    def step(self, feeds: Feeds) -> np.ndarray:
        """Runs the model with the inputs ``feeds`` beside the cache. Returns the logits [rows, new tokens, vocabulary],
        and adds the new tokens to the cache."""

    def reorder(self, rows: Iterable[int]) -> None:
        """Puts the rows into a new order. A row may be repeated or left out."""

    def crop(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of each row."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Returns the keys and values of each layer by name. Returns no arrays if the runtime keeps them."""


class Replay:
    """Holds the cache, the mask and the number of tokens of a batch while texts run through a decoder.

    Texts of unequal lengths are padded on the left. ``cache`` is by default an empty one for ``rows`` rows.
    ``adapter`` has the matrices of a LoRA adapter, by the names of the inputs that take them.
    """

    def __init__(
        self, session: Session, rows: int, cache: StepCache | None = None, adapter: Feeds | None = None
    ) -> None:
        import numpy as np

        self._takes = {spec.name for spec in session.signature.inputs}
        self._cache = cache or _opened(session, rows)
        self._mask = np.zeros((rows, 0), np.int64)
        self._adapter: Feeds = adapter or {}

    def step(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Runs the next tokens ``ids`` [rows, count] and returns their logits [rows, count, vocabulary]. ``mask``
        [rows, count] has a 0 for each token that is padding."""
        import numpy as np

        count = ids.shape[1]
        self._mask = np.concatenate([self._mask, np.ones_like(ids) if mask is None else mask], axis=1)
        positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -count:]
        feeds = {IDS: ids, MASK: self._mask, POSITIONS: positions}
        taken = {name: value for name, value in feeds.items() if name in self._takes}
        logits = self._cache.step({**taken, **self._adapter})
        return np.asarray(logits, np.float32)

    def prompt(self, ids: np.ndarray, mask: np.ndarray | None = None, last: int = 1) -> np.ndarray:
        """Runs a prompt ``ids`` [rows, count] and returns the logits of its ``last`` tokens [rows, last, vocabulary]. A
        model computes the logits of all tokens that it gets, so a long prompt runs in parts. No part has only padding,
        and the last part has the ``last`` tokens."""
        count = ids.shape[1]
        padding = 0 if mask is None else count - int(mask.sum(axis=1).min())
        start, end = 0, max(PROMPT_TOKENS, padding + 1)
        while True:
            end = count if count - end < last else end
            logits = self.step(ids[:, start:end], None if mask is None else mask[:, start:end])
            if end == count:
                return logits[:, -last:]
            del logits  # the next part doesn't run beside them
            check_cancelled()
            start, end = end, end + PROMPT_TOKENS

    def first_broken_layer(self) -> int | None:
        """Returns the first layer whose keys or values have a NaN or an infinity. Returns None if there is none, or if
        the runtime keeps the cache."""
        import numpy as np

        parts = enumerate(self._cache.arrays().values())
        broken = (n for n, value in parts if not np.isfinite(value.astype(np.float32)).all())
        found = next(broken, None)
        return None if found is None else found // len(PARTS)

    def reorder(self, rows: Iterable[int]) -> None:
        """Puts the rows of the cache into a new order. A row may be repeated."""
        order = list(rows)
        self._cache.reorder(order)
        self._mask = self._mask[order]

    def crop(self, tokens: int) -> None:
        """Keeps the first ``tokens`` tokens of each row, with their padding."""
        self._cache.crop(tokens)
        self._mask = self._mask[:, :tokens]


def _opened(session: Session, rows: int) -> StepCache:
    """Returns an empty cache for ``rows`` rows, as the runtime of ``session`` keeps it."""
    if not is_stateful(session.signature):
        return open_cache(session, cache_of(session.signature), rows)
    from .stateful import StatefulCache

    return StatefulCache(session, rows)


def cache_of(signature: Signature) -> Cache:
    """Returns the KV cache of a decoder. Raises ``BadSource`` if the model is no decoder with a cache."""
    cache = Cache.of(signature)
    if cache is None:
        raise BadSource(
            f"the model has no KV cache, its inputs are {', '.join(spec.name for spec in signature.inputs)}; export "
            "the decoder with accel export --decoder"
        )
    return cache


def bytes_a_token(session: Session) -> int:
    """Returns the number of bytes that a decoder's cache grows by for each token of a row. Raises ``BadSource`` if the
    model is no decoder with a cache."""
    if (pair := Caches.of(session.signature)) is not None:
        return pair.own.bytes_a_token()
    if not is_stateful(session.signature):
        return cache_of(session.signature).bytes_a_token()
    from .stateful import state_bytes_a_token

    return state_bytes_a_token(session)


def cache_precision(session: Session) -> str:
    """Returns the precision in which a decoder's session really keeps keys and values. Several are joined by a
    comma."""
    if is_stateful(session.signature):
        from .stateful import kept_in

        return ", ".join(kept_in(session))
    own: Mapping[str, int] = getattr(session, "cache_kept_in", dict)()
    if own:
        return ", ".join(own)
    pair = Caches.of(session.signature)
    cache = pair.own if pair is not None else cache_of(session.signature)
    return ", ".join(dict.fromkeys(precision_name(spec.dtype) for spec in cache.past))


def padded(texts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids [rows, longest] of texts that are padded on the left, and a mask of the same shape with a 0
    for each token that is padding."""
    import numpy as np

    longest = max(map(len, texts))
    ids = np.stack([np.pad(np.asarray(text, np.int64), (longest - len(text), 0)) for text in texts])
    mask = np.stack([np.arange(longest) >= longest - len(text) for text in texts]).astype(np.int64)
    return ids, mask


def replay(
    session: Session,
    texts: Sequence[np.ndarray],
    steps: Sequence[int],
    order: Sequence[int] | None = None,
    running: Replay | None = None,
) -> list[np.ndarray]:
    """Returns the logits of each text, [length, vocabulary].

    ``texts`` are padded on the left to equal lengths, and run in steps of the sizes ``steps``. ``order`` puts the rows
    into a new order after the first step, and the results are in the new order. ``running`` has begun already, if the
    decoder needs more than the texts.
    """
    import numpy as np

    ids, mask = padded(texts)
    assert sum(steps) == ids.shape[1], "the steps cover the longest text"
    found: list[np.ndarray] = []
    start = 0
    running = running or Replay(session, len(texts))
    for number, size in enumerate(steps):
        if order is not None and number == 1:
            running.reorder(order)
            ids, mask, found = ids[list(order)], mask[list(order)], [one[list(order)] for one in found]
        part = slice(start, start + size)
        found.append(running.step(ids[:, part], mask[:, part]))
        start += size
    logits = np.concatenate(found, axis=1)
    return [row[kept != 0] for row, kept in zip(logits, mask, strict=True)]
