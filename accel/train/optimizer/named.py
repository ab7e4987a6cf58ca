"""Loads the optimizer or the schedule that the config names by its dotted name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel.errors import BadConfig, BadSource


def load_named(dotted: str, *, what: str, name: str, known: Sequence[str], example: str) -> Any:
    """Returns the object ``dotted``, such as ``torch.optim.RMSprop``. ``what`` is optimizer or schedule, ``name`` is
    the text in the config, and ``known`` are accel's short names.

    Raises ``BadConfig`` if there is no such object.
    """
    from accel.sources.python_object import load_object

    module, _, attribute = dotted.rpartition(".")
    try:
        return load_object(f"{module}:{attribute}", what)[1]
    except BadSource as error:
        raise BadConfig(
            f"{what}.name is {name!r}, which is no {what} ({error}); use {', '.join(known)}, or a class such as "
            f"{example}"
        ) from error
