"""The command that asks for what was asked for: what a report names to be made again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from accel.artifact import Artifact
from accel.sources.declare import parse_dims, parse_inputs

# Parameters of ``accel.optimize`` that are spelled otherwise on the command line.
_FLAGS = {
    "profiles": "--profile",
    "compute_capabilities": "--compute-capability",
    "inputs": "--input",
    "dims": "--dim",
    "graph_inputs": "--inputs",
    "graph_outputs": "--outputs",
    "out": "-o",
}
_SWITCHES = {
    "kernels": (True, "--kernels"),
    "strip_training_ops": (True, "--strip-training-ops"),
    "vary_session": (False, "--fixed-session"),
    "use_cache": (False, ""),
}


def command_line(model: Any, asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """``accel optimize`` with those of ``asked`` (parameters of ``accel.optimize`` by name) that aren't ``defaults``.

    A metric that was given as a function goes by its module and name.
    """
    words = ["accel", "optimize", str(model.path if isinstance(model, Artifact) else model)]
    for name, value in asked.items():
        if value is None or value == defaults.get(name):
            continue
        if name in _SWITCHES:
            words += [_SWITCHES[name][1]] if value is _SWITCHES[name][0] and _SWITCHES[name][1] else []
            continue
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        for text in _texts(name, value):
            words += [flag, text]
    return shlex.join(words)


def _texts(name: str, value: Any) -> list[str]:
    if name == "inputs":
        return [str(spec) for spec in parse_inputs(value)]
    if name == "dims":
        return [f"{dim}={r}" for dim, r in parse_dims(value).items()]
    if name == "sizes":
        return [",".join(f"{dim}={size}" for dim, size in value.items())]
    if name in ("graph_inputs", "graph_outputs"):
        return [",".join(value)]
    if name == "lengths" and not isinstance(value, str):
        return [",".join(map(str, value))]
    if callable(value):
        return [f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}"]
    if isinstance(value, tuple | list):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
