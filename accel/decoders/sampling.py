"""Chooses the next token from the logits, as transformers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.errors import MissingExtra, UsageError
from accel.spelling import option

if TYPE_CHECKING:
    import numpy as np

    from .grammar import Grammar


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Without any option, the token with the largest logit is chosen.

    The options have the meaning that they have in transformers. ``presence_penalty`` is subtracted from the logits of
    all generated tokens. ``logit_bias`` maps token ids to numbers that are added to their logits. Equal seeds give
    equal tokens, also on other runtimes as far as their logits agree. ``grammar`` says which tokens may come next.

    Raises ``UsageError`` for a value that is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature is None or self.temperature > 0, "above 0")
        _check("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "of at least 1")
        _check("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, penalty is None or penalty > 0, "above 0")

    @property
    def greedy(self) -> bool:
        """Tells whether the token with the largest logit is chosen."""
        return self.temperature is self.top_k is self.top_p is self.min_p is None


def _check(name: str, value: float | None, valid: bool, takes: str) -> None:
    if valid:
        return
    also = f", or leave out {option(name)} for the most likely token" if name in ("temperature", "top_p") else ""
    raise UsageError(f"{option(name, value)} is not valid; give a number {takes}{also}")


class Sampler:
    """Chooses the next token of each row. Every row has random numbers of its own, so that the other rows of a batch
    don't change its tokens."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        import numpy as np

        self._sampling = sampling
        self._processors = _processors(sampling)
        self._answers = sampling.grammar.begin() if sampling.grammar is not None else None
        seeds = np.random.SeedSequence(sampling.seed).spawn(rows)
        self._random = [np.random.default_rng(seed) for seed in seeds]

    def follow(self, other: Sampler, row: int) -> None:
        """Goes on with the random numbers that ``other`` will use for ``row``."""
        self._random[row].bit_generator.state = other._random[row].bit_generator.state

    def scores(self, row: int, logits: np.ndarray, text: Sequence[int], prompt: int) -> np.ndarray:
        """Returns the ``logits`` [vocabulary] of ``row`` after the grammar, penalties, biases and the limits of
        sampling. The tokens so far are ``text``, of which the first ``prompt`` are the prompt."""
        import numpy as np

        scores = logits.astype(np.float32)
        if self._sampling.presence_penalty:
            scores[list(set(text[prompt:]))] -= self._sampling.presence_penalty
        for token, bias in self._sampling.logit_bias.items():
            scores[token] += bias
        if self._answers is not None:
            allowed = self._answers.allowed(row, text[prompt:])
            scores[: len(allowed)][~allowed] = -np.inf
            scores[len(allowed) :] = -np.inf
        for process in self._processors:
            scores = process(text, scores)
        return scores

    def choose(self, row: int, logits: np.ndarray, text: Sequence[int], prompt: int) -> int:
        """Returns the next token of ``row``. The other arguments are those of ``scores``."""
        import numpy as np

        scores = self.scores(row, logits, text, prompt)
        if self._sampling.greedy:
            return int(scores.argmax())
        weights = np.exp((scores - scores.max()).astype(np.float64))
        # A point on the cumulative distribution moves little if the logits move little, unlike a shuffled choice.
        total = weights.cumsum()
        return int(np.searchsorted(total, self._random[row].random() * total[-1], side="right"))


def _processors(sampling: Sampling) -> list[Any]:
    """Returns functions from the tokens and the scores to new scores, in the order of transformers."""
    asked = (
        ("RepetitionPenaltyLogitsProcessor", sampling.repetition_penalty),
        ("TemperatureLogitsWarper", sampling.temperature),
        ("TopKLogitsWarper", sampling.top_k),
        ("TopPLogitsWarper", sampling.top_p),
        ("MinPLogitsWarper", sampling.min_p),
    )
    wanted = [(name, value) for name, value in asked if value is not None]
    if not wanted:
        return []
    try:
        import torch
        from transformers.generation import logits_process
    except ImportError as error:
        raise MissingExtra("transformers", "decoders") from error

    def applied(one: Any) -> Any:
        def process(text: Sequence[int], scores: np.ndarray) -> np.ndarray:
            found: np.ndarray = one(torch.tensor([list(text)]), torch.from_numpy(scores)[None])[0].numpy()
            return found

        return process

    return [applied(getattr(logits_process, name)(value)) for name, value in wanted]
