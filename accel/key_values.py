"""``KEY=VALUE`` on the command line, read by a table of what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel.errors import BadInputSpec


def read_key_values(
    flag: str, texts: Iterable[str], known: Mapping[str, tuple[Callable[[str], Any], str]], *, underscores: bool = False
) -> dict[str, Any]:
    """``KEY=VALUE`` each, by key. ``known``: what reads the value of each (``KeyError`` or ``ValueError`` where it is
    none), and an example of one; values that are tuples add up. ``underscores``: a key may be written with them.
    ``BadInputSpec`` for what can't be read."""
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
    """``KeyError`` where it is neither."""
    return {"yes": True, "no": False}[text]
