"""gRPC's health service and reflection, behind the gate of a server.

Both answer without a permit. Health needs no token; reflection needs one if the service's calls do.
grpcio's own health servicer is not used: there, a watcher that does not read delays the other watchers and
the end of the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from encoder_service.rpc.gate import CallGate
from encoder_service.rpc.response import write

Context = grpc.aio.ServicerContext[Any, Any]
Check = health_pb2.HealthCheckRequest
Status = health_pb2.HealthCheckResponse


class Health:
    """The statuses of services by name; "" is the server as a whole."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()

    def set(self, names: Iterable[str], *, serving: bool) -> None:
        """Sets the status of services and wakes their watchers."""
        self._statuses.update(dict.fromkeys(names, Status.SERVING if serving else Status.NOT_SERVING))
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, requests: AsyncIterator[Check], context: Context) -> Status:
        status = self._statuses.get((await anext(requests)).service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return Status(status=status)

    async def watch(self, requests: AsyncIterator[Check], context: Context) -> None:
        name, sent = (await anext(requests)).service, None
        while True:
            changed, status = self._changed, self._statuses.get(name, Status.SERVICE_UNKNOWN)
            if status != sent:
                await write(context, Status(status=status))
                sent = status
            await changed.wait()

    def handlers(self, gate: CallGate) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": grpc.stream_unary_rpc_method_handler(
                    gate.passed_aside(self.check, Check), None, Status.SerializeToString
                ),
                "Watch": grpc.stream_stream_rpc_method_handler(
                    gate.passed_aside(self.watch, Check, stays=True), None, Status.SerializeToString
                ),
            },
        )


def reflection_handlers(services: Iterable[str], gate: CallGate) -> grpc.GenericRpcHandler:
    """Reflection of the named services."""
    servicer: Any = reflection.aio.ReflectionServicer(services)

    async def reflect(requests: AsyncIterator[Any], context: Context) -> None:
        async for answer in servicer.ServerReflectionInfo(requests, context):
            await write(context, answer)

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        gate.passed_aside(reflect, reflection_pb2.ServerReflectionRequest, needs_token=True, stays=True),
        None,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})
