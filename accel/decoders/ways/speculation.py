"""Generates with a draft: a step checks several proposed tokens, and the cache forgets those that the decoder wouldn't
have chosen.

Every token is chosen from the decoder's own logits, with the random numbers that it has without a draft. So a draft
changes no answer, whether tokens are sampled or not, as far as a step with several tokens computes the logits of single
steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel.cancel import check_cancelled

from ..decoder import Decoder
from ..sampling import Sampler
from .draft import Draft, FedSteps

if TYPE_CHECKING:
    from ..generation import Generation, Row, Token
    from ..replay import Replay

# The number of tokens to propose at first. It grows by two if all are accepted, and shrinks by one otherwise.
_FIRST, _LEAST, _MOST = 5, 1, 16
# The single steps that are timed after the first answer, to compare with.
_TIMED = 9


@dataclass(kw_only=True)
class Drafted:
    """What a draft was good for: the proposed tokens, those that were accepted, and the seconds that all tokens but the
    first of each answer would have taken one by one, over the seconds that they took."""

    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0
    tokens: int = 0
    single: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Returns the accepted share of the proposed tokens, or 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def gain(self) -> float | None:
        """Returns how many times as fast tokens came as single steps after the first answer. Returns None if only first
        tokens were generated."""
        if not self.tokens or not self.seconds or not self.single:
            return None
        return statistics.median(self.single) * self.tokens / self.seconds


@dataclass(kw_only=True)
class Speculation:
    """Generates the rows of a generation one after the other."""

    decoder: Decoder
    draft: Draft
    drafted: Drafted = field(default_factory=Drafted)

    def tokens(self, generation: Generation, check: Callable[..., None]) -> Iterator[Token]:
        """Yields the tokens of every row. ``check`` raises an error if logits aren't finite."""
        sampler = Sampler(generation.sampling, len(generation.rows))
        self.draft.begin(generation.sampling, len(generation.rows), self.decoder.tokens.ends)
        for row in generation.rows:
            yield from self._answer(generation, row, sampler, check)

    def _answer(
        self, generation: Generation, row: Row, sampler: Sampler, check: Callable[..., None]
    ) -> Iterator[Token]:
        steps, size = FedSteps(self.decoder, row.source), _FIRST
        while not row.finish:
            check_cancelled()
            begun, before = time.perf_counter(), len(row.answer)
            proposed = self._proposed(generation, row, sampler, size) if before else []
            logits = steps.logits([*row.tokens, *proposed], len(proposed) + 1)
            check(logits, steps.running, len(row.tokens))
            made = []
            for scores, guess in zip(logits, [*proposed, None], strict=True):
                token = sampler.choose(row.number, scores, row.tokens, row.prompt)
                made.append(generation.add(row, token))
                if row.finish or token != guess:
                    break
            right = sum(one.id == guess for one, guess in zip(made, proposed, strict=False))
            if proposed:
                size = min(_MOST, size + 2) if right == len(proposed) else max(_LEAST, size - 1)
            self.drafted.proposed += len(proposed)
            self.drafted.accepted += right
            if before:
                self.drafted.tokens += len(made)
                self.drafted.seconds += time.perf_counter() - begun
            yield from made
        if len(row.answer) > 1 and not self.drafted.single:
            self._time_single(steps.running, row)

    def _proposed(self, generation: Generation, row: Row, sampler: Sampler, size: int) -> list[int]:
        """Returns the proposed tokens. The last token of the answer or of the context is never proposed, because the
        step itself adds one."""
        context = self.decoder.tokens.context
        room = generation.most - len(row.answer) - 1
        room = room if context is None else min(room, context - len(row.tokens) - 1)
        count = min(size, room)
        return self.draft.propose(row.number, row.tokens, row.prompt, count, sampler) if count > 0 else []

    def _time_single(self, running: Replay, row: Row) -> None:
        """Times steps of one token at the end of the answer, which the cache forgets. The first is a warm-up."""
        import numpy as np

        length = len(row.tokens) - 2
        running.crop(length)
        for number in range(_TIMED + 1):
            begun = time.perf_counter()
            running.step(np.array([[row.tokens[length]]], np.int64))
            if number:
                self.drafted.single.append(time.perf_counter() - begun)
            running.crop(length)
