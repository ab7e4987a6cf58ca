"""Defines ``Decoder``: a generative model that is open to run, with its tokenizer and its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.artifact import Artifact
from accel.errors import BadSource
from accel.runtimes.base import Session
from accel.signature.decoder import IDS, LOGITS

from .adapters import adapter_feeds
from .folder import GENAI_CONFIG
from .replay import Replay, bytes_a_token
from .tokenizer import Tokenizer

# The fields of config.json that give the largest number of tokens.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of a decoder's special tokens, and the largest number of tokens that it takes. ``ends`` lists the tokens
    that end a text."""

    context: int | None
    ends: tuple[int, ...]
    first: int | None


class Decoder:
    """A decoder with a KV cache in an open ``session``. ``folder`` has the tokenizer, by default the artifact's folder.
    With ``adapter``, the decoder runs with its LoRA adapter of this name.

    Raises ``BadSource`` if the model has no KV cache, or if a recorded special token isn't a token id. Raises
    ``UnknownName`` if the decoder has no such adapter.
    """

    def __init__(self, artifact: Artifact, session: Session, folder: Path | None = None, adapter: str = "") -> None:
        self.artifact = artifact
        self._folder = folder or artifact.path.parent
        self.session = session
        self._adapter = adapter_feeds(artifact, adapter)
        self.bytes_a_token = bytes_a_token(session)
        vocabulary = next(spec for spec in session.signature.outputs if spec.name == LOGITS).shape[-1]
        bounds = session.signature.input(IDS).range_at({})
        # A model may have more logits than rows in its table of tokens, because of padding.
        sizes = [vocabulary, *([bounds[1] + 1] if bounds else [])]
        self.vocabulary = min(size for size in sizes if isinstance(size, int))
        self.tokens = special_tokens(artifact)
        # Only the answers of an encoder-decoder begin with tokens of their own, and never have some tokens.
        self.start: list[int] = []
        self.suppressed: tuple[int, ...] = ()
        self.longest_prompt = self.tokens.context

    def begin(self, sources: Sequence[Sequence[int]]) -> Replay:
        """Returns a replay with a row for each of ``sources``, which only an encoder reads."""
        return Replay(self.session, len(sources), adapter=self._adapter)

    @property
    def has_tokenizer(self) -> bool:
        """Tells whether the decoder's folder has a tokenizer that fits."""
        try:
            return self.tokenizer is not None
        except BadSource:
            return False

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer in the decoder's folder. Raises ``BadSource`` if the folder has none, or if it has
        another vocabulary."""
        return Tokenizer.open(self._folder, self.vocabulary)


def special_tokens(artifact: Artifact) -> SpecialTokens:
    """Reads the special tokens from the manifest, or else from the configs that other tools write.

    Raises ``BadSource`` if a recorded special token isn't a token id, or if the file isn't a decoder's config.
    """
    about: Mapping[str, Any] | None = artifact.source.get("decoder") or artifact.source.get("encoder_decoder")
    if about is None:
        path = artifact.path.parent / GENAI_CONFIG
        about = _genai_facts(path) if path.is_file() else _config_facts(artifact.path.parent)
    context = about.get("context")
    ends = _ids(about.get("eos"), artifact.path)
    first = _ids(about.get("bos"), artifact.path)
    return SpecialTokens(context if isinstance(context, int) and context > 0 else None, ends, next(iter(first), None))


def _genai_facts(path: Path) -> Mapping[str, Any]:
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        return {
            "context": model.get("context_length"), "eos": model.get("eos_token_id"), "bos": model.get("bos_token_id")
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadSource(f"the file {path} holds no valid config of a decoder; export the decoder again") from error


def _config_facts(folder: Path) -> Mapping[str, Any]:
    """Returns the facts in the configs of transformers, which optimum copies."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):  # the generation config counts more
        try:
            found |= json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    context = next((found[name] for name in _CONTEXTS if found.get(name)), None)
    return {"context": context, "eos": found.get("eos_token_id"), "bos": found.get("bos_token_id")}


def _ids(value: Any, where: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    found: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) and one >= 0 for one in found):
        raise BadSource(f"the special tokens of {where} are {value!r} instead of token ids; export the decoder again")
    return tuple(found)
