"""Chooses between grpcio's own server, the loop over gRPC's core (``infer_loop.py``) and the extension on libnghttp2
(``transports/native``)."""

from __future__ import annotations

import importlib
import logging

import grpc

from accel.errors import UnsupportedHere

log = logging.getLogger("accel.serve")

AUTO, NATIVE, CYGRPC, GRPC = CHOICES = ("auto", "native", "cygrpc", "grpc")
# The loop uses private names of grpcio. The tests were run with 1.81.1 and with 1.85.1.
_FIRST, _END = (1, 81), (1, 86)
_NAMES = {
    "grpc._cython.cygrpc": (
        "CompletionType",
        "ReceiveCloseOnServerOperation",
        "ReceiveMessageOperation",
        "SendInitialMetadataOperation",
        "SendMessageOperation",
        "SendStatusFromServerOperation",
    ),
    "grpc._server": (
        "_ServerStage",
        "_process_event_and_continue",
        "_request_call",
        "_request_registered_call",
        "_stop_serving",
    ),
}


def why_not() -> str:
    """Returns the reason why the installed grpcio can't be used through its core, or "" if it can."""
    version = grpc.__version__
    first, end = (".".join(map(str, bound)) for bound in (_FIRST, _END))
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"grpcio has the version {version}"
    if not _FIRST <= number < _END:
        return f"grpcio has the version {version}, and not at least {first} and below {end}"
    for module, names in _NAMES.items():
        found = importlib.import_module(module)
        for name in names:
            if not hasattr(found, name):
                return f"grpcio {version} lacks {module}.{name}"
    return ""


def best() -> tuple[str, str]:
    """Returns the transport that ``auto`` takes, and the reasons why it takes no faster one."""
    from ..native.build import why_not_built

    reasons: list[str] = []
    for name, why in ((NATIVE, why_not_built), (CYGRPC, why_not)):
        reason = why()
        if not reason:
            return name, "; ".join(reasons)
        reasons.append(reason)
    return GRPC, "; ".join(reasons)


def chosen(asked: str) -> str:
    """Returns ``NATIVE``, ``CYGRPC`` or ``GRPC``. Raises ``UnsupportedHere`` if ``asked`` is a transport that can't be
    used here."""
    found, reason = best() if asked == AUTO else (asked, _refused(asked))
    if reason and asked != AUTO:
        raise UnsupportedHere(f"can't use --transport {asked}: {reason}, or write --transport auto")
    log.info("gRPC calls are answered", extra={"transport": found, **({"reason": reason} if reason else {})})
    return found


def _refused(asked: str) -> str:
    if asked == NATIVE:
        from ..native import build

        return "" if build.find() else build.why_not()
    return why_not() if asked == CYGRPC else ""
