"""Limits what a compressed message may become, and unpacks the messages of gRPC."""

from __future__ import annotations

import zlib

# A compressed message may be RATIO times larger unpacked. Less than FREE bytes are taken at any ratio, because tensors
# of equal numbers pack to a thousandth.
RATIO = 100
FREE = 16 << 20
PIECE = 1 << 20
_ENCODINGS = {"gzip": 31, "deflate": 15}  # and zlib's number of each format


class TooLarge(Exception):
    """The unpacked message is too large, or too large for its packed size."""


class Broken(Exception):
    """The packed message can't be unpacked."""


def unpack(packed: bytes, encoding: str, most: int) -> bytes:
    """Returns the unpacked message, at most ``most`` bytes. Raises ``LookupError`` for an unknown encoding, and
    ``TooLarge`` or ``Broken``."""
    stream = zlib.decompressobj(_ENCODINGS[encoding])
    free = min(most, max(FREE, RATIO * len(packed)))
    found = bytearray()
    left = packed
    try:
        while left:
            found += stream.decompress(left, PIECE)
            if len(found) > free:
                limit = f"max ({len(found)} vs. {most})" if free == most else f"{RATIO} times its packed size"
                raise TooLarge(f"Received message after decompression larger than {limit}")
            left = stream.unconsumed_tail
        found += stream.flush()
    except zlib.error as error:
        raise Broken(f"the compressed message is broken: {error}") from None
    if stream.unused_data:
        raise Broken("bytes follow the compressed message")
    if not stream.eof:
        raise Broken("the compressed message is incomplete")
    if len(found) > free:
        raise TooLarge(f"Received message after decompression larger than max ({len(found)} vs. {most})")
    return bytes(found)
