"""Ends a call with an error. The error's text travels in the metadata of the answer, whose size is limited."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from ...protocol.inference import Code, ServeError

STATUS = {code: grpc.StatusCode[code.name] for code in Code}
# Clients take 8 KB of metadata by default. If the text is longer, they report RESOURCE_EXHAUSTED and not the error.
_MOST = 4096


def refuse(context: Any, error: ServeError) -> NoReturn:
    """Ends the call with the status and the text of ``error``."""
    context.abort(STATUS[error.code], shortened(str(error)))
    raise AssertionError  # abort has raised


def quoted(text: str) -> bytes:
    """Returns ``text`` as gRPC writes it into the metadata."""
    return quote(text, safe=_PLAIN).encode("ascii")


def shortened(text: str) -> str:
    """Returns ``text``, cut so that it needs at most ``_MOST`` bytes in the metadata, where gRPC writes a byte outside
    printable ASCII as three."""
    text = text[:_MOST]
    if len(text) < _MOST // 12 or len(quote(text, safe=_PLAIN)) <= _MOST:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(quote(text[:middle], safe=_PLAIN)) <= _MOST - 4 else (low, middle - 1)
    return f"{text[:low]} ..."


_PLAIN = "".join(chr(code) for code in range(32, 127) if chr(code) != "%")
