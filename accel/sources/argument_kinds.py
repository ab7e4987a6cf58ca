"""Checks the kinds of keyword arguments, so that a wrong kind is named before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from os import PathLike
from typing import Any

from accel.errors import UsageError, shortened
from accel.spelling import option

_PATH = ((str, PathLike), "a path")
_TEXTS = ((Iterable,), "a text or a list of texts")
# A row for each keyword: the types that it takes, their words, and an example as text.
_KINDS: Mapping[str, tuple[tuple[tuple[type, ...], str], str]] = {
    "example": (((Iterable,), "a tensor, a tuple of arguments or a dict of arguments"), "(x,)"),
    "dynamic": (((Mapping, Sequence), "a dict of the axes of each input"), "{'x': {0: 'batch'}}"),
    "inputs": (((Iterable,), "a list of declarations"), "['x:float32[batch,3]']"),
    "dims": (((Mapping,), "a dict of ranges"), "{'batch': (1, 4, 8)}"),
    "weights": (_PATH, "'weights.safetensors'"),
    "adapters": (((str, PathLike, Sequence), "a path or a list of paths"), "'adapter'"),
    "out": (_PATH, "'out'"),
    "text": (_PATH, "'text.txt'"),
    "target": (_TEXTS, "'ort-cpu'"),
    "precision": (_TEXTS, "'int8'"),
    "profiles": (((Iterable,), "a list of profiles"), "['batch=1:4:8']"),
    "engine": (((Iterable,), "a list of options"), "['builder-level=3']"),
    "quantize": (((Iterable,), "a list of options"), "['samples=32']"),
    "cast": (((Iterable,), "a list of options"), "['keep_fp32=Softmax']"),
    "contexts": (((Iterable,), "a list of numbers of tokens"), "[128, 1024]"),
    "lengths": (((Iterable,), "a list of lengths or a text"), "[8, 16, 128]"),
    "sizes": (((Mapping,), "a dict of sizes"), "{'length': 128}"),
}


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` if a keyword argument in ``given`` is of a kind that no function takes."""
    for name, value in given.items():
        if value is None or name not in _KINDS or is_dataclass(value):  # options have dataclasses of their own
            continue
        (kinds, words), example = _KINDS[name]
        if not isinstance(value, kinds):
            said = shortened(repr(value), 60)
            raise UsageError(f"{option(name)} takes {words}, not {said}; give e.g. {option(name)}{example}")
