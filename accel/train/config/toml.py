"""Reads a dataclass from TOML and ``--key=value``, and writes a dataclass as TOML."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accel.errors import BadConfig, one_line

C = TypeVar("C")


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the nested values of a TOML file, overridden by each ``key=value`` of ``overrides``.

    Raises ``BadConfig`` if the file or an override can't be read.
    """
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfig(f"{path} does not exist; give a training config, e.g. examples/digits.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise BadConfig(f"{path} is not a TOML file ({one_line(error, None)}); correct the file") from error
    for text in overrides:
        override(body, text)
    return body


def dump(body: Mapping[str, Any]) -> str:
    """Returns ``body`` as TOML. Tables inside tables become inline tables."""
    tables = {name: value for name, value in body.items() if isinstance(value, dict)}
    lines = [f"{name} = {_toml(value)}" for name, value in body.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def override(body: dict[str, Any], text: str) -> None:
    """Sets a value in the nested dict ``body`` from ``text``, such as ``table.key=value``. A value that isn't valid
    TOML is taken as a string."""
    path, equals, value = text.partition("=")
    *tables, key = path.strip().replace("-", "_").split(".")
    if not equals or not key:
        raise BadConfig(f"can't read the override {text!r}; write --key=value or --table.key=value")
    for table in tables:
        inner = body.setdefault(table, {})
        if not isinstance(inner, dict):
            raise BadConfig(
                f"the config key {table!r} is a value and not a table, so the override {text!r} is wrong; write "
                "--key=value"
            )
        body = inner
    try:
        body[key] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        body[key] = value


def build(kind: type[C], body: Mapping[str, Any], where: str = "") -> C:
    """Builds the dataclass ``kind`` from nested plain values.

    ``where`` is the prefix of the keys in messages, such as ``optimizer.``. Raises ``BadConfig`` if ``body`` has an
    unknown key or a value of the wrong type.
    """
    if not isinstance(body, Mapping):
        raise BadConfig(f"the config key {where[:-1]} has to be a table, but is {body!r}; write [{where[:-1]}]")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in body if key not in hints]
    if unknown:
        raise BadConfig(f"the config has no key {where}{unknown[0]}; the keys are: {', '.join(hints)}")
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in body.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(typing.cast("type[Any]", kind), value, f"{where}.")
    if typing.get_origin(kind) is dict and typing.get_args(kind)[1] is not str:
        return _options(typing.get_args(kind)[1], value, where)
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise BadConfig(
                f"the config key {where} has to be a table of strings, but is {value!r}; write [{where}] with "
                '"pattern" = "style"'
            )
        return dict(value)
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list | tuple) or not all(isinstance(v, int | float) for v in value):
            raise BadConfig(
                f"the config key {where} has to be a list of numbers, but is {value!r}; write e.g. "
                f"{where} = [0.9, 0.95]"
            )
        if len(value) != 2:
            raise BadConfig(
                f"the config key {where} has {len(value)} numbers; give two numbers, e.g. {where} = [0.9, 0.95]"
            )
        return tuple(float(v) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise BadConfig(f"the config key {where} is {value!r}, but has to be {_KIND_NAMES[kind]}; correct the config")
    return value


def _options(inner: Any, value: Any, where: str) -> dict[str, Any]:
    """Returns a table of options, or a table of such tables if ``inner`` is a dict."""
    if not isinstance(value, Mapping):
        raise BadConfig(f"the config key {where} has to be a table, but is {value!r}; write [{where}]")
    if inner is Any:
        return dict(value)
    return {name: _options(Any, options, f"{where}.{_key(name)}") for name, options in value.items()}


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _key(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f' {_key(key)} = {_toml(v)}' for key, v in value.items())}{' ' if value else ''}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
