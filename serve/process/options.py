"""Everything ``accel serve`` can be told, in one place that travels to its processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel.errors import UsageError
from accel.serve.access import Access, read_tokens
from accel.serve.loading import Loading
from accel.serve.model_files import Trust
from accel.serve.pinning import parse_policy
from accel.serve.rate_limit import RateLimiter, parse_limit
from accel.serve.repository import Repository
from accel.serve.response_cache import ResponseCache
from accel.serve.tls import Tls

if TYPE_CHECKING:
    from accel.serve.server import InferenceServer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """``repository``: a folder, or an address that fsspec reads. ``grpc_port``/``http_port``: 0 takes a free one, None
    has no such face. ``models``: loaded at first in explicit mode. ``threads``: of each session, 0 for its share of
    ``cores``, which are those that the sessions of a model have, 0 for all that the process may use. ``restart``: a
    process of its own watches even over a single one and starts it again when it crashes. ``rate_limits``: NAME:COUNT
    each, ``host_policies``: NAME,cpu-cores=RANGES each. ``drain``: seconds that requests have to end after SIGTERM.
    ``trace``: the OTLP endpoint that traces of one request in ``trace_rate`` go to. ``tokens``, ``tls_*``,
    ``log_file``: paths."""

    repository: str
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
    grpc_threads: int = 512
    max_message: int = (1 << 31) - 1
    drain: float = 30.0
    tokens: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    insecure: bool = False
    allow_pickle: bool = False
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
        """Whether the serving is done by processes below this one."""
        return self.processes > 1 or self.restart

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ServeOptions:
        body = json.loads(text)
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
        return cls(**options)

    def tls(self) -> Tls | None:
        """``UsageError`` where only a part of it is given."""
        if not (self.tls_certificate or self.tls_key or self.tls_client_ca):
            return None
        if not (self.tls_certificate and self.tls_key):
            raise UsageError("TLS needs both --tls-certificate and --tls-key")
        ca = Path(self.tls_client_ca) if self.tls_client_ca else None
        return Tls(certificate=Path(self.tls_certificate), key=Path(self.tls_key), client_ca=ca)

    def open_repository(self) -> Repository:
        """The repository, nothing of it loaded."""
        root, refresh = Path(self.repository), None
        if "://" in self.repository:
            from accel.serve.remote import Mirror

            mirror = Mirror(self.repository)
            root, refresh = mirror.folder, mirror.refresh
        return Repository(
            root,
            refresh=refresh,
            mode=self.mode,
            startup=self.models,
            loading=Loading(
                trust=Trust(insecure=self.insecure, allow_pickle=self.allow_pickle),
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
        """The server, nothing loaded and nothing listening."""
        from accel.serve.server import InferenceServer

        tracing = None
        if self.trace:
            from accel.serve.tracing import open_tracing

            tracing = open_tracing(self.trace, self.trace_rate)
        access = read_tokens(Path(self.tokens)) if self.tokens else Access()
        return InferenceServer(
            self.open_repository(),
            access=access,
            strict_readiness=self.strict_readiness,
            tracing=tracing,
            # So many threads stay free for the other models when one hangs.
            max_waiting=max(1, self.grpc_threads - max(2, self.grpc_threads // 8)),
        )


def _parsed(flag: str, texts: tuple[str, ...], parse: Callable[[str], tuple[str, T]]) -> dict[str, T]:
    """``UsageError`` where one of ``texts`` isn't what ``flag`` takes."""
    try:
        return dict(parse(text) for text in texts)
    except ValueError:
        form = {"--host-policy": "NAME,cpu-cores=0-3,6", "--rate-limit-resource": "NAME:COUNT"}[flag]
        raise UsageError(f"{flag} takes {form}, got: {' '.join(texts)}") from None
