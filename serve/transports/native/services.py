"""Keeps grpcio's descriptions of the methods that the port serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc


class _Details(grpc.HandlerCallDetails):  # type: ignore[misc]
    def __init__(self, method: str) -> None:
        self.method, self.invocation_metadata = method, ()


class Services:
    """Takes the place of a ``grpc.Server`` where services are added to one."""

    def __init__(self) -> None:
        self._generic: list[grpc.GenericRpcHandler] = []
        self._known: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        self._known.update({f"/{service}/{name}": method for name, method in methods.items()})

    def find(self, path: str) -> Any:
        """Returns the description of the method with this path, or None if there is none."""
        found = self._known.get(path)
        if found is None:
            for generic in self._generic:
                found = generic.service(_Details(path))
                if found is not None:
                    self._known[path] = found
                    break
        return found
