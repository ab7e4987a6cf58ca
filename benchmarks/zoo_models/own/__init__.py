"""Makes modules similar to the models that users write themselves. Each module is named after its special feature."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..case import Case

_MODULES = ("tables", "sequences", "images", "control")


def _all() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {}
    for module in _MODULES:
        found |= importlib.import_module(f"zoo_models.own.{module}").MODELS
    return found


def names() -> list[str]:
    """Returns the names of all own models."""
    return list(_all())


def make(name: str) -> Case:
    """Returns the model called ``name``."""
    return _all()[name]()
