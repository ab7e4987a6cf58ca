"""Generates text or token ids with a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from accel.decoders.adapters import adapter_feeds
from accel.decoders.decoder import Decoder
from accel.decoders.encoder_decoder import TextPair
from accel.decoders.generation import Generation, Row, Token, begin
from accel.decoders.grammar import open_grammar
from accel.decoders.sampling import Sampling
from accel.decoders.tokenizer import NoTokenizer, Tokenizer
from accel.decoders.ways.draft import NGRAM, Draft, Ngrams, SmallDecoder, check_draft
from accel.decoders.ways.speculation import Drafted, Speculation
from accel.errors import BadSource, UsageError
from accel.runtimes.base import open_session
from accel.sources.source import Model, Source, SourceOptions
from accel.spelling import option

from .parts import open_parts

Prompt = str | Sequence[int]


class Answers:
    """The answers to prompts. Iterating over it yields a ``Token`` as soon as it is chosen. ``texts``, ``ids`` and
    ``finishes`` generate the remaining tokens first."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None, stack: ExitStack) -> None:
        self._generation = generation
        self._tokens = iter(generation)
        self._stack = stack
        self.tokenizer = tokenizer

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        try:
            return next(self._tokens)
        except BaseException:  # also at the end
            self.close()
            raise

    def close(self) -> None:
        """Closes the session. A later ``next`` raises ``StopIteration``."""
        self._tokens = iter(())
        self._stack.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = sum(len(row.answer) for row in self._generation.rows)
        return f"<accel answers: {len(self._generation.rows)} prompts, {count} tokens so far>"

    def _finished(self) -> list[Row]:
        """Generates the remaining tokens and returns the rows."""
        for _ in self:
            pass
        return self._generation.rows

    @property
    def texts(self) -> list[str | None]:
        """Returns the text of each answer, or None without a tokenizer."""
        return [row.stream.text if self.tokenizer else None for row in self._finished()]

    @property
    def ids(self) -> list[list[int]]:
        """Returns the generated token ids of each answer."""
        return [row.answer for row in self._finished()]

    @property
    def prompts(self) -> list[list[int]]:
        """Returns the token ids of the prompts."""
        return [row.source or row.tokens[: row.prompt] for row in self._generation.rows]

    @property
    def finishes(self) -> list[str]:
        """Returns ``end``, ``stop`` or ``length`` for each answer."""
        return [row.finish for row in self._finished()]

    @property
    def seconds_to_first_token(self) -> float:
        """Returns the seconds until every answer had its first token."""
        return self._generation.first_seconds

    @property
    def drafted(self) -> Drafted | None:
        """Returns how many tokens the draft proposed, how many were accepted, and the gain. Returns None without a
        draft."""
        self._finished()
        way = self._generation.way
        return way.drafted if isinstance(way, Speculation) else None

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens of all answers a second, after the first tokens."""
        return self._generation.speed


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt] | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    beams: int = 1,
    sequences: int = 1,
    chat: bool = False,
    truncate: bool = False,
    draft: Model | None = None,
    adapter: str | None = None,
    json_schema: str | Path | Mapping[str, Any] | None = None,
    grammar: str | Path | None = None,
    runtime: str | None = None,
    options: Mapping[str, Any] | None = None,
    **about: Unpack[SourceOptions],
) -> Answers:
    """Generates up to ``max_new_tokens`` tokens after each of ``prompts``, and yields each ``Token`` as it is chosen.

    ``model`` is the folder of an exported decoder or encoder-decoder, a model of transformers that generates text, or a
    source opened with ``decoder=True``. A prompt is a text, or a list of token ids. Without sampling options, the most
    likely token is chosen. ``accel.decoders.sampling.Sampling`` explains the sampling options. ``beams`` above 1
    search for the most likely answer as transformers does. ``sequences`` is the number of answers to each prompt: drawn
    independently, or the best ones of the search. With ``chat``, each prompt is a message of the user, in the form of
    the model's chat template.

    ``draft`` makes single answers faster: it proposes tokens, and a step of the model checks several of them. It is a
    smaller decoder with the same tokenizer, or ``"ngram"`` for what followed the last tokens before in the same text.
    The answers stay the same. ``drafted`` has the accepted share and the gain.

    ``adapter`` is the name of a LoRA adapter that the decoder takes as inputs (see ``adapters_as`` of
    ``accel.export``). Without it, the base model answers.

    Every answer follows ``json_schema``, a file or a dict, or ``grammar``, a file (as a ``Path``) or a text in
    llguidance's Lark format. An answer of ``max_new_tokens`` tokens may be incomplete, and finishes with ``length``.

    The answers are generated while you iterate over them, or when you read ``ids`` or ``texts``.

    Raises ``UsageError`` for a prompt that the model can't take, ``BadSource`` if the model is no decoder or lacks a
    tokenizer that the prompts need, ``UnknownName`` if it has no such ``adapter``, and ``RunFailed`` if the logits
    aren't finite.

    >>> for token in accel.generate("dec/", "def ", max_new_tokens=64):    # doctest: +SKIP
    ...     print(token.text, end="")
    >>> accel.generate("dec/", [[1, 2, 3]]).ids                            # doctest: +SKIP
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        logit_bias=logit_bias or {},
        seed=seed,
    )
    if sequences < 1:
        raise UsageError(f"{option('sequences', sequences)} gives no answer; give at least 1")
    given = _listed(prompts)
    source = Source.of(model, **about)
    with ExitStack() as stack:
        decoder = _opened(source, stack, runtime, options, adapter or "")
        sampling = replace(sampling, grammar=open_grammar(decoder, json_schema, grammar))
        needed = chat or any(isinstance(prompt, str) for prompt in given)
        tokenizer = _tokenizer(decoder, needed)
        encoded = [_encoded(prompt, tokenizer, chat) for prompt in given for _ in range(sequences)]
        drafts = _draft(draft, decoder, tokenizer, stack, runtime, options) if draft is not None else None
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        generation = begin(
            decoder,
            encoded,
            tokenizer=tokenizer,
            most=max_new_tokens,
            sampling=sampling,
            stops=stops,
            truncate=truncate,
            draft=drafts,
            beams=beams,
            sequences=sequences,
        )
        return Answers(generation, tokenizer, stack.pop_all())


def _opened(
    source: Source, stack: ExitStack, runtime: str | None, options: Mapping[str, Any] | None, adapter: str = ""
) -> Decoder:
    """Opens the decoder with its ``adapter``, or both parts of an encoder-decoder."""
    artifact, encoder = open_parts(source)
    adapter_feeds(artifact, adapter)  # an unknown name is refused before the weights are read
    if encoder is None:
        return Decoder(artifact, stack.enter_context(open_session(artifact, runtime, options)), adapter=adapter)
    first, second = (stack.enter_context(open_session(part, runtime, options)) for part in (encoder, artifact))
    return TextPair(artifact, second, first)


def _draft(
    draft: Model,
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    stack: ExitStack,
    runtime: str | None,
    options: Mapping[str, Any] | None,
) -> Draft:
    """Opens the draft, and checks that its tokens are those of ``decoder``."""
    if isinstance(draft, str) and draft == NGRAM:
        return Ngrams()
    small = _opened(Source.of(draft), stack, runtime, options)
    check_draft(decoder, small, tokenizer)
    return SmallDecoder(small)


def _listed(prompts: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    if prompts is None:
        return []
    if isinstance(prompts, str):
        return [prompts]
    found: list[Any] = list(prompts)
    return [found] if found and all(isinstance(one, int) for one in found) else found


def _tokenizer(decoder: Decoder, needed: bool) -> Tokenizer | None:
    """Returns the tokenizer, or None if there is none and the prompts are token ids."""
    try:
        return decoder.tokenizer
    except BadSource as error:
        if not needed:
            return None
        if isinstance(error, NoTokenizer):
            raise NoTokenizer(f"{error}, or give token ids with {option('prompt_ids')}") from error
        raise


def _encoded(prompt: Prompt, tokenizer: Tokenizer | None, chat: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        if chat:
            raise UsageError(f"{option('chat', True)} takes texts, not token ids; leave out one of the two")
        return prompt
    assert tokenizer is not None, "a text needs a tokenizer"
    return tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
