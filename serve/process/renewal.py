"""Reloads tokens and certificates if their files change while the server runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from accel.errors import AccelError

from ..core.server import InferenceServer
from ..core.transport import Transport
from ..security.access import read_tokens
from .options import ServeOptions

log = logging.getLogger("accel.serve")

_EVERY = 5.0  # seconds


class Renewal:
    """Checks the files of the tokens and certificates every five seconds. If a file is broken or half written, logs the
    error and keeps the old tokens or certificates."""

    def __init__(self, options: ServeOptions, server: InferenceServer, transports: Iterable[Transport]) -> None:
        self._options, self._server, self._transports = options, server, tuple(transports)
        self._what: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {}
        if options.tokens:
            self._what["tokens"] = ((options.tokens,), self._renew_tokens)
        tls = (options.tls_certificate, options.tls_key, options.tls_client_ca)
        if any(tls):
            self._what["certificates"] = (tuple(path for path in tls if path), self._renew_certificates)
        self._seen = {name: _state(files) for name, (files, _) in self._what.items()}
        self._stop = threading.Event()

    def start(self) -> None:
        if self._what:
            threading.Thread(target=self._run, name="accel-renewal", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self.look()

    def look(self) -> None:
        """Reloads the files that have changed since the last check."""
        for name, (files, renew) in self._what.items():
            state = _state(files)
            if state == self._seen[name]:
                continue
            self._seen[name] = state
            try:
                renew()
                log.info(f"{name} renewed")
            except AccelError as error:
                log.error(f"{name} not renewed, the old ones stay", extra={"reason": str(error)})
            except Exception:
                log.exception(f"{name} not renewed, the old ones stay")

    def _renew_tokens(self) -> None:
        assert self._options.tokens is not None
        self._server.access = read_tokens(Path(self._options.tokens))
        self._server.memory.keep(self._server.access.names)

    def _renew_certificates(self) -> None:
        tls = self._options.tls()
        assert tls is not None
        for transport in self._transports:
            transport.renew(tls)


def _state(files: Iterable[str]) -> list[tuple[int, int, int] | None]:
    """Returns a value that changes if one of ``files`` is written or replaced."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            stat = Path(file).stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found
