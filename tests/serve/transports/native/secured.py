"""Starts a server with TLS and a token, and makes TLS handshakes that end in their middle or have a wrong byte."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from hyperframe.frame import PingFrame, SettingsFrame

from tests.serve.transports.native.hostile import PREFACE
from tests.support.certificates import certificate

TOKEN = "the-only-token"
# What clients without the token send.
OTHERS = [
    ("authorization", value) for value in ("Bearer x", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN)
]


@dataclass
class Secured:
    """The server, the TLS settings of raw clients, and what a client with the token sends. ``campaign`` holds the
    options of a campaign against this server."""

    process: Any
    context: ssl.SSLContext
    ca: Path
    headers: dict[str, str]
    campaign: dict[str, Any] = field(default_factory=dict)

    def client(self, port: int) -> triton.InferenceServerClient:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return triton.InferenceServerClient(
            f"127.0.0.1:{port}", ssl=True, root_certificates=str(self.ca), channel_args=options
        )


def secured_server(folder: Path, start: Callable[..., Any]) -> Secured:
    """Starts a server with ``start``, which gets the options for TLS and the token."""
    issuer = certificate(folder, "ca")
    certificate(folder, "server", issuer)
    (folder / "tokens.toml").write_text(f"[[token]]\nname = 'one'\ntoken = '{TOKEN}'\ncontrol = true\n")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # these certificates have only the required fields
    context.set_alpn_protocols(["h2"])
    process = start(
        tokens=str(folder / "tokens.toml"),
        tls_certificate=str(folder / "server.pem"),
        tls_key=str(folder / "server.key"),
    )
    return Secured(process, context, folder / "ca.pem", {"authorization": f"Bearer {TOKEN}"})


def handshake(
    port: int,
    context: ssl.SSLContext,
    *,
    cut: int | None = None,
    wrong: int | None = None,
    leaves: str | contextlib.ExitStack = "closes",
) -> int:
    """Connects, sends a ping once TLS is up, waits for the answer, and returns the number of the bytes that it sent.
    Stops after ``cut`` bytes. The byte ``wrong`` has another value. At its end, it ``leaves`` the connection closed,
    reset, or open until the stack closes it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    sent = 0
    written = False
    with made if isinstance(leaves, str) else contextlib.nullcontext():
        while True:
            done = False
            try:
                if not written:
                    tls.do_handshake()
                    tls.write(PREFACE + SettingsFrame(0).serialize() + PingFrame(0, b"is it up").serialize())
                    written = True
                done = b"is it up" in tls.read(1 << 14)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:  # the server, or this client, found the wrong byte
                break
            data = bytearray(outgoing.read())
            if wrong is not None and sent <= wrong < sent + len(data):
                data[wrong - sent] ^= 0xFF
            part = data if cut is None else data[: cut - sent]
            try:
                made.sendall(part)
                sent += len(part)
                if done or sent == cut:
                    break
                if wrong is not None and sent > wrong:
                    made.shutdown(socket.SHUT_WR)  # as a part of a length, the byte would let both sides wait
                found = made.recv(1 << 16)
            except OSError:
                break
            if not found:
                break
            incoming.write(found)
        if leaves == "resets":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if not isinstance(leaves, str):
        leaves.callback(made.close)
    return sent
