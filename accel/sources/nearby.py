"""Finds an existing path whose name is close to a mistyped path."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path


def nearby(path: str) -> str:
    """Returns the existing path that differs from ``path`` only in a few letters of its last name, or ""."""
    given = Path(path)
    try:
        names = [entry.name for entry in given.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = get_close_matches(given.name, names, n=1, cutoff=0.75)
    return str(given.with_name(close[0])) if close and given.name else ""


def or_nearby(path: str) -> str:
    """Returns the advice to check ``path``, with an existing path that is close to it."""
    near = nearby(path)
    return f"check the path (did you mean {near}?)" if near else "check the path"
