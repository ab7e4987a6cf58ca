"""Generates one token after the other: turns a decoupled model's session into a session that streams tokens.

Parameters of ``config.pbtxt`` declare the loop:

- ``stream_tokens`` names the input that gets the tokens. The input has the shape (rows, length), or (rows, 1) if the
  model takes one token at a time.
- ``stream_logits`` names the output with the logits. The output has the shape (rows, vocabulary) or (rows, length,
  vocabulary).
- ``stream_state.OUT`` names the input that gets the output OUT of the previous step. The output OUT is a state, such as
  a KV cache.
- ``stream_mask`` names the input that gets the attention mask, which has the shape (rows, number of tokens so far). The
  mask is all ones.
- ``stream_positions`` names the input that gets the positions of the tokens. The input has the shape (rows, length).
- ``stream_end`` lists the tokens that end a row, separated by commas.
- ``stream_steps`` is the maximum number of generated tokens, 256 by default.
- ``stream_context`` is the maximum number of tokens of the prompt and the answer together.

A decoder that accel exported needs no parameters (see ``own_loop.py``).

The server creates the states, the mask and the positions, and clients send the remaining inputs. At each step, a model
without states gets all tokens so far. The next token is the token with the largest logit. For each step, clients get a
response with ``token`` of shape (rows, 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BadFeeds, BadRepository
from accel.runtimes.kv.cache import KvCache, open_cache
from accel.signature import Dim, Signature, TensorSpec, free_dims, numpy_dtype, size_at
from accel.signature.decoder import LOGITS, Cache

if TYPE_CHECKING:
    from accel.runtimes.base import Session
    from accel.signature import Feeds

TOKEN = "token"
PREFIX, STATE = "stream_", "stream_state."
_KEYS = (
    "stream_tokens", "stream_logits", "stream_mask", "stream_positions", "stream_end", "stream_steps", "stream_context",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenLoop:
    """Names the tensors of a token loop, as the module's docstring explains. ``states`` maps output names to input
    names. ``ends`` are the tokens that end a row."""

    tokens: str
    logits: str
    states: Mapping[str, str]
    mask: str | None = None
    positions: str | None = None
    ends: tuple[int, ...] = ()
    steps: int = 256
    context: int | None = None

    @property
    def made(self) -> frozenset[str]:
        """Returns the names of the inputs that the server creates."""
        return frozenset([*self.states.values(), *(name for name in (self.mask, self.positions) if name)])

    def offered(self, signature: Signature) -> Signature:
        """Converts the model's own ``signature`` into the signature that clients see."""
        tokens = signature.input(self.tokens)
        length: Dim = tokens.shape[1] if isinstance(tokens.shape[1], str) else "prompt"
        prompt = TensorSpec(tokens.name, tokens.dtype, (tokens.shape[0], length), tokens.values)
        inputs = [prompt if spec is tokens else spec for spec in signature.inputs if spec.name not in self.made]
        known = {name for spec in inputs for dim in spec.shape for name in free_dims(dim)}
        # A range that depends on the size of a state means nothing to clients.
        inputs = [spec if spec.bound_dims <= known else replace(spec, values=None) for spec in inputs]
        dims = {dim: sizes for dim, sizes in signature.dims.items() if dim in known}
        output = TensorSpec(TOKEN, tokens.dtype, (tokens.shape[0], 1))
        return Signature(tuple(inputs), (output,), dims)


def token_loop(config: Any, name: str, signature: Signature) -> TokenLoop | None:
    """Returns the token loop that a model's config declares, or None if the model isn't decoupled. Raises
    ``BadRepository`` if a decoupled model has no token loop, or if the loop doesn't fit the signature.
    """
    options = {k: v.string_value for k, v in config.parameters.items() if k.startswith(PREFIX)}
    decoupled = config.model_transaction_policy.decoupled

    def refused(what: str) -> BadRepository:
        return BadRepository(f"model '{name}': {what}")

    if not decoupled:
        if options:
            raise refused(f"the parameter {min(options)} needs model_transaction_policy {{ decoupled: true }}; add it")
        return None
    if unknown := [key for key in options if key not in _KEYS and not key.startswith(STATE)]:
        raise refused(f"unknown parameter {unknown[0]}; the known parameters are {', '.join(_KEYS)} and {STATE}OUTPUT")
    if missing := [key for key in _KEYS[:2] if not options.get(key)]:
        raise refused(
            f"a decoupled model needs a token loop, and the parameter {missing[0]} is missing; name the loop's "
            f"input and output with {' and '.join(_KEYS[:2])}, or remove model_transaction_policy"
        )
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    states = {key.removeprefix(STATE): to for key, to in options.items() if key.startswith(STATE)}
    named = {key: options[key] for key in ("stream_tokens", "stream_mask", "stream_positions") if key in options}
    for key, to in [*named.items(), *((STATE + out, to) for out, to in states.items())]:
        if to not in inputs:
            raise refused(
                f"the parameter {key} names the input '{to}', but the model has the inputs: {', '.join(inputs)}"
            )
    for out in (options["stream_logits"], *states):
        if out not in outputs:
            has = ", ".join(outputs)
            raise refused(f"the stream_* parameters name the output '{out}', but the model has the outputs: {has}")
    taken = [*named.values(), *states.values()]
    if twice := [to for to in taken if taken.count(to) > 1]:
        raise refused(f"the stream_* parameters name the input '{twice[0]}' twice; name each input once")
    tokens, logits = inputs[options["stream_tokens"]], outputs[options["stream_logits"]]
    for spec in (inputs[to] for to in named.values()):
        if len(spec.shape) != 2 or not spec.dtype.startswith(("int", "uint")):
            raise refused(f"the inputs of the stream have to be integers of shape (rows, length), not {spec}")
    if len(logits.shape) not in (2, 3):
        raise refused(
            "the output of stream_logits has to be of shape (rows, vocabulary) or (rows, length, vocabulary), not "
            f"{logits}"
        )
    if tokens.shape[1] != 1 and not isinstance(tokens.shape[1], str):
        raise refused(f"the length of stream_tokens has to be dynamic or 1, but the input is {tokens}")
    if not states and not isinstance(tokens.shape[1], str):
        raise refused(
            f"the input {tokens} takes one token at a time, so the stream needs the model's state; add the parameter "
            f"{STATE}OUTPUT with the name of the state's input"
        )
    return TokenLoop(
        tokens=tokens.name,
        logits=logits.name,
        states=states,
        mask=options.get("stream_mask"),
        positions=options.get("stream_positions"),
        ends=_numbers(options, "stream_end", refused),
        steps=next(iter(_numbers(options, "stream_steps", refused, least=1, most=1)), TokenLoop.steps),
        context=next(iter(_numbers(options, "stream_context", refused, least=2, most=1)), None),
    )


def _numbers(
    options: Mapping[str, str], key: str, refused: Any, least: int = 0, most: int | None = None
) -> tuple[int, ...]:
    """Returns the numbers of a parameter, at most ``most`` and each at least ``least``. Without the parameter, returns
    ()."""
    text = options.get(key)
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    right = all(word.isascii() and word.isdigit() and len(word) < 10 and int(word) >= least for word in words)
    if not right or len(words) > (most or len(words)):
        wanted = f"a number of at least {least}" + ("" if most == 1 else ", or several separated by commas")
        raise refused(f"the parameter {key} is {text!r}; write {wanted}")
    return tuple(map(int, words))


class TokenLoopSession:
    """Adds the method ``stream`` to ``session``. Keeps no state between two streams."""

    def __init__(self, session: Session, loop: TokenLoop, signature: Signature) -> None:
        self._session = session
        self._loop = loop
        self._specs = {spec.name: spec for spec in signature.inputs}
        self._one_by_one = self._specs[loop.tokens].shape[1] == 1

    def stream(self, feeds: Feeds) -> Iterator[dict[str, np.ndarray]]:
        """Yields one array ``token`` of shape (rows, 1) per step. A row that has ended repeats the first end token.
        Raises ``BadFeeds`` if the prompt is empty, or if it leaves no room in the context."""
        loop = self._loop
        given = np.asarray(feeds[loop.tokens])
        if not given.size:
            raise BadFeeds(f"the prompt {loop.tokens!r} is empty; send at least one token")
        room = loop.steps if loop.context is None else loop.context - given.shape[1]
        if room < 1:
            raise BadFeeds(
                f"the prompt {loop.tokens!r} has {given.shape[1]} tokens, but the context holds {loop.context} with at "
                "least one new token; shorten the prompt"
            )
        others = {name: value for name, value in feeds.items() if name != loop.tokens}
        cache = self._own_cache(len(given))
        states = {name: self._zeros(self._specs[name], feeds) for name in loop.states.values()}
        ended = np.zeros(len(given), dtype=bool)
        before = 0  # number of earlier tokens that are already in the model's states
        for _ in range(min(loop.steps, room)):
            pieces = np.split(given, given.shape[1], axis=1) if self._one_by_one else [given]
            for piece in pieces:
                made = {**others, **self._made(piece, before)}
                if cache is not None:
                    logits = cache.step(made)
                else:
                    outputs = self._session.run({**states, **made})
                    states = {to: outputs[out] for out, to in loop.states.items()}
                    logits = outputs[loop.logits]
                before += piece.shape[1] if loop.states else 0
            token = (logits if logits.ndim == 2 else logits[:, -1]).argmax(axis=-1).astype(given.dtype)
            if loop.ends:
                token[ended] = loop.ends[0]
                ended |= np.isin(token, loop.ends)
            yield {TOKEN: token[:, None]}
            if ended.all():
                return
            given = token[:, None] if loop.states else np.concatenate([given, token[:, None]], axis=1)

    def _own_cache(self, rows: int) -> KvCache | None:
        """Returns the empty cache of a decoder, or None for a model whose states are others."""
        layout = Cache.of(self._session.signature)
        pairs = {present: past for past, present in layout.presents.items()} if layout is not None else None
        fits = layout is not None and pairs == self._loop.states and self._loop.logits == LOGITS
        return open_cache(self._session, layout, rows) if fits and layout is not None else None

    def _made(self, piece: np.ndarray, before: int) -> dict[str, np.ndarray]:
        """Returns the model's inputs for the tokens ``piece``: the tokens, the mask and the positions. ``before`` is
        the number of earlier tokens that are already in the model's states, such as a KV cache."""
        loop, (rows, length) = self._loop, piece.shape
        made = {loop.tokens: piece}
        if loop.mask is not None:
            made[loop.mask] = np.ones((rows, before + length), numpy_dtype(self._specs[loop.mask].dtype))
        if loop.positions is not None:
            positions = np.arange(before, before + length, dtype=numpy_dtype(self._specs[loop.positions].dtype))
            made[loop.positions] = np.tile(positions, (rows, 1))
        return made

    def _zeros(self, spec: TensorSpec, feeds: Feeds) -> np.ndarray:
        """Returns the state before the first token, which is an array of zeros.

        A dynamic dim takes its size from the feeds. A dynamic dim that no tensor of the feeds has gets the size 0. For
        example, a KV cache has the length 0 before the first token.
        """
        known = defaultdict[str, int](int)
        for name, value in feeds.items():
            known |= {str(dim): size for dim, size in zip(self._specs[name].shape, value.shape, strict=False)}
        return np.zeros([size_at(dim, known) for dim in spec.shape], numpy_dtype(spec.dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
