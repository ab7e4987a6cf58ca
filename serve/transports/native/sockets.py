"""Opens the sockets that a port listens on."""

from __future__ import annotations

import contextlib
import socket

from accel.errors import UnsupportedHere, one_line

_BACKLOG = 4096


def listen(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """Returns a listening socket for each address of ``host``, all on one port. ``port=0`` takes a free port.
    ``shared`` lets other processes listen on the same port. Raises ``UnsupportedHere`` if no address can be used."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UnsupportedHere(_text(address, error)) from None
    made: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        reason: OSError | None = None
        for family, kind, protocol, _, place in dict.fromkeys(found):
            one = stack.enter_context(socket.socket(family, kind, protocol))
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shared:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(len(found) > 1))
                taken = made[0].getsockname()[1] if made else port
                one.bind((place[0], taken, *place[2:]))
                one.listen(_BACKLOG)
                one.setblocking(False)
            except OSError as error:
                # A machine without IPv6 still has names with an IPv6 address.
                if error.errno is None or family != socket.AF_INET6 or len(found) == 1:
                    raise UnsupportedHere(_text(address, error)) from None
                reason = error
                continue
            made.append(one)
        if not made:
            raise UnsupportedHere(_text(address, reason or OSError("no address"))) from None
        stack.pop_all()
    return made


def _text(address: str, error: Exception) -> str:
    return f"can't listen on {address} ({one_line(error, 120)}); choose another port with --grpc-port"
