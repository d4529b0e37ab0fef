"""The gRPC server: handlers, health, reflection, addresses.

Owns how the servicer meets the network. Addresses are bound before the model loads, so that a taken port
fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from encoder_service.errors import ConfigurationError
from encoder_service.rpc.convert import serialize_event
from encoder_service.rpc.servicer import VisionEncoderServicer
from vision_encoder.v1 import encoder_pb2 as pb

SERVICE = "vision_encoder.v1.VisionEncoder"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """One grpc.aio server on TCP and unix addresses. ``bind``, ``start``, ``stop`` in that order."""

    def __init__(self, *, max_message_bytes: int) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.so_reuseport", 0),
                # A client may ping a quiet or busy connection every ten seconds.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ]
        )
        self._health = health.aio.HealthServicer()
        self._unix_paths: list[Path] = []

    def bind(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Binds every address and returns them with their real ports (0 picks a free one).
        Raises ConfigurationError for an address that cannot be bound."""
        bound: list[str] = []
        for address in addresses:
            if address.startswith("unix:"):
                path = Path(address.removeprefix("unix:"))
                remove_dead_socket(path)
                self._unix_paths.append(path)
            try:
                port = self._server.add_insecure_port(address)
            except RuntimeError as error:
                raise ConfigurationError(f"cannot listen on {address}: {error}") from None
            if not port:
                raise ConfigurationError(f"cannot listen on {address}")
            bound.append(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
        return tuple(bound)

    async def start(self, servicer: VisionEncoderServicer) -> None:
        """Registers everything and answers calls from now on."""
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, method_handlers(servicer)),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self.set_serving(True)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the server as a whole and for our service."""
        for name in ("", SERVICE):
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """No new calls; those in flight may take ``grace_s``."""
        await self._server.stop(grace_s)
        for path in self._unix_paths:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def method_handlers(servicer: VisionEncoderServicer) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers by method name. Streams serialise their own chunks; all else is plain protobuf."""
    unary: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_unary_rpc_method_handler
    stream: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_stream_rpc_method_handler
    return {
        "GetServerInfo": unary(
            servicer.get_server_info,
            pb.GetServerInfoRequest.FromString,
            pb.GetServerInfoResponse.SerializeToString,
        ),
        "Lookup": unary(servicer.lookup, pb.LookupRequest.FromString, pb.LookupResponse.SerializeToString),
        "Prefetch": unary(
            servicer.prefetch, pb.PrefetchRequest.FromString, pb.PrefetchResponse.SerializeToString
        ),
        "Release": unary(
            servicer.release, pb.ReleaseRequest.FromString, pb.ReleaseResponse.SerializeToString
        ),
        "Renew": unary(servicer.renew, pb.RenewRequest.FromString, pb.RenewResponse.SerializeToString),
        "Encode": stream(servicer.encode, pb.EncodeRequest.FromString, serialize_event),
        "Fetch": stream(servicer.fetch, pb.FetchRequest.FromString, serialize_event),
    }


def remove_dead_socket(path: Path) -> None:
    """Unlinks a socket that a killed process left. Raises ConfigurationError when the path is in use, is
    no socket, or its folder is missing."""
    if not path.parent.is_dir():
        raise ConfigurationError(f"cannot listen on unix:{path}: {path.parent} is not a directory")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigurationError(f"cannot listen on unix:{path}: the path exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigurationError(f"cannot listen on unix:{path}: another process listens there")


async def check_health(target: str, timeout_s: float) -> bool:
    """Whether the server at ``target`` says SERVING for our service; for probes and the command line."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s
            )
        except (TimeoutError, grpc.aio.AioRpcError):
            return False
        return bool(answer.status == SERVING)
