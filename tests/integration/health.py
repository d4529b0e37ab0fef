"""The health service of gRPC, whose published types name none of its methods."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def health_stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def health_of(target: str, service: str = "") -> int:
    """As a probe asks, by a connection of its own: 1 while it serves, else 2."""
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_stub(channel).Check(request, timeout=10).status)
