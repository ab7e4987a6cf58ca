"""Serves the live page at ``/``, which draws models, load, latency histograms and queue depth in the browser.

The HTML of the page is the same for every server and contains no data of the server. The page's figures come from
``/live.json``, which requires a token like every other call. The page loads nothing from other servers.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.inference import LATENCIES_NS, ModelStatistics

if TYPE_CHECKING:
    from ...core.server import InferenceServer

_FIGURES = ("received", "inference_count", "execution_count", "queue_depth")


@cache
def page() -> str:
    """Returns the HTML of the page."""
    return (Path(__file__).parent / "live.html").read_text(encoding="utf-8")


def _policy() -> str:
    """Returns a Content-Security-Policy that allows the page's own script and style, and requests to this server."""
    parts = []
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        parts.append(f"{tag}-src 'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            *parts,
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


HEADERS = {
    "Content-Security-Policy": _policy(),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def snapshot(server: InferenceServer, token: str | None) -> dict[str, Any]:
    """Returns the figures that the page draws.

    The result has one row for each model that the token allows. The figures of a model are counted since the model was
    loaded, and summed over the processes of the server. ``time`` is in seconds since 1970, and ``latency_bounds`` is in
    seconds.
    """
    name, version, _ = server.metadata(token)
    found = {(model, number): figures for model, number, figures in server.statistics(token=token)}
    return {
        "name": name,
        "version": version,
        "ready": server.healthy(),
        "time": time.time(),
        "latency_bounds": [ns / 1e9 for ns in LATENCIES_NS],
        "models": [
            {**vars(row), "statistics": _figures(found.get((row.name, row.version)))}
            for row in server.index(token=token)
        ],
    }


def _figures(found: ModelStatistics | None) -> dict[str, Any] | None:
    if found is None:
        return None
    counts = {name: getattr(found, name) for name in _FIGURES}
    counts |= {"success": found.success.count, "fail": found.fail.count}
    return {**counts, "latency": found.request_times.counts}
