"""Serves GRPCInferenceService, grpc.health.v1 and reflection through the extension on libnghttp2."""

from __future__ import annotations

import logging
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accel.errors import UnsupportedHere

from ...core.server import InferenceServer
from ...security.tls import Tls, check_certificates
from ..grpc.arrivals import Arrivals
from ..grpc.health import add_health_and_reflection, make_health
from ..grpc.servicer import Servicer
from ..metrics import ACCEPTED, CONNECTIONS, ENDED, LIMIT, REFUSED
from .build import port_library
from .loop import NativeLoop
from .services import Services
from .sockets import listen

log = logging.getLogger("accel.serve")

_INT32_MAX = (1 << 31) - 1
_HEADERS = 16 << 10  # bytes of the headers of a call; gRPC's limit
_STEP = 0.005  # seconds
_CONNECTIONS = 4096  # of an address


def most_connections() -> int:
    """Returns how many connections one address may have if no option says so: other clients, and the models, still get
    files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_CONNECTIONS, soft // 2))


class NativeTransport:
    """Serves an ``InferenceServer`` over gRPC. ``port=0`` takes a free port. At most ``threads`` methods other than
    ModelInfer run at the same time. ``shared`` lets other processes listen on the same port. ``max_message`` is the
    largest allowed size of a message in bytes. A connection ends if it resets more than ``max_resets`` calls in a
    second. An address has at most ``max_connections`` connections; None takes ``most_connections()``. 0 means no limit
    of either."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        host: str = "127.0.0.1",
        port: int = 8001,
        threads: int,
        max_message: int = _INT32_MAX,
        tls: Tls | None = None,
        shared: bool = False,
        max_resets: float = 1000.0,
        max_connections: int | None = None,
    ) -> None:
        self._library = port_library()
        self._server = server
        self._place = (host, port, shared)
        self._tls = tls
        self._threads, self._max_message = threads, max_message
        self._max_resets = max_resets
        self._max_connections = most_connections() if max_connections is None else max_connections
        self._sockets: list[socket.socket] = []
        self._port: Any = None
        self._loop: NativeLoop | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="accel-grpc")
        self._arrivals = Arrivals(threads)
        self._health = make_health(server)
        self._services = Services()
        servicer = Servicer(server, self._arrivals, streams=max(1, threads // 4))
        self._services.add_generic_rpc_handlers((servicer.handlers(),))
        add_health_and_reflection(self._services, self._health, server)
        self._forget = server.on_change(self._changed)
        server.local.counters.append(self.counts)

    def start(self) -> int:
        """Starts to listen, and returns the port. Raises ``UnsupportedHere`` if the port is in use or the certificate
        can't be used."""
        if self._tls is not None:
            check_certificates(self._tls)
        host, port, shared = self._place
        sockets = listen(host, port, shared=shared)
        number = int(sockets[0].getsockname()[1])
        self._port = self._library.Port(
            tuple(one.detach() for one in sockets),
            message=self._max_message,
            partial=2 * self._max_message,
            headers=_HEADERS,
            # Limits the number of open calls of one connection. A call stays open until the client has read the answer.
            streams=self._threads * 16,
            resets=self._max_resets,
            per_address=self._max_connections,
        )
        if self._tls is not None:
            self._certify(self._tls)
        self._loop = NativeLoop(
            self._port,
            self._server,
            self._services.find,
            self._arrivals,
            self._pool,
            most=self._threads * 8,
            most_message=self._max_message,
        )
        self._loop.start()
        self._arrivals.start()
        return number

    def _certify(self, tls: Tls) -> None:
        ca = str(tls.client_ca) if tls.client_ca else None
        try:
            self._port.certify(str(tls.certificate), str(tls.key), ca)
        except ValueError as error:
            raise UnsupportedHere(f"the TLS files can't be used ({error}); check certificate, key and CA") from None

    def renew(self, tls: Tls) -> None:
        """Uses the certificates of ``tls`` for new connections. Raises ``UnsupportedHere``, and keeps the old
        certificates, if the new certificates can't be used."""
        check_certificates(tls)
        self._certify(tls)

    def counts(self) -> dict[str, int]:
        """Returns what the port has counted, for ``metrics.render``."""
        if self._port is None:
            return {}
        found = self._port.counts()
        counts = {key: found[key] for key in (CONNECTIONS, ACCEPTED, REFUSED)}
        counts[LIMIT] = self._max_connections
        return counts | {ENDED + reason: count for reason, count in found["floods"].items()}

    def _changed(self) -> None:
        if self._port is not None and not self._server.taking:
            self._port.leave()

    def _sent(self) -> bool:
        return not self._port.counted and not self._port.counts()["unsent"]

    def finish(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until the answers of all taken calls are sent."""
        deadline = time.monotonic() + timeout
        sent = self._arrivals.wait(timeout)
        while self._port is not None and not (sent and self._sent()):
            if time.monotonic() > deadline:
                log.warning("answers were left when the process ended")
                return
            time.sleep(_STEP)

    def stop(self, grace: float) -> None:
        """Takes no new connections. Cuts off the running calls that have not ended after ``grace`` seconds."""
        self._health.refresh()
        self._arrivals.stop()
        loop, self._loop = self._loop, None
        if loop is None:
            return
        self._forget()
        self._port.refuse()
        self._port.leave()
        deadline = time.monotonic() + grace
        while self._port.open or not self._sent():
            if time.monotonic() > deadline:
                log.warning("calls were left when the gRPC port closed")
                break
            time.sleep(_STEP)
        loop.end()
        loop.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
