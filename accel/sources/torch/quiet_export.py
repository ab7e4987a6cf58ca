"""Lets the threads of a process take turns in PyTorch's exporters, and hides what the exporters print."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# PyTorch's exporters replace functions and keep modes for the whole process, so they run in one thread at a time. A
# thread that already exports may enter again.
one_export = threading.RLock()

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export", "torch.fx.experimental.symbolic_shapes")
_this_thread = threading.local()


@contextmanager
def quiet_export() -> Iterator[None]:
    """Waits for the exports of other threads. Within the ``with`` block, hides what this thread prints and the warnings
    of this thread, and the logs of the exporters. The prints and the warnings of other threads are shown as usual."""
    with one_export:
        if _is_quiet():
            yield
            return
        _this_thread.quiet = True
        try:
            with _streams_muted(), _warnings_ignored(), _logs_off():
                yield
        finally:
            _this_thread.quiet = False


def _is_quiet() -> bool:
    return getattr(_this_thread, "quiet", False)


class _Muted:
    """Passes everything on to ``stream`` but the text of a quiet thread.

    Code that keeps this object for longer than the ``with`` block, such as a redirection in another thread, loses no
    text.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if _is_quiet() else int(self._stream.write(text) or 0)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _streams_muted() -> Iterator[None]:
    """Replaces ``sys.stdout`` and ``sys.stderr``. File descriptors 1 and 2 stay as they are, because they belong to all
    threads."""
    muted = {}
    for name in ("stdout", "stderr"):
        own = getattr(sys, name)
        if own is not None and not isinstance(own, _Muted):
            muted[name] = own, _Muted(own)
            setattr(sys, name, muted[name][1])
    try:
        yield
    finally:
        for name, (own, replaced) in muted.items():
            if getattr(sys, name) is replaced:  # another thread may have redirected the stream since then
                setattr(sys, name, own)


class _OfQuietThread(type):
    """Makes every category of warnings a subclass of ``_Quiet`` in a quiet thread, and in no other thread."""

    def __subclasscheck__(cls, category: type) -> bool:
        return _is_quiet()


class _Quiet(Warning, metaclass=_OfQuietThread):
    pass


@contextmanager
def _warnings_ignored() -> Iterator[None]:
    """Adds a filter for the warnings of quiet threads. ``warnings.catch_warnings`` would replace all filters, and two
    threads would restore them in the wrong order."""
    warnings.simplefilter("ignore", _Quiet)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]


@contextmanager
def _logs_off() -> Iterator[None]:
    import torch

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    log_graph = torch._C._jit_onnx_log
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # The older exporter writes the whole graph to file descriptor 1 when it fails, even if PyTorch's switch for
        # this log is off.
        torch._C._jit_onnx_log = lambda *_: None
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        torch._C._jit_onnx_log = log_graph
