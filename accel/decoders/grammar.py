"""Restricts answers to a JSON schema or a grammar, with llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.errors import MissingExtra, RunFailed, UsageError, one_line
from accel.spelling import option

from .decoder import Decoder

if TYPE_CHECKING:
    import numpy as np

# A schema allows spaces between the parts of JSON, but not so many that a model fills the answer with them.
_SPACES: Any = {"whitespace_pattern": r"[ \n]{0,2}"}
_LONGEST = 1 << 20


@dataclass(frozen=True, eq=False)
class Grammar:
    """What an answer may look like, for the tokens of one decoder. ``matcher`` is llguidance's, at the beginning of an
    answer, and is copied for each row."""

    matcher: Any = field(repr=False)
    width: int

    def begin(self) -> Answers:
        """Returns the answers of a batch, which are all empty."""
        return Answers(self)


class Answers:
    """Follows the answers of a batch, and says which token may come next."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._rows: dict[int, tuple[Any, list[int]]] = {}

    def allowed(self, row: int, answer: Sequence[int]) -> np.ndarray:
        """Returns whether each token may follow ``answer`` in ``row``, as booleans [tokens]. Goes back if the answer
        is no longer the one of the last call, as after a wrong draft."""
        import numpy as np

        matcher, known = self._rows.get(row) or (self._grammar.matcher.deep_copy(), [])
        pairs = enumerate(zip(known, answer, strict=False))
        same = next((n for n, (one, other) in pairs if one != other), min(len(known), len(answer)))
        if same < len(known):
            matcher.rollback(len(known) - same)
        matcher.consume_tokens(list(answer[same:]))
        self._rows[row] = matcher, list(answer)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little")[: self._grammar.width].astype(bool)
        if matcher.is_error() or not found.any():
            raise RunFailed(
                f"the grammar allows no token after {len(answer)} tokens of the answer "
                f"({one_line(matcher.get_error() or 'none fits', 160)}); give a simpler {option('json_schema')} or "
                f"{option('grammar')}"
            )
        return found


def open_grammar(
    decoder: Decoder, json_schema: str | Path | Mapping[str, Any] | None, grammar: str | Path | None
) -> Grammar | None:
    """Returns what answers may look like, or None if neither is given. A schema is a file or a dict. A grammar in the
    Lark format of llguidance is a file (a ``Path``) or its text.

    Raises ``UsageError`` if both are given, a file can't be read, the schema or the grammar is not valid, or the
    decoder has no token that ends a text. Raises ``BadSource`` without a tokenizer.json, and ``MissingExtra`` without
    llguidance.
    """
    if json_schema is None and grammar is None:
        return None
    if json_schema is not None and grammar is not None:
        raise UsageError(
            f"an answer follows either {option('json_schema')} or {option('grammar')}; leave out one of the two"
        )
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError as error:
        raise MissingExtra("llguidance", "decoders") from error
    if not decoder.tokens.ends or len(decoder.start) > 1:
        raise UsageError(
            "the decoder names no token that ends a text, or begins every answer with tokens of its own, so an answer "
            "can't follow a grammar; add eos_token_id to generation_config.json, or leave out "
            f"{option('json_schema')} and {option('grammar')}"
        )
    definition = _without_prefix(decoder.tokenizer.definition())
    try:
        tokenizer = LLTokenizer(definition, decoder.vocabulary, list(decoder.tokens.ends))
    except ValueError as error:
        raise UsageError(
            f"llguidance can't use this tokenizer ({one_line(error, 120)}); leave out {option('json_schema')} and "
            f"{option('grammar')}"
        ) from error
    if json_schema is not None:
        what, text = option("json_schema"), _schema(json_schema)
        made = LLMatcher.grammar_from_json_schema(text, overrides=_SPACES)
    else:
        what, made = option("grammar"), _read(grammar, option("grammar")) if isinstance(grammar, Path) else str(grammar)
    matcher = LLMatcher(tokenizer, made, log_level=0)
    if matcher.is_error():
        raise UsageError(f"{what} is not valid ({one_line(matcher.get_error(), 200)}); correct it")
    return Grammar(matcher, decoder.vocabulary)


def _without_prefix(definition: str) -> str:
    """Returns the content of tokenizer.json for a tokenizer that puts no space before a text. llguidance encodes the
    text that a grammar asks for next, and a space before this text isn't in the grammar."""
    found = json.loads(definition)

    def change(part: Any) -> None:
        if not isinstance(part, dict):
            return
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
        for inner in part.get("pretokenizers") or ():
            change(inner)

    change(found.get("pre_tokenizer"))
    return json.dumps(found, ensure_ascii=False)


def _schema(given: str | Path | Mapping[str, Any]) -> str:
    """Returns the schema as JSON. Raises ``UsageError`` if it is none."""
    what = option("json_schema")
    try:
        found = given if isinstance(given, Mapping) else json.loads(_read(Path(given), what))
        text = json.dumps(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{what} is no JSON ({one_line(error, 160)}); correct it") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{what} is no JSON schema but {one_line(text, 60)}; give an object such as {{}}")
    return text


def _read(path: Path, what: str) -> str:
    try:
        if path.stat().st_size > _LONGEST:
            raise UsageError(f"{what} {path} is larger than 1 MiB; give a smaller one")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is no text in UTF-8; give a text file") from error
    except OSError as error:
        raise UsageError(f"can't read {what} {path} ({error.strerror}); give another file") from error
