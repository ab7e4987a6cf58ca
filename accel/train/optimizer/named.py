"""Loads the optimizer or the schedule that the config names by its dotted name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from accel.errors import BadConfig, BadSource


def load_named(dotted: str, *, what: str, name: str, known: Sequence[str], example: str, base: type) -> Any:
    """Returns the object ``dotted``, such as ``torch.optim.RMSprop``. ``what`` is optimizer or schedule, ``name`` is
    the text in the config, and ``known`` are accel's short names.

    Raises ``BadConfig`` if there is no such object. The message lists the subclasses of ``base`` with similar names.
    """
    from accel.sources.python_object import load_object

    module, _, attribute = dotted.rpartition(".")
    try:
        return load_object(f"{module}:{attribute}", what)[1]
    except BadSource as error:
        if module not in sys.modules:
            raise BadConfig(
                f"{what}.name is {name!r}, which is no {what} ({error}); use {', '.join(known)}, or a class such as "
                f"{example}"
            ) from error
        near = [f"{module}.{each}" for each in _near(attribute, vars(sys.modules[module]), base)]
        fix = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(known)}, or a class such as {example}"
        raise BadConfig(f"{what}.name is {name!r}, but {module} has no {attribute}; {fix}") from error


def _near(name: str, names: dict[str, Any], base: type) -> list[str]:
    """Returns the names of public subclasses of ``base`` that are near ``name``, whatever their upper and lower
    case."""
    kinds = {key.lower(): key for key, kind in names.items() if isinstance(kind, type) and issubclass(kind, base)}
    kinds = {lower: key for lower, key in kinds.items() if names[key] is not base and not key.startswith("_")}
    return [kinds[lower] for lower in get_close_matches(name.lower(), kinds)]
