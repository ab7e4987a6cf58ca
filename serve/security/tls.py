"""Checks the TLS certificates of a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from accel.errors import UnsupportedHere


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Paths of PEM files. With ``client_ca``, clients have to show a certificate signed by this CA (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


def check_certificates(tls: Tls) -> ssl.SSLContext:
    """Returns the server's SSL context with the files of ``tls``. Raises ``UnsupportedHere`` if a file can't be
    used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise UnsupportedHere(f"the TLS files can't be used ({error}); check certificate, key and CA") from None
    return context
