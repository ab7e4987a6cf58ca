"""Trace and log settings, as the protocol's two settings calls see and change them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from accel.serve.inference import Parameter
from accel.serve.tensors import invalid

_TRACE: dict[str, list[str]] = {
    "trace_file": [""],
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_mode": ["triton"],
}
_LEVELS = {"OFF", "TIMESTAMPS", "TENSORS"}
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}  # the smallest each may be


class TraceSettings:
    """Settings of the server, and of each model over them. They are kept and answered; nothing is traced by them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[str, dict[str, list[str]]] = {"": {}}

    def of(self, model: str) -> dict[str, list[str]]:
        with self._lock:
            return {**_TRACE, **self._own[""], **self._own.get(model, {})}

    def change(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        """Set, or clear where the value is None. ``INVALID_ARGUMENT`` for a setting or value that doesn't exist."""
        for key, value in changes.items():
            if key not in _TRACE:
                raise invalid(f"invalid trace setting '{key[:64]}'; there are {', '.join(_TRACE)}")
            if key in ("trace_file", "trace_mode") and value is not None:
                raise invalid(f"trace setting '{key}' can't be updated through the network")
            if key == "trace_level" and value is not None and not set(value) <= _LEVELS:
                raise invalid(f"invalid value for '{key}'; use {', '.join(sorted(_LEVELS))}")
            if key in _NUMBERS and value is not None:
                _check_number(key, value)
        with self._lock:
            own = self._own.setdefault(model, {})
            for key, value in changes.items():
                if value is None:
                    own.pop(key, None)
                else:
                    own[key] = list(value)


def _check_number(key: str, value: list[str]) -> None:
    try:
        number = int(value[0]) if len(value) == 1 and len(value[0]) < 20 else None
    except ValueError:
        number = None
    if number is None or number < _NUMBERS[key]:
        raise invalid(f"invalid value for '{key}'; write one number from {_NUMBERS[key]}")


class LogSettings:
    """What the server logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Parameter] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }

    def all(self) -> dict[str, Parameter]:
        with self._lock:
            return dict(self._values)

    def change(self, changes: Mapping[str, Parameter]) -> None:
        """``INVALID_ARGUMENT`` for a setting or value that doesn't exist, or the log's file."""
        for key, value in changes.items():
            if key not in self._values:
                raise invalid(f"Unknown log setting '{key[:64]}'; there are {', '.join(self._values)}")
            if key == "log_file":
                raise invalid("log file location can not be updated through network protocol")
            if type(value) is not type(self._values[key]):
                raise invalid(f"log setting '{key}' has to be a {type(self._values[key]).__name__}")
            if key == "log_format" and value not in ("default", "ISO8601"):
                raise invalid("log_format has to be default or ISO8601")
        with self._lock:
            self._values.update(changes)
            self._apply()

    def _apply(self) -> None:
        values, logger = self._values, logging.getLogger("accel.serve")
        level = logging.CRITICAL
        for key, found in (("log_error", logging.ERROR), ("log_warning", logging.WARNING), ("log_info", logging.INFO)):
            if values[key]:
                level = found
        logger.setLevel(logging.DEBUG if values["log_verbose_level"] else level)
