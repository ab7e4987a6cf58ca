"""Reads command-line options for building an engine, such as ``--engine builder-level=5 --engine workspace=2GB``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from accel.key_values import read_key_values, yes_or_no
from accel.spelling import option

# The values of the option that selects the GPUs for a TensorRT engine. With ``ampere-plus``, the engine runs on Ampere
# and later GPUs. With ``same-capability``, the engine runs on GPUs with the compute capability of the GPU that built
# the engine.
HARDWARE = ("ampere-plus", "same-capability")

_SIZE = re.compile(r"^(\d+)\s*(|B|KB|MB|GB|KiB|MiB|GiB)$")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_engine_options(texts: Iterable[str]) -> dict[str, Any]:
    """Converts ``KEY=VALUE`` texts to fields of ``EngineFromOnnxConfig``. Raises ``BadInputSpec`` for a bad text."""
    known = {key: (read, example) for key, (_, read, example) in _OPTIONS.items()}
    return {
        _OPTIONS[key][0]: value
        for key, value in read_key_values(option("engine").removesuffix("="), texts, known).items()
    }


def engine_option_words(options: dict[str, Any]) -> list[str]:
    """Returns the command-line arguments for ``options``. ``parse_engine_options`` reads these arguments back."""
    words: list[str] = []
    for key, (field, _, _) in _OPTIONS.items():
        value = options.get(field)
        if value is not None and value is not False:
            words += ["--engine", f"{key}={'yes' if value is True else value}"]
    return words


def _bytes(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _UNITS[match[2]]


_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "builder-level": ("builder_level", int, "5"),
    "workspace": ("workspace_bytes", _bytes, "2GB"),
    "version-compatible": ("version_compatible", yes_or_no, "yes"),
    "hardware": ("hardware", {name: name for name in HARDWARE}.__getitem__, HARDWARE[0]),
}
