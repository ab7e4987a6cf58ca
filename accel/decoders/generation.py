"""Generates the tokens of several prompts in one batch, step by step."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from accel.cancel import check_cancelled
from accel.errors import RunFailed, UnsupportedHere, UsageError
from accel.machine import available_memory
from accel.signature.decoder import MASK, POSITIONS
from accel.spelling import is_command_line, option

from .decoder import Decoder
from .replay import Replay, padded
from .sampling import Sampler, Sampling
from .tokenizer import TextStream, Tokenizer
from .ways.beams import BeamSearch
from .ways.draft import Draft, check_forgets
from .ways.speculation import Speculation

if TYPE_CHECKING:
    import numpy as np

Finish = Literal["", "end", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Token:
    """A generated token of the prompt number ``prompt``. ``text`` is the text that the token completes. ``finish`` is
    set at the last token: ``end`` for a token that ends the text, ``stop`` for a stop string, and ``length`` for the
    largest number of tokens."""

    prompt: int
    id: int
    text: str
    finish: Finish = ""


@dataclass(kw_only=True)
class Row:
    """A prompt and its answer so far."""

    number: int
    prompt: int
    tokens: list[int]
    stream: TextStream
    source: list[int] = field(default_factory=list)
    shown: int = 0
    finish: Finish = ""

    @property
    def answer(self) -> list[int]:
        """Returns the generated tokens."""
        return self.tokens[self.prompt :]


class Way(Protocol):
    """A way to generate other than one token of all rows at a time."""

    def tokens(self, generation: Generation, check: Callable[..., None]) -> Iterator[Token]:
        """Yields the tokens of all rows. ``check`` takes the logits [rows, vocabulary], the replay and the number of
        tokens, and raises an error if the logits aren't finite."""


@dataclass(kw_only=True)
class Generation:
    """Generates the answers of several prompts. Iterating over it yields each ``Token`` as soon as it is chosen. With
    a ``way`` of its own, the answers come one after the other, otherwise all rows run in one batch.

    ``rows`` has the prompts and the answers so far. ``first_seconds`` is the time until the first token, and
    ``seconds`` the time of all later tokens.
    """

    decoder: Decoder
    rows: list[Row]
    most: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    way: Way | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Token]:
        if self.way is None:
            yield from self._together()
            return
        started = time.perf_counter()
        for token in self.way.tokens(self, self._check_finite):
            if not self.first_seconds:
                self.first_seconds = time.perf_counter() - started
            self.seconds = time.perf_counter() - started - self.first_seconds
            yield token

    def _together(self) -> Iterator[Token]:
        """Yields the tokens of all rows, which run in one batch."""
        import numpy as np

        sampler = Sampler(self.sampling, len(self.rows))
        running = self.decoder.begin([row.source for row in self.rows])
        active = list(self.rows)
        started = time.perf_counter()
        logits = running.prompt(*padded([row.tokens for row in active]))[:, -1]
        while active:
            check_cancelled()
            self._check_finite(logits, running, len(active[0].tokens))
            for row, scores in zip(active, logits, strict=True):
                yield self.add(row, sampler.choose(row.number, scores, row.tokens, row.prompt))
            if not self.first_seconds:
                self.first_seconds = time.perf_counter() - started
            self.seconds = time.perf_counter() - started - self.first_seconds
            kept = [index for index, row in enumerate(active) if not row.finish]
            if len(kept) < len(active):
                active = [active[index] for index in kept]
                running.reorder(kept)
            if active:
                logits = running.step(np.array([row.tokens[-1:] for row in active], np.int64))[:, -1]

    @property
    def speed(self) -> float:
        """Returns the generated tokens a second after the first token of each row, or 0 before the second token."""
        count = sum(len(row.answer) - 1 for row in self.rows)
        return count / self.seconds if self.seconds and count > 0 else 0.0

    def add(self, row: Row, token: int) -> Token:
        """Adds ``token`` to the row. Holds back text that may be the beginning of a stop string."""
        row.tokens.append(token)
        context = self.decoder.tokens.context
        ends = token in self.decoder.tokens.ends
        if not ends:
            row.stream.add(token)
        text = row.stream.text
        found = [at for stop in self.stops if (at := text.find(stop, max(0, row.shown - len(stop)))) >= 0]
        if found:
            row.finish, row.stream.text = "stop", text[: min(found)]
        elif ends:
            row.finish = "end"
        elif len(row.answer) >= self.most or len(row.tokens) == context:
            row.finish = "length"
        until = len(row.stream.text) if row.finish else len(text) - _held(text, self.stops)
        piece = row.stream.text[row.shown : max(row.shown, until)]
        row.shown += len(piece)
        return Token(prompt=row.number, id=token, text=piece, finish=row.finish)

    def _check_finite(self, logits: np.ndarray, running: Replay, length: int) -> None:
        import numpy as np

        if np.isfinite(logits.max(axis=1)).all():
            return
        layer = running.first_broken_layer()
        where = f"the keys or values of layer {layer} are the first" if layer is not None else "the cache is finite"
        raise RunFailed(
            f"the logits after {length} tokens are NaN or infinite ({where}); check the file with accel verify, and "
            "export or quantize the model again"
        )


def _held(text: str, stops: Sequence[str]) -> int:
    """Returns the length of the end of ``text`` that may be the beginning of a stop string."""
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


def begin(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokenizer: Tokenizer | None,
    most: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
    truncate: bool = False,
    draft: Draft | None = None,
    beams: int = 1,
    sequences: int = 1,
) -> Generation:
    """Checks the prompts and returns a generation that hasn't begun. ``most`` is the largest number of new tokens. With
    ``truncate``, a prompt that is too long loses its first tokens. ``draft`` proposes tokens. With
    ``beams`` above 1, ``sequences`` prompts after one another are the same, and get the best answers of a search.

    Raises ``UsageError`` for an empty prompt, a token id outside the vocabulary, or a prompt longer than the context.
    Raises ``UnsupportedHere`` if the cache doesn't fit into memory.
    """
    if draft is not None:
        check_forgets(decoder)
    if beams != 1:
        _check_beams(beams, sequences, sampling, stops, draft)
    if most < 1:
        raise UsageError(f"{option('max_new_tokens', most)} generates nothing; give at least 1")
    if stops and tokenizer is None:
        raise UsageError(f"{option('stop')} needs a tokenizer; copy the model's tokenizer.json beside the decoder")
    if any(not stop for stop in stops):
        raise UsageError(f"an empty {option('stop')} ends every text at once; give a text")
    for token in sampling.logit_bias:
        _check_token(token, decoder.vocabulary, option("logit_bias"))
    context = decoder.tokens.context
    rows = []
    for number, prompt in enumerate(prompts):
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise UsageError(f"prompt {number + 1} is no list of whole numbers; give a text or token ids") from error
        if not tokens:
            where = f"{option('prompts')}, {option('prompt_ids')} or stdin" if is_command_line() else option("prompts")
            raise UsageError(f"prompt {number + 1} has no tokens; give a text or token ids with {where}")
        for token in tokens:
            _check_token(token, decoder.vocabulary, f"prompt {number + 1}")
        if decoder.start:  # an encoder reads the prompt
            rows.append(_answer(decoder, number, tokens, TextStream(tokenizer), truncate))
            continue
        if context is not None and len(tokens) >= context:
            if not truncate:
                raise UsageError(
                    f"prompt {number + 1} has {len(tokens)} tokens, but the context holds {context} with at least one "
                    f"new token; shorten the prompt, or pass {option('truncate', True)} to drop its beginning"
                )
            tokens = tokens[-max(1, context - most) :]
        rows.append(Row(number=number, prompt=len(tokens), tokens=tokens, stream=TextStream(tokenizer)))
    if not rows:
        raise UsageError(f"there is no prompt; give one with {option('prompts')}")
    takes = {spec.name for spec in decoder.session.signature.inputs}
    # GroupQueryAttention counts the tokens by itself, and counts padding on the left. accel's own files are proven.
    missing = MASK if MASK not in takes else POSITIONS if decoder.artifact.manifest is None else MASK
    alone = draft is not None or beams > 1
    if not alone and missing not in takes and len({row.prompt for row in rows}) > 1:
        raise UsageError(
            f"the decoder has no {missing}, so prompts of unequal lengths can't share a batch; give one prompt at a "
            "time, or export the decoder with accel"
        )
    _check_room(decoder, rows, most, beams if alone else len(rows))
    if decoder.suppressed:
        never = dict.fromkeys(decoder.suppressed, -math.inf)
        sampling = replace(sampling, logit_bias={**never, **sampling.logit_bias})
    way: Way | None = Speculation(decoder=decoder, draft=draft) if draft is not None else None
    if beams > 1:
        way = BeamSearch(decoder=decoder, beams=beams, sequences=sequences)
    return Generation(decoder=decoder, rows=rows, most=most, sampling=sampling, stops=tuple(stops), way=way)


def _check_beams(beams: int, sequences: int, sampling: Sampling, stops: Sequence[str], draft: Draft | None) -> None:
    """Raises ``UsageError`` if a search with ``beams`` is impossible."""
    if beams < 1:
        raise UsageError(f"{option('beams', beams)} is no search; give at least 1")
    if sequences > beams:
        raise UsageError(
            f"{beams} beams end in {beams} answers, not {sequences}; give {option('beams', sequences)} or lower "
            f"{option('sequences')}"
        )
    others = {"stop": stops, "draft": draft, "temperature": not sampling.greedy, "grammar": sampling.grammar}
    if found := next((name for name, given in others.items() if given), None):
        words = {"temperature": "temperature, top-k, top-p or min-p", "grammar": "a grammar or a schema"}
        what = words.get(found) or option(found)
        raise UsageError(
            f"beams search for the most likely answer, which goes without {what}; leave out that or {option('beams')}"
        )


def _answer(decoder: Decoder, number: int, source: list[int], stream: TextStream, truncate: bool) -> Row:
    """Returns the row of an answer to ``source``, which the encoder reads. A first token that the model forces counts
    as generated."""
    most = decoder.longest_prompt
    if most is not None and len(source) > most:
        if not truncate:
            raise UsageError(
                f"prompt {number + 1} has {len(source)} tokens, but the encoder reads {most}; shorten the prompt, or "
                f"pass {option('truncate', True)} to drop its beginning"
            )
        source = source[-most:]
    return Row(number=number, prompt=1, tokens=list(decoder.start), stream=stream, source=source)


def _check_token(token: int, vocabulary: int, where: str) -> None:
    if not 0 <= token < vocabulary:
        raise UsageError(f"{where} has the token id {token}, but ids are 0 to {vocabulary - 1}; correct the ids")


def _check_room(decoder: Decoder, rows: Sequence[Row], most: int, at_once: int) -> None:
    """Raises ``UnsupportedHere`` if the caches of ``at_once`` rows don't fit into memory. A step needs the cache before
    and after it."""
    context = decoder.tokens.context
    longest = max(row.prompt for row in rows) + most
    tokens = min(longest, context) if context is not None else longest
    needed = 2 * tokens * at_once * decoder.bytes_a_token
    room = available_memory()
    if room is not None and needed > room:
        raise UnsupportedHere(
            f"a cache of {tokens} tokens for {at_once} prompts takes {needed / 2**30:.1f} GiB, but only "
            f"{room / 2**30:.1f} GiB of memory are free; lower {option('max_new_tokens')}, or give fewer or shorter "
            "prompts"
        )
