"""Receives the body of an HTTP request: within limits, without a second copy, and unpacked if it is compressed."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

from aiohttp import web

from ...protocol.tensors import invalid
from ..unpacking import FREE, PIECE, RATIO

_ENCODINGS = ("gzip", "x-gzip", "deflate")

# Calls a function on another thread, because unpacking takes time.
Apart = Callable[..., Awaitable[bytes]]


async def read_body(request: web.Request, most: int, apart: Apart) -> bytearray:
    """Returns the body, at most ``most`` bytes. ``apart(function, *arguments)`` calls a function on another thread.

    Raises ``HTTPRequestEntityTooLarge`` if the body is larger, and ``ServeError`` INVALID_ARGUMENT if the body's
    encoding is unknown or broken.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    length = request.content_length
    if length is not None and length > most:
        raise _too_large(most, length)
    if encoding in ("", "identity"):
        return await _plain(request, length, most)
    if encoding not in _ENCODINGS:
        raise invalid(f"the Content-Encoding '{encoding[:32]}' is not supported; use gzip or deflate, or none")
    return await _unpacked(request, most, apart)


async def _plain(request: web.Request, length: int | None, most: int) -> bytearray:
    found = bytearray(length or 0)  # as large as the body, so that it needn't grow, which copies it
    at = 0
    while chunk := await request.content.readany():
        if at + len(chunk) > most:
            raise _too_large(most, at + len(chunk))
        found[at : at + len(chunk)] = chunk
        at += len(chunk)
    del found[at:]
    return found


async def _unpacked(request: web.Request, most: int, apart: Apart) -> bytearray:
    found = bytearray()
    received = 0
    unpack = None
    while chunk := await request.content.readany():
        received += len(chunk)
        if unpack is None:
            # The encoding deflate is zlib's format by the standard, but some clients send it without zlib's header.
            unpack = zlib.decompressobj(47 if chunk[0] == 0x1F or chunk[0] & 15 == 8 else -15)
        while chunk:
            try:
                found += await apart(unpack.decompress, chunk, PIECE)
            except zlib.error as error:
                raise invalid(f"the compressed body is broken: {error}") from None
            if unpack.unused_data:
                raise invalid("bytes follow the compressed body")
            if len(found) > most:
                raise _too_large(most, len(found))
            if len(found) > max(FREE, RATIO * received):
                raise web.HTTPRequestEntityTooLarge(
                    most, len(found), text=f"the body is more than {RATIO} times larger unpacked; send it uncompressed"
                )
            chunk = unpack.unconsumed_tail
    if unpack is not None and not unpack.eof:
        raise invalid("the compressed body is incomplete")
    return found


def _too_large(most: int, size: int) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(
        most, size, text=f"the body has more than {most} bytes; send less, or start the server with --max-message"
    )
