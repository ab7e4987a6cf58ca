"""Reads the tokenizer of a decoder's folder, and turns tokens into text piece by piece."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.errors import BadSource, MissingExtra, UsageError, one_line
from accel.spelling import option

_FAST = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
# The files of tokenizers that only transformers reads.
_SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Decoding ends with this character while the bytes of a character are incomplete.
_INCOMPLETE = "\ufffd"
_LONGEST_CHAT = 1 << 20


class NoTokenizer(BadSource):
    """The folder of a decoder has no tokenizer."""


class Tokenizer:
    """A tokenizer of a folder. Never runs code from the folder."""

    def __init__(self, folder: Path, encoder: Any, fast: bool) -> None:
        self._folder = folder
        self._encoder = encoder
        self._fast = fast

    @classmethod
    def open(cls, folder: Path, vocabulary: int) -> Tokenizer:
        """Opens the tokenizer in ``folder`` for a decoder with ``vocabulary`` token ids.

        Raises ``BadSource`` if there is no tokenizer, if it can't be read or needs code of its own, or if it has token
        ids that the decoder doesn't have. Raises ``MissingExtra`` if its library isn't installed.
        """
        if (folder / _FAST).is_file():
            try:
                from tokenizers import Tokenizer as Fast
            except ImportError as error:
                raise MissingExtra("tokenizers", "decoders") from error
            try:
                found = cls(folder, Fast.from_file(str(folder / _FAST)), True)
            except Exception as error:  # the library raises bare exceptions
                raise BadSource(
                    f"the tokenizer {folder / _FAST} can't be read ({one_line(error, 160)}); copy the tokenizer of the "
                    "model there again"
                ) from error
            size = found._encoder.get_vocab_size()
        elif any((folder / name).is_file() for name in _SLOW):
            found = cls(folder, _slow(folder), False)
            size = len(found._encoder)
        else:
            raise NoTokenizer(
                f"{folder} has no tokenizer; copy the model's tokenizer.json there, or save the model and its "
                "tokenizer in one folder"
            )
        if size > vocabulary:
            raise BadSource(
                f"the tokenizer of {folder} has {size} tokens, but the decoder has {vocabulary}; copy the tokenizer of "
                "this model there"
            )
        return found

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token."""
        found: dict[str, int] = self._encoder.get_vocab()
        return found

    def definition(self) -> str:
        """Returns the content of tokenizer.json. Raises ``BadSource`` if the folder has a tokenizer in another form."""
        if not self._fast:
            raise BadSource(
                f"{self._folder} has no {_FAST}, which a grammar needs; save the tokenizer with transformers as a fast "
                "tokenizer"
            )
        return (self._folder / _FAST).read_text(encoding="utf-8")

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Returns the token ids of ``text``. With ``specials``, the tokenizer adds its special tokens."""
        if self._fast:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=specials).ids
            return ids
        return list(self._encoder(text, add_special_tokens=specials)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``, without special tokens."""
        text: str = self._encoder.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns the token ids of a conversation, in the form of the model's chat template.

        Raises ``BadSource`` if the folder has no template, or if the template fails. The template runs in a sandbox.
        """
        template = _template(self._folder)
        if template is None:
            raise BadSource(
                f"{self._folder} has no chat template; give the whole prompt without {option('chat', True)}"
            )
        from .chat import rendered

        # The template writes the special tokens itself.
        return self.encode(rendered(template, messages, self._folder, _LONGEST_CHAT), specials=False)


class TextStream:
    """Turns the tokens of one row into pieces of text. A piece never ends within a character."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._kept = ""  # the text of the tokens before the current piece
        self._start = 0
        self.text = ""

    def add(self, token: int) -> str:
        """Returns the text that ``token`` completes, or "" while a character is incomplete or without a tokenizer."""
        self._ids.append(token)
        if self._tokenizer is None:
            return ""
        # Decoding from the start of the previous piece keeps the spaces that some tokenizers put between tokens.
        found = self._tokenizer.decode(self._ids[self._start :])
        if found.endswith(_INCOMPLETE) or len(found) <= len(self._kept):
            return ""
        piece = found[len(self._kept) :]
        self.text += piece
        self._start = max(0, len(self._ids) - 4)
        self._kept = self._tokenizer.decode(self._ids[self._start :])
        return piece


def _template(folder: Path) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return (folder / _TEMPLATE).read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _slow(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "decoders") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types of errors
        reason = one_line(error, 160)
        if "trust_remote_code" in reason:
            raise BadSource(
                f"the tokenizer of {folder} needs code of its own, which accel doesn't run; give token ids with "
                f"{option('prompt_ids')}"
            ) from error
        raise BadSource(
            f"the tokenizer of {folder} can't be read ({reason}); copy the tokenizer of the model there again"
        ) from error


def parse_ids(text: str) -> list[int]:
    """Reads token ids such as ``1,2,3``. Raises ``UsageError`` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"can't read the token ids {text!r}; write numbers with commas, e.g. 1,2,3")
    return [int(part) for part in parts]
