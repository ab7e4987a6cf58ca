"""Writes the command line that repeats a request, for the report."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from accel.sources.declare import parse_dims, parse_inputs
from accel.spelling import SWITCHES, flag

from ..request import OptimizeRequest
from ..stage_options import CastOptions, QuantizeOptions

# The fields that are not written as options, because they are written separately or don't change the result.
_LEFT_OUT = ("source", "spec", "use_cache")


def command_line(request: OptimizeRequest) -> str:
    """Returns the ``accel optimize`` command for ``request``, without the options that have their default values.

    A metric that is a function is written as its module and name.
    """
    words = ["accel", "optimize", request.source.text]
    given = [(one, getattr(holder, one.name)) for holder in (request, request.source) for one in fields(holder)]
    for one, value in given:
        if one.name in _LEFT_OUT or value is None or value == one.default:
            continue
        if isinstance(value, bool):
            words.append(SWITCHES.get((one.name, value), flag(one.name)))
            continue
        # accel bench also has an argument ``lengths``, but spells the option --length
        spelled = "--lengths" if one.name == "lengths" else flag(one.name)
        for text in _texts(one.name, value):
            words += [spelled, text]
    return shlex.join(words)


def _texts(name: str, value: Any) -> list[str]:
    """Returns the texts of an option's value. An option with several texts is written several times."""
    if name == "inputs":
        return [str(spec) for spec in parse_inputs(value)]
    if name == "dims":
        return [f"{dim}={r}" for dim, r in parse_dims(value).items()]
    if name == "placeholders":
        return [f"{placeholder}={text}" for placeholder, text in value.items()]
    if name == "sizes":
        return [",".join(f"{dim}={size}" for dim, size in value.items())]
    if name in ("graph_inputs", "graph_outputs"):
        return [",".join(value)]
    if name == "lengths" and not isinstance(value, str):
        return [",".join(map(str, value))]
    if isinstance(value, QuantizeOptions | CastOptions):
        return list(value.words())
    if callable(value):
        return [f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}"]
    if isinstance(value, tuple | list):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
