"""Holds the trace settings and the log settings, which clients can read and change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ..protocol.inference import Parameter
from ..protocol.tensors import invalid

_LEVELS = {"OFF", "TIMESTAMPS", "TENSORS"}
_NUMBERS = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}  # the smallest allowed value of each setting


@dataclass
class _Sampler:
    """Chooses one of every ``rate`` requests to trace, until ``left`` requests are traced. With a ``rate`` of 0, no
    request is chosen. If ``left`` is -1, the number of traced requests has no limit."""

    on: bool
    rate: int
    left: int
    seen: int = 0

    def take(self, propagated: bool) -> bool:
        if not self.on or propagated:
            return self.on
        if not self.rate or not self.left:
            return False
        self.seen += 1
        if self.seen % self.rate:
            return False
        if self.left > 0:
            self.left -= 1
        return True


class TraceSettings:
    """Holds the trace settings of the server. A model may have its own settings, which override the server's settings.

    ``url`` is the endpoint of the OpenTelemetry traces. One of every ``rate`` requests is traced. Without a URL,
    clients can read and change the settings, but no request is traced.
    """

    def __init__(self, url: str = "", rate: int = 1000) -> None:
        self._lock = threading.Lock()
        self._start = {
            "trace_level": ["TIMESTAMPS" if url else "OFF"],
            "trace_rate": [str(rate)],
            "trace_count": ["-1"],
            "trace_mode": ["opentelemetry" if url else "triton"],
            **({"url": [url]} if url else {"trace_file": [""], "log_frequency": ["0"]}),
        }
        self._own: dict[str, dict[str, list[str]]] = {"": {}}
        self._samplers = {"": self._sampler("")}

    def of(self, model: str) -> dict[str, list[str]]:
        """Returns the settings of ``model``, or of the server if ``model`` is empty. ``trace_count`` is the number of
        requests that may still be traced."""
        with self._lock:
            left = self._samplers.get(model, self._samplers[""]).left
            return {**self._values(model), "trace_count": [str(left)]}

    def _values(self, model: str) -> dict[str, list[str]]:
        return {**self._start, **self._own[""], **self._own.get(model, {})}

    def _sampler(self, model: str) -> _Sampler:
        values = self._values(model)
        return _Sampler(
            "TIMESTAMPS" in values["trace_level"], int(values["trace_rate"][0]), int(values["trace_count"][0])
        )

    def sample(self, model: str, *, propagated: bool) -> bool:
        """Returns True if the request has to be traced, and counts the request. While tracing is on, a request with a
        trace context from the client (``propagated``) is always traced and not counted."""
        with self._lock:
            return self._samplers.get(model, self._samplers[""]).take(propagated)

    def changed(self) -> dict[str, dict[str, list[str] | None]]:
        """Returns, for each model, the settings that were changed since the server's start. The key "" holds the
        changes of the server's own settings."""
        with self._lock:
            return {model: dict(own) for model, own in self._own.items() if own}

    def change(self, model: str, changes: Mapping[str, list[str] | None]) -> None:
        """Sets each setting in ``changes``. A value of None undoes an earlier change of the setting. Raises
        ``ServeError`` INVALID_ARGUMENT if a setting is unknown or its value is not allowed."""
        for key, value in changes.items():
            if key not in self._start:
                raise invalid(f"invalid trace setting '{key[:64]}'; use one of {', '.join(self._start)}")
            if key in ("trace_file", "trace_mode", "url") and value is not None:
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
            if model and not own:
                del self._own[model]
            # A change of the server's settings also changes the defaults of every model, so all samplers are made anew.
            self._samplers = {name: self._sampler(name) for name in self._own}


def _check_number(key: str, value: list[str]) -> None:
    try:
        number = int(value[0]) if len(value) == 1 and len(value[0]) < 20 else None
    except ValueError:
        number = None
    if number is None or number < _NUMBERS[key]:
        raise invalid(f"invalid value for '{key}'; write one number of at least {_NUMBERS[key]}")


class LogSettings:
    """Holds the log settings of the server."""

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
        """Changes the settings. Raises ``ServeError`` INVALID_ARGUMENT if a setting is unknown or its value is not
        allowed. Also refuses to change ``log_file``, because only the command line sets ``log_file``."""
        for key, value in changes.items():
            if key not in self._values:
                raise invalid(f"Unknown log setting '{key[:64]}'; use one of {', '.join(self._values)}")
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
