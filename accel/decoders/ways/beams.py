"""Searches for the most likely answers with beams, as transformers does with its default options (``early_stopping``
False, ``length_penalty`` 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.cancel import check_cancelled

from ..decoder import Decoder
from ..sampling import Sampler

if TYPE_CHECKING:
    import numpy as np

    from ..generation import Generation, Row, Token

# The score of what isn't there, as in transformers.
_NONE = -1e9


@dataclass(kw_only=True)
class BeamSearch:
    """Searches the answers of each prompt with ``beams`` rows. ``sequences`` rows after one another have the same
    prompt, and get its best answers in order."""

    decoder: Decoder
    beams: int
    sequences: int

    def tokens(self, generation: Generation, check: Callable[..., None]) -> Iterator[Token]:
        """Yields the tokens of each prompt's answers after its search. ``check`` raises an error if logits aren't
        finite."""
        sampler = Sampler(generation.sampling, 1)
        for start in range(0, len(generation.rows), self.sequences):
            rows = generation.rows[start : start + self.sequences]
            for row, answer in zip(rows, self._search(rows[0], generation.most, sampler, check), strict=True):
                for token in answer:
                    yield generation.add(row, token)

    def _search(self, row: Row, most: int, sampler: Sampler, check: Callable[..., None]) -> list[list[int]]:
        """Returns the tokens of the best answers, beginning after those that ``row`` has."""
        import numpy as np

        longest = row.prompt + most
        context = self.decoder.tokens.context
        longest = longest if context is None else min(longest, context)
        running = self.decoder.begin([row.source])
        logits = running.prompt(np.array([row.tokens], np.int64))[:, -1]
        running.reorder([0] * self.beams)
        logits = logits.repeat(self.beams, axis=0)
        texts = [list(row.tokens)] * self.beams
        # All beams are alike at first, so only the first one counts.
        scores = np.array([0.0, *[_NONE] * (self.beams - 1)], np.float32)
        done = _Finished(self.beams)
        while True:
            check_cancelled()
            check(logits, running, len(texts[0]))
            best = self._best(logits, texts, scores, sampler, row.prompt)
            length = len(texts[0]) + 1
            ended = [token in self.decoder.tokens.ends or length == longest for _, _, token in best]
            found = [([*texts[beam], token], score) for score, beam, token in best]
            done.add([one for one, end in zip(found[: self.beams], ended, strict=False) if end], length - row.prompt)
            going = [(beam, one) for (_, beam, _), one, end in zip(best, found, ended, strict=True) if not end]
            going = going[: self.beams]
            if len(going) < self.beams:  # the answers have their full length
                break
            scores = np.array([score for _, (_, score) in going], np.float32)
            if not done.can_improve(float(scores[0]), length - row.prompt):
                break
            texts = [text for _, (text, _) in going]
            running.reorder([beam for beam, _ in going])
            logits = running.step(np.array([text[-1:] for text in texts], np.int64))[:, -1]
        return [text[len(row.tokens) :] for text in done.texts[: self.sequences]]

    def _best(
        self, logits: np.ndarray, texts: Sequence[list[int]], scores: np.ndarray, sampler: Sampler, prompt: int
    ) -> list[tuple[float, int, int]]:
        """Returns the score, the beam and the token of the best continuations. There are so many that enough of them
        go on if all tokens that end a text are among them."""
        import numpy as np

        pairs = zip(logits, texts, strict=True)
        rows = [sampler.scores(0, _log_probabilities(one), text, prompt) for one, text in pairs]
        total = (np.stack(rows) + scores[:, None]).ravel()
        count = min(max(2, 1 + len(self.decoder.tokens.ends)) * self.beams, len(total))
        order = np.argsort(-total, kind="stable")[:count]
        width = logits.shape[1]
        return [(float(total[at]), int(at) // width, int(at) % width) for at in order]


class _Finished:
    """The best finished answers, as many as there are beams."""

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._found: list[tuple[float, list[int]]] = []

    @property
    def texts(self) -> list[list[int]]:
        """Returns the texts, the best first."""
        return [text for _, text in self._found]

    def add(self, ended: Sequence[tuple[list[int], float]], length: int) -> None:
        """Adds texts with their scores, which count for each of ``length`` tokens."""
        import numpy as np

        new = [(float(np.float32(score) / np.float32(length)), text) for text, score in ended]
        self._found = sorted([*self._found, *new], key=lambda one: -one[0])[: self._beams]

    def can_improve(self, best: float, length: int) -> bool:
        """Tells whether a running text with the score ``best`` may still be better than the worst finished one."""
        return len(self._found) < self._beams or best / length > self._found[-1][0]


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    import numpy as np

    shifted = logits.astype(np.float32) - logits.max()
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return found
