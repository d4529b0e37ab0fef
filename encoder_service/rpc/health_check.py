"""The health check of a running service. Imports no heavy modules, so that it starts fast."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "vision_encoder.v1.VisionEncoder"


async def check_health(
    target: str,
    timeout_s: float,
    *,
    credentials: grpc.ChannelCredentials | None,
    options: Sequence[tuple[str, int | str]],
    metadata: Sequence[tuple[str, str]],
) -> bool:
    """Whether the server at ``target`` reports SERVING for the service. Used by probes and the command line.
    credentials: None for a channel without TLS."""
    if credentials is None:
        opened = grpc.aio.insecure_channel(target, options=options)
    else:
        opened = grpc.aio.secure_channel(target, credentials, options=options)
    async with opened as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s, metadata=tuple(metadata)
            )
        except (TimeoutError, grpc.aio.AioRpcError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
