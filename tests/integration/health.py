"""A stub of the health service, whose published types name none of its methods."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc


def health_stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)
