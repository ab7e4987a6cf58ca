"""Spells the options in messages as ``opset=16`` for a Python caller and as ``--opset 16`` on the command line.

Code that writes a message calls ``option("opset", 16)`` with the name of the Python argument, for both kinds of
callers. The command line runs each command within ``on_command_line()``. Outside ``on_command_line()``, options are
spelled as Python arguments. The spelling applies to the notes and errors of all threads of the process. Each call of a
``Child`` passes the spelling on to the child process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Maps Python arguments to command-line options if their names differ. An argument ``like_this`` that isn't listed has
# the option --like-this.
FLAGS: Mapping[str, str] = {
    "out": "-o",
    "inputs": "--input",
    "dims": "--dim",
    "profiles": "--profile",
    "compute_capabilities": "--compute-capability",
    "graph_inputs": "--inputs",
    "graph_outputs": "--outputs",
    "placeholders": "--placeholder",
    "batches": "--batch",
    "lengths": "--length",
    "page": "--graph",
    "preprocess": "--normalize",
    "prompts": "--prompt",
    "columns": "--column",
}
# Maps an option that sets a field of a Python argument to its spelling in Python.
ARGUMENTS: Mapping[str, str] = {
    "layout": "preprocess=PreprocessConfig(layout=...)",
    "prompt_ids": "prompts=[[1, 2, 3]]",
}
# Maps boolean arguments and their values to command-line switches if the names differ. For an argument ``like_this``
# that isn't listed, the switch --like-this sets the argument to True.
SWITCHES: Mapping[tuple[str, bool], str] = {
    ("use_cache", False): "--no-cache",
    ("simplify", False): "--no-simplify",
    ("decoder", False): "--no-decoder",
    ("vary_session", False): "--fixed-session",
}
_NO_VALUE = object()

_command_line = False


@contextlib.contextmanager
def on_command_line(active: bool = True) -> Iterator[None]:
    """Inside the ``with`` block, options are spelled as on the command line, or as Python arguments if ``active`` is
    False."""
    global _command_line
    before, _command_line = _command_line, active
    try:
        yield
    finally:
        _command_line = before


def is_command_line() -> bool:
    """Tells whether options are spelled as on the command line."""
    return _command_line


def flag(name: str) -> str:
    """Returns the command-line option for the Python argument ``name``."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def option(name: str, value: Any = _NO_VALUE) -> str:
    """Returns the option of the Python argument ``name`` in the caller's spelling, with ``value`` if given.

    On the command line, a list becomes a repeated option and a mapping becomes repeated ``KEY=VALUE``.

    >>> option("opset", 16), option("weights"), option("dims", {"height": "16:32:64"})
    ('opset=16', 'weights=', "dims={'height': '16:32:64'}")
    >>> with on_command_line():
    ...     option("opset", 16), option("weights"), option("dims", {"height": "16:32:64"})
    ('--opset 16', '--weights', '--dim height=16:32:64')
    """
    if not _command_line:
        if name in ARGUMENTS:
            return ARGUMENTS[name]
        return f"{name}=" if value is _NO_VALUE else f"{name}={_literal(value)}"
    if value is _NO_VALUE:
        return flag(name)
    if isinstance(value, bool):
        return SWITCHES.get((name, value), flag(name))
    if isinstance(value, Mapping):
        return " ".join(f"{flag(name)} {key}={item}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name in ("graph_inputs", "graph_outputs"):
            return f"{flag(name)} {','.join(map(str, value))}"
        return " ".join(f"{flag(name)} {item}" for item in value)
    return f"{flag(name)} {value}"


def options(*names: str) -> str:
    """Returns several options in the caller's spelling, joined by "or"."""
    spelled = [option(name) for name in names]
    return spelled[0] if len(spelled) == 1 else f"{', '.join(spelled[:-1])} or {spelled[-1]}"


def arguments(**values: Any) -> str:
    """Returns the text of several options and their values in the caller's spelling. A user can copy this text into a
    call or a command."""
    return (" " if _command_line else ", ").join(option(name, value) for name, value in values.items())


def _literal(value: Any) -> str:
    """Returns ``value`` as Python code."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value) if isinstance(value, bool | int | float) else repr(str(value))
