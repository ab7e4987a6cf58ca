"""Proposes the next tokens of a text, so that a decoder checks several tokens in one step: by a smaller decoder, or by
looking up what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from accel.errors import UnsupportedHere, UsageError
from accel.signature.decoder import is_stateful
from accel.spelling import option

from ..decoder import Decoder
from ..sampling import Sampler, Sampling
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

# The name of the draft that looks up tokens.
NGRAM = "ngram"
# The numbers of last tokens that are looked up, the longest first.
_LOOKED_UP = (4, 3, 2, 1)


class Draft(Protocol):
    """Proposes tokens. Wrong proposals cost time, and never change an answer."""

    def begin(self, sampling: Sampling, rows: int, ends: Collection[int]) -> None:
        """Forgets the text. ``rows`` is the number of rows of the generation, which are drafted one after the other.
        Nothing follows the tokens ``ends``."""

    def propose(self, row: int, text: Sequence[int], prompt: int, most: int, sampler: Sampler) -> list[int]:
        """Returns up to ``most`` tokens that may follow ``text`` in ``row``. The first ``prompt`` tokens are the
        prompt, and ``sampler`` will choose the real tokens."""


class Ngrams:
    """Proposes what followed the last tokens at their latest earlier occurrence in the text."""

    def begin(self, sampling: Sampling, rows: int, ends: Collection[int]) -> None:
        """Does nothing, because only the text counts."""

    def propose(self, row: int, text: Sequence[int], prompt: int, most: int, sampler: Sampler) -> list[int]:  # noqa: ARG002
        """Returns the tokens after the longest match of up to four tokens."""
        import numpy as np

        tokens = np.asarray(text)
        for size in _LOOKED_UP:
            if len(tokens) <= size:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            found = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if len(found):
                start = int(found[-1]) + size
                return [int(token) for token in tokens[start : start + most]]
        return []


class SmallDecoder:
    """Proposes the tokens that a smaller decoder chooses, with the random numbers that choose the real ones. Where both
    decoders agree about the probabilities, they therefore choose the same tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def begin(self, sampling: Sampling, rows: int, ends: Collection[int]) -> None:
        """Begins with an empty cache at the first proposal."""
        self._ends = ends
        self._sampler = Sampler(sampling, rows)
        self._row = -1

    def propose(self, row: int, text: Sequence[int], prompt: int, most: int, sampler: Sampler) -> list[int]:
        """Returns the tokens that the smaller decoder chooses. A text that is longer than its context gets none."""
        import numpy as np

        if row != self._row:
            self._row, self._steps = row, FedSteps(self._decoder)
        context = self._decoder.tokens.context
        count = most if context is None else min(most, context - len(text))
        self._sampler.follow(sampler, row)
        tokens = list(text)
        for _ in range(count):
            logits = self._steps.logits(tokens, 1)[0][: self._decoder.vocabulary]
            if not np.isfinite(logits.max()):
                break
            tokens.append(self._sampler.choose(row, logits, tokens, prompt))
            if tokens[-1] in self._ends:
                break
        return tokens[len(text) :]


class FedSteps:
    """Runs one row of a decoder. The cache forgets tokens that a text no longer has, and gets those that it adds."""

    def __init__(self, decoder: Decoder, source: Sequence[int] = ()) -> None:
        self.running = decoder.begin([source])
        self._fed: list[int] = []

    def logits(self, text: Sequence[int], last: int) -> np.ndarray:
        """Returns the logits [last, vocabulary] after each of the last tokens of ``text``, which are fed again if the
        cache has them."""
        import numpy as np

        same = 0
        for one, other in zip(self._fed, text[: len(text) - last], strict=False):
            if one != other:
                break
            same += 1
        if same < len(self._fed):
            self.running.crop(same)
        self._fed = list(text)
        logits: np.ndarray = self.running.prompt(np.array([text[same:]], np.int64), last=last)[0]
        return logits


def check_forgets(decoder: Decoder) -> None:
    """Raises ``UnsupportedHere`` if the cache of ``decoder`` can't forget tokens."""
    if is_stateful(decoder.session.signature):
        raise UnsupportedHere(
            f"OpenVINO keeps the cache of {decoder.artifact.path}, so it can't forget tokens that a draft got wrong; "
            f"export the decoder to ONNX, or leave out {option('draft')}"
        )


def check_draft(decoder: Decoder, draft: Decoder, tokenizer: Tokenizer | None) -> None:
    """Raises ``UsageError`` if the draft's tokens aren't those of the decoder, and ``UnsupportedHere`` if the cache of
    the draft can't forget tokens."""
    if decoder.start or draft.start:
        raise UsageError(
            f"an encoder-decoder has no smaller decoder of its own; give {option('draft', NGRAM)} or leave out "
            f"{option('draft')}"
        )
    check_forgets(draft)
    known = tokenizer is not None and draft.has_tokenizer
    if decoder.vocabulary != draft.vocabulary or (known and draft.tokenizer.vocabulary() != tokenizer.vocabulary()):  # type: ignore[union-attr]
        raise UsageError(
            f"the tokens of the draft {draft.artifact.path.parent} aren't those of {decoder.artifact.path.parent} "
            f"({draft.vocabulary} and {decoder.vocabulary} ids); give a smaller decoder with the same tokenizer, or "
            f"{option('draft', NGRAM)}"
        )
