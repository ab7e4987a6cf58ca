"""Chooses between grpcio's own server and the loop over gRPC's core (``infer_loop.py``)."""

from __future__ import annotations

import importlib
import logging

import grpc

from accel.errors import UnsupportedHere

log = logging.getLogger("accel.serve")

AUTO, CYGRPC, GRPC = CHOICES = ("auto", "cygrpc", "grpc")
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


def chosen(asked: str) -> str:
    """Returns ``CYGRPC`` or ``GRPC``. Raises ``UnsupportedHere`` if ``asked`` is ``CYGRPC`` and grpcio doesn't allow
    it."""
    reason = "" if asked == GRPC else why_not()
    if reason and asked == CYGRPC:
        raise UnsupportedHere(f"can't use --transport cygrpc: {reason}; write --transport auto")
    found = GRPC if asked == GRPC or reason else CYGRPC
    log.info("gRPC calls are answered", extra={"transport": found, **({"reason": reason} if reason else {})})
    return found
