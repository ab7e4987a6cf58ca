"""Serves grpc.health.v1 and reflection beside GRPCInferenceService."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from ...core.server import InferenceServer
from ...protocol import messages as proto
from ...protocol.inference import ServeError
from ...security.access import bearer
from .refusal import refuse


def make_health(server: InferenceServer) -> Any:
    from grpc_health.v1 import health, health_pb2

    class Health(health.HealthServicer):  # type: ignore[misc]
        """Answers each grpc.health.v1 call with the current health of the server."""

        def __init__(self) -> None:
            super().__init__()
            self._said: Any = None
            self._refreshing = threading.Lock()

        def refresh(self) -> None:
            with self._refreshing:
                status = health_pb2.HealthCheckResponse
                found = status.SERVING if server.healthy() else status.NOT_SERVING
                if found != self._said:  # a client that called Watch gets the status whenever the status changes
                    self._said = found
                    for service in ("", proto.SERVICE):
                        self.set(service, found)

        def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
            self.refresh()
            return super().Check(request, context)

        def Watch(self, *arguments: Any) -> Any:
            self.refresh()
            return super().Watch(*arguments)

    made = Health()
    made.refresh()
    server.on_change(made.refresh)
    return made


def add_health_and_reflection(target: grpc.Server, health: Any, server: InferenceServer) -> None:
    from google.protobuf import descriptor_pb2
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

    health_pb2_grpc.add_HealthServicer_to_server(health, target)
    for module in (health_pb2, reflection_pb2):
        file = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        try:
            proto.POOL.FindFileByName(file.name)
        except KeyError:
            proto.POOL.Add(file)
    names = [proto.SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]

    class Reflection(reflection.ReflectionServicer):  # type: ignore[misc]
        def ServerReflectionInfo(self, requests: Any, context: grpc.ServicerContext) -> Any:
            found = dict(context.invocation_metadata()).get("authorization")
            try:
                server.access.check(bearer(found if isinstance(found, str) else None))
            except ServeError as error:
                refuse(context, error)
            yield from super().ServerReflectionInfo(requests, context)

    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(names, pool=proto.POOL), target)
