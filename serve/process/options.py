"""Defines ``ServeOptions``, which holds all options of ``accel serve``. The serving processes get the ``ServeOptions``
as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from accel.errors import UsageError

from ..core.server import InferenceServer
from ..core.tracing import open_tracing
from ..models.files import Trust
from ..models.loading import Loading
from ..models.pinning import parse_policy
from ..models.places import NamedModels, Places
from ..models.remote import Mirror
from ..models.repository import Repository
from ..scheduling.rate_limit import RateLimiter, parse_limit
from ..scheduling.response_cache import ResponseCache
from ..security.access import Access, read_tokens
from ..security.tls import Tls

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one server.

    ``repository`` is a folder, or an address that fsspec reads. Without a repository, ``named`` holds single models in
    the form ``NAME=PATH`` (see ``models/places.py``). For ``grpc_port`` and ``http_port``, 0 takes a free
    port and None turns the protocol off. ``models`` are the models to load at the start in explicit mode. ``cores`` is
    the number of cores that the sessions of one model share, or 0 for all cores that the process may use. ``threads``
    is the number of threads of each session, or 0 for the session's share of ``cores``. ``transport`` is ``native``,
    ``cygrpc``, ``grpc`` or ``auto`` (see ``transports/grpc/choice.py``). ``max_connections`` are the connections of an
    address; None takes a limit that leaves files for others. If ``restart`` is True, a supervisor restarts a crashed
    serving process, even if ``processes`` is 1. ``rate_limits`` have the form ``NAME:COUNT``. ``host_policies`` have
    the form ``NAME,cpu-cores=RANGES``. After SIGTERM, the server takes requests for ``drain_delay`` seconds but reports
    that it isn't ready. Then open requests have ``drain`` seconds to end. A message has at most ``max_message`` bytes;
    0 means 256 MiB, or more if a model needs it. ``trace`` is the OTLP endpoint of the traces. One of every
    ``trace_rate`` requests is traced. ``tokens``, ``tls_*`` and ``log_file`` are paths.
    """

    repository: str = ""
    named: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    grpc_port: int | None = 8001
    http_port: int | None = 8000
    mode: str = "none"
    models: tuple[str, ...] = ()
    poll_seconds: float = 15.0
    processes: int = 1
    restart: bool = False
    threads: int = 0
    cores: int = 0
    transport: str = "auto"
    max_resets: float = 1000.0
    max_connections: int | None = None
    grpc_threads: int = 512
    max_message: int = 0
    drain: float = 30.0
    drain_delay: float = 1.0
    tokens: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    insecure: bool = False
    allow_pickle: bool = False
    allow_python_backend: bool = False
    allow_model_upload: bool = False
    server_name: str = "accel"
    extensions: tuple[str, ...] = ()
    strict_readiness: bool = False
    response_cache_bytes: int = 64 << 20
    rate_limits: tuple[str, ...] = ()
    host_policies: tuple[str, ...] = ()
    trace: str | None = None
    trace_rate: int = 1000
    log_file: str | None = None
    log_level: str = "info"

    @property
    def supervised(self) -> bool:
        """Tells whether a supervisor starts the serving processes."""
        return self.processes > 1 or self.restart

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ServeOptions:
        body = json.loads(text)
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
        return cls(**options)

    def tls(self) -> Tls | None:
        """Returns the certificates, or None if the server doesn't use TLS. Raises ``UsageError`` if the certificate or
        the key is missing."""
        if not (self.tls_certificate or self.tls_key or self.tls_client_ca):
            return None
        if not (self.tls_certificate and self.tls_key):
            raise UsageError("TLS needs both --tls-certificate and --tls-key")
        ca = Path(self.tls_client_ca) if self.tls_client_ca else None
        return Tls(certificate=Path(self.tls_certificate), key=Path(self.tls_key), client_ca=ca)

    def open_repository(self) -> Repository:
        """Returns the repository without loading a model."""
        places: Path | Places = Path(self.repository)
        refresh = None
        if self.named:
            pairs = (text.partition("=") for text in self.named)
            places = NamedModels({name: Path(path) for name, _, path in pairs})
        elif "://" in self.repository:
            mirror = Mirror(self.repository)
            places, refresh = mirror.folder, mirror.refresh
        return Repository(
            places,
            refresh=refresh,
            mode=self.mode,
            startup=self.models,
            loading=Loading(
                trust=Trust(
                    insecure=self.insecure, allow_pickle=self.allow_pickle, allow_python=self.allow_python_backend
                ),
                threads=self.threads,
                cores=self.cores,
                cache=ResponseCache(self.response_cache_bytes) if self.response_cache_bytes else None,
                limiter=RateLimiter(_parsed("--rate-limit-resource", self.rate_limits, parse_limit)),
                host_policies=_parsed("--host-policy", self.host_policies, parse_policy),
            ),
            poll_seconds=self.poll_seconds,
            drain=self.drain,
        )

    def open_server(self) -> InferenceServer:
        """Returns the server without loading a model or opening a port."""
        tracing = open_tracing(self.trace, self.trace_rate) if self.trace else None
        access = read_tokens(Path(self.tokens)) if self.tokens else Access()
        return InferenceServer(
            self.open_repository(),
            access=access,
            strict_readiness=self.strict_readiness,
            name=self.server_name,
            extensions=self.extensions,
            allow_upload=self.allow_model_upload,
            tracing=tracing,
            # One model may occupy only some of the threads, so that a hanging model can't block the other models.
            max_waiting=max(1, self.grpc_threads - max(2, self.grpc_threads // 8)),
        )


def _parsed(flag: str, texts: tuple[str, ...], parse: Callable[[str], tuple[str, T]]) -> dict[str, T]:
    """Parses each of ``texts`` into a name and a value, and returns a dict from names to values. Raises ``UsageError``
    if a text is not a valid value of the option ``flag``."""
    try:
        return dict(parse(text) for text in texts)
    except ValueError:
        form = {"--host-policy": "NAME,cpu-cores=0-3,6", "--rate-limit-resource": "NAME:COUNT"}[flag]
        raise UsageError(f"{flag} takes {form}, got: {' '.join(texts)}") from None
