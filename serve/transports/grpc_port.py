"""Opens the gRPC port with the requested transport."""

from __future__ import annotations

from typing import Any

from ..core.server import InferenceServer
from ..core.transport import Transport
from .grpc.choice import NATIVE, chosen


def open_grpc(
    server: InferenceServer, *, transport: str, max_resets: float, max_connections: int | None, **options: Any
) -> Transport:
    """Returns the transport for ``--transport``. Only ``NativeTransport`` can limit resets and connections; ``options``
    are for every transport. Raises ``UnsupportedHere`` if the transport can't be used here."""
    found = chosen(transport)
    if found == NATIVE:
        from .native.front import NativeTransport

        return NativeTransport(server, max_resets=max_resets, max_connections=max_connections, **options)
    from .grpc.front import GrpcTransport

    return GrpcTransport(server, transport=found, **options)
