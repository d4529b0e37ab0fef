"""What both clients need to open a channel: settings, method paths, the health check's bytes.

Owns gRPC's own names. Streams of rows are received as raw bytes (no deserialiser): ``assembly`` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from vision_encoder.v1 import encoder_pb2

__all__ = ["HEALTH_CHECK", "channel_options", "health_is_serving", "method_path"]

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["VisionEncoder"].full_name

_DEFAULT_OPTIONS: dict[str, int | str] = {
    # A message holds one chunk of rows, or one answer about many keys; requests are bounded by the server.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
    "grpc.max_send_message_length": -1,
    # A host that vanishes without a FIN is found in keepalive_time + keepalive_timeout.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    # A restarted server is found again in well under a second.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # No call is sent twice behind the caller's back.
    "grpc.enable_retries": 0,
}


def channel_options(overrides: Mapping[str, int | str] | None = None) -> list[tuple[str, int | str]]:
    """gRPC channel arguments: ours, with the caller's on top."""
    return list({**_DEFAULT_OPTIONS, **(overrides or {})}.items())


def method_path(method: str) -> str:
    """``/vision_encoder.v1.VisionEncoder/<method>``."""
    return f"/{_SERVICE}/{method}"


def health_is_serving(response: bytes) -> bool:
    """Whether a serialised HealthCheckResponse says SERVING: field 1 (status), value 1."""
    return response.startswith(b"\x08\x01")
