"""Parses ``KEY=VALUE`` options with a table of the known keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel.errors import BadInputSpec


def read_key_values(
    flag: str, texts: Iterable[str], known: Mapping[str, tuple[Callable[[str], Any], str]], *, underscores: bool = False
) -> dict[str, Any]:
    """Parses ``texts`` of the form ``KEY=VALUE`` and returns the values by key. If a key repeats and its values are
    tuples, joins the tuples.

    ``known`` maps each key to a parser and an example. The parser raises ``KeyError`` or ``ValueError`` for a bad
    value. If ``underscores`` is True, a key may have underscores in place of its hyphens.

    Raises ``BadInputSpec`` if a text can't be read.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.replace("_", "-") if underscores else key
        if key not in known or not equals:
            raise BadInputSpec(f"can't read {flag} {text!r}; write KEY=VALUE with one of: {', '.join(known)}")
        read, example = known[key]
        try:
            made = read(value)
        except (KeyError, ValueError):
            raise BadInputSpec(f"can't read {flag} {text!r}; write e.g. {key}={example}") from None
        found[key] = (*found.get(key, ()), *made) if isinstance(made, tuple) else made
    return found


def yes_or_no(text: str) -> bool:
    """Returns True for "yes" and False for "no". Raises ``KeyError`` if ``text`` is neither "yes" nor "no"."""
    return {"yes": True, "no": False}[text]
