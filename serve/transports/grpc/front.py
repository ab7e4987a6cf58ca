"""Serves GRPCInferenceService, grpc.health.v1 and reflection on grpcio's synchronous server.

A waiting call holds a thread of the pool. In a measurement, threads took about half the processor time of an event
loop. Waiting threads take no processor time.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import grpc

from accel.errors import UnsupportedHere, one_line

from ...core.server import InferenceServer
from ...protocol import messages as proto
from ...security.tls import Tls, check_certificates
from .arrivals import Arrivals
from .choice import CYGRPC
from .health import add_health_and_reflection, make_health
from .servicer import Servicer

log = logging.getLogger("accel.serve")

_INT32_MAX = (1 << 31) - 1


class GrpcTransport:
    """Serves an ``InferenceServer`` over gRPC. ``port=0`` takes a free port. At most ``threads`` calls are handled at
    the same time. ``shared`` lets other processes listen on the same port. ``max_message`` is the largest allowed size
    of a message in bytes. ``transport`` is ``cygrpc`` or ``grpc``."""

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
        transport: str,
    ) -> None:
        self._server = server
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls = tls
        self._renewed: grpc.ServerCertificateConfiguration | None = None
        self._arrivals = Arrivals(threads)
        self._servicer = Servicer(server, self._arrivals, streams=max(1, threads // 4))
        self._health = make_health(server)
        self._grpc = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="accel-grpc"),
            options=[
                ("grpc.max_send_message_length", max_message),
                ("grpc.max_receive_message_length", max_message),
                ("grpc.so_reuseport", int(shared)),
                # Accepts frequent pings. By default, grpcio treats frequent pings as an attack.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                # Limits the number of open calls of one connection. A call stays open until the client has read the
                # answer.
                ("grpc.max_concurrent_streams", threads * 16),
            ],
            # grpcio accepts at most ``maximum_concurrent_rpcs`` calls at the same time, and refuses further calls
            # instead of queueing them.
            maximum_concurrent_rpcs=threads * 8,
        )
        self._grpc.add_generic_rpc_handlers((self._servicer.handlers(),))
        add_health_and_reflection(self._grpc, self._health, server)
        self._start_grpc = self._grpc.start
        if transport == CYGRPC:
            from .infer_loop import InferLoop

            method = f"/{proto.SERVICE}/ModelInfer"
            self._start_grpc = InferLoop(self._grpc, method, server, self._arrivals, most=threads * 8).start

    def start(self) -> int:
        """Starts to listen, and returns the port. Raises ``UnsupportedHere`` if the port is in use or the certificate
        can't be used."""
        try:
            if self._tls is None:
                port = self._grpc.add_insecure_port(self._address)
            else:
                # Each new connection gets the current certificate and key, so that renew() can replace both.
                credentials = grpc.dynamic_ssl_server_credentials(
                    _certificates(self._tls), self._take_renewed, self._tls.client_ca is not None
                )
                port = self._grpc.add_secure_port(self._address, credentials)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedHere(
                f"can't listen on {self._address} ({one_line(error, 120)}); choose another port with --grpc-port"
            ) from None
        if port == 0:
            raise UnsupportedHere(f"can't listen on {self._address}; check the address and the TLS files")
        self._start_grpc()
        self._arrivals.start()
        return int(port)

    def renew(self, tls: Tls) -> None:
        """Uses the certificates of ``tls`` for new connections. Raises ``UnsupportedHere``, and keeps the old
        certificates, if the new certificates can't be used."""
        self._renewed = _certificates(tls)

    def _take_renewed(self) -> grpc.ServerCertificateConfiguration | None:
        found, self._renewed = self._renewed, None
        return found

    def finish(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until the answers of all taken calls are sent.

        ``stop`` isn't called before the process ends: gRPC's core cancels the calls that arrive during its own
        shutdown. A cancelled call is lost, because clients only send a call again after UNAVAILABLE. If a connection
        closes, clients report UNAVAILABLE.
        """
        if not self._arrivals.wait(timeout):
            log.warning("answers were left when the process ended")

    def stop(self, grace: float) -> None:
        """Takes no new calls. Cuts off the running calls that have not ended after ``grace`` seconds."""
        self._health.refresh()
        # grpcio cuts off the remaining calls after ``grace`` seconds. ``stop`` waits at most ``grace`` + 5 seconds, so
        # that a call that never ends doesn't keep the process alive.
        if not self._grpc.stop(grace).wait(grace + 5.0):
            log.warning("calls were left when the gRPC port closed")
        self._arrivals.stop()


def _certificates(tls: Tls) -> grpc.ServerCertificateConfiguration:
    check_certificates(tls)
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], tls.client_ca.read_bytes() if tls.client_ca else None)
