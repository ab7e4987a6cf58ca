"""``accel serve --check``: whether every model of a repository can be served, found by loading it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from accel.serve.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """One version. ``state``: ``READY`` or ``UNAVAILABLE`` with the ``reason``."""

    name: str
    version: str
    state: str
    reason: str = ""
    platform: str = ""
    max_batch_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(options: ServeOptions) -> list[CheckedModel]:
    """Load and warm up every model that the options would serve, and release it again. Settings are read too."""
    options.tls()
    server = replace(options, mode="none", trace=None).open_server()
    try:
        server.repository.start()
        loaded = {(m.name, m.version): m for m in server.repository.models()}
        rows = []
        for row in server.repository.index():
            model = loaded.get((row.name, row.version)) if row.state == "READY" else None
            rows.append(
                CheckedModel(
                    name=row.name,
                    version=row.version,
                    state=row.state or "UNAVAILABLE",
                    reason=row.reason,
                    platform=model.config.platform if model else "",
                    max_batch_size=model.scheduling.max_batch_size if model else None,
                )
            )
        return rows
    finally:
        server.close()
