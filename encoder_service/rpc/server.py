"""The gRPC server: handlers, addresses, TLS, limits on connections.

Owns the network side of the servicer. Addresses are bound before the model loads, so that an address in use
is reported at once. With certificates, every ``host:port`` accepts TLS only. Unix sockets never use TLS; the
permissions of their files protect them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.ops.addresses import remove_dead_socket
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.reloaded import Reloaded
from encoder_service.ops.tls import Certificates, certificate_files
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc import observed
from encoder_service.rpc.accepting import accepting_server
from encoder_service.rpc.connections import ConnectionShares
from encoder_service.rpc.convert import serialize_event
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.health import Health, reflection_handlers
from encoder_service.rpc.servicer import VisionEncoderServicer
from encoder_service.scheduler.admission import Admission
from vision_encoder.v1 import encoder_pb2 as pb

log = structlog.get_logger(__name__)

# gRPC can lose a call that arrives at the moment of the stop, and then waits for its end for the whole grace
# period. So the wait ends once no call has been in progress for LINGER_S. Until then, last bytes are sent.
LINGER_S = 3.0
STOP_POLL_S = 0.1
# Per connection. A client that pings more often while the server sends nothing is disconnected
# (ENHANCE_YOUR_CALM). Proxies ping every second, and a client may ping between two calls. The server pings
# after PING_AFTER_S without traffic.
MIN_PING_INTERVAL_S = 0.5
PING_AFTER_S, PING_TIMEOUT_S = 60.0, 20.0
IDLE_S = 300.0
# Per connection. Further calls of the client wait on its side.
MAX_STREAMS = 256
# Calls that gRPC holds before the event loop takes them. Above the first number it refuses random calls, also
# those of well-behaved callers; above the second, all.
MAX_PENDING_CALLS, MAX_PENDING_CALLS_EVER = 32_768, 65_536
# gRPC accepts this share of connections above the limit, so that ``ConnectionShares`` chooses which ones end.
EXTRA_CONNECTIONS = 1 / 4
# Bytes that a caller may send before they are read, also after its request. gRPC's default is megabytes.
LOOKAHEAD_BYTES = 1 << 18
# A set of algorithms with one element: compressed messages are refused.
NO_COMPRESSION_ONLY = 1 << grpc.Compression.NoCompression.value
HANDSHAKE_S = 20.0
MAX_METADATA_BYTES = 16384
SERVICE = pb.DESCRIPTOR.services_by_name["VisionEncoder"].full_name


class GrpcServer:
    """One grpc.aio server on TCP and unix addresses. Call ``bind``, ``start``, ``stop`` in that order."""

    def __init__(
        self,
        settings: Settings,
        gate: CallGate,
        certificates: Reloaded[Certificates] | None = None,
        connection_age_s: float = 0.0,
    ) -> None:
        """gate: makes the checks before each call. certificates: None for addresses without TLS.
        connection_age_s: longest life of a connection; 0 for no limit."""
        self._gate = gate
        self._certificates = certificates
        self._has_reflection = settings.reflection
        options = {
            "grpc.max_receive_message_length": settings.max_message_bytes,
            "grpc.max_send_message_length": settings.max_message_bytes,
            "grpc.so_reuseport": 0,
            "grpc.compression_enabled_algorithms_bitset": NO_COMPRESSION_ONLY,
            "grpc.max_allowed_incoming_connections": int(settings.max_connections * (1 + EXTRA_CONNECTIONS)),
            "grpc.max_concurrent_streams": MAX_STREAMS,
            "grpc.http.overload_protection": 0,
            "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
            "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_CALLS_EVER,
            "grpc.http2.bdp_probe": 0,
            "grpc.http2.lookahead_bytes": LOOKAHEAD_BYTES,
            "grpc.http2.min_ping_interval_without_data_ms": int(MIN_PING_INTERVAL_S * 1e3),
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.keepalive_time_ms": int(PING_AFTER_S * 1e3),
            "grpc.keepalive_timeout_ms": int(PING_TIMEOUT_S * 1e3),
            "grpc.max_connection_idle_ms": int(IDLE_S * 1e3),
            "grpc.server_handshake_timeout_ms": int(HANDSHAKE_S * 1e3),
            "grpc.max_metadata_size": MAX_METADATA_BYTES,
            "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        }
        if connection_age_s:
            options["grpc.max_connection_age_ms"] = int(connection_age_s * 1e3)
        self._server = accepting_server(list(options.items()))
        self._health = Health()
        self._services: tuple[str, ...] = ()
        # Paths of the unix sockets, with the identity of the socket that this server has bound there.
        self._unix_paths: dict[Path, tuple[int, int] | None] = {}
        self._ports: set[int] = set()
        self._shares = ConnectionShares(settings.max_connections)
        self._checking: asyncio.Task[None] | None = None

    def bind(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Binds every address and returns the addresses with their actual ports (port 0 picks a free one).
        Raises ConfigurationError for an address that cannot be bound."""
        bound: list[str] = []
        for address in addresses:
            try:
                if address.startswith("unix:"):
                    self._bind_unix(Path(address.removeprefix("unix:")))
                    bound.append(address)
                    continue
                if self._certificates is None:
                    port = self._server.add_insecure_port(address)
                else:
                    port = self._server.add_secure_port(address, server_credentials(self._certificates))
            except OSError as error:
                raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}") from None
            except RuntimeError:  # which names a variable of gRPC, and no reason
                raise ConfigurationError(f"cannot listen on {address}: gRPC cannot bind it") from None
            self._ports.add(port)
            bound.append(f"{address.rpartition(':')[0]}:{port}")
        return tuple(bound)

    def _bind_unix(self, path: Path) -> None:
        """Binds a unix socket. When it stops, gRPC unlinks the path that it has bound, even if another server
        listens there by then. So it binds a temporary path, which is then renamed."""
        remove_dead_socket(str(path))
        temporary = path.with_name(f".{secrets.token_hex(4)}")
        self._server.add_insecure_port(f"unix:{temporary}")
        temporary.rename(path)
        self._unix_paths[path] = file_identity(path)

    async def start(self, services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]) -> None:
        """Registers the handlers by service and method, and starts to answer calls."""
        self._services = tuple(services)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in services.items()]
        )
        self._server.add_generic_rpc_handlers([self._health.handlers(self._gate)])
        if self._has_reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            self._server.add_generic_rpc_handlers([reflection_handlers(names, self._gate)])
        await self.set_serving(True)
        await self._server.start()
        self._checking = asyncio.get_running_loop().create_task(self._shares.run(self._ports))

    async def set_serving(self, serving: bool) -> None:
        """Sets the status that the health service reports, for the server as a whole and for each service."""
        self._health.set(("", *self._services), serving=serving)

    async def stop(self, grace_s: float) -> None:
        """Accepts no new calls, and waits up to ``grace_s`` for those in progress."""
        for path, identity in self._unix_paths.items():
            if file_identity(path) == identity:  # otherwise another server has bound the path
                path.unlink(missing_ok=True)
        self._unix_paths.clear()
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        ends_s = time.monotonic() + grace_s
        quiet_s = None
        while not stopping.done():
            now_s = time.monotonic()
            quiet_s = None if self._gate.permits.num_calls else quiet_s or now_s
            if quiet_s is not None and now_s - quiet_s >= LINGER_S:
                await self._server.stop(0)
            await asyncio.wait([stopping], timeout=min(STOP_POLL_S, max(0.01, ends_s - now_s)))
        await stopping
        if self._checking is not None:
            self._checking.cancel()


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at a path. None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def open_tokens(settings: Settings) -> NamespaceTokens:
    """The tokens of all namespaces, for gRPC and the broker. Raises ConfigurationError for a tokens file that
    cannot be read, for an isolated namespace without a token, and if no namespace can be used at all."""
    tokens = NamespaceTokens(settings.tokens_file, open_namespaces=settings.open_namespaces)
    missing = sorted(set(settings.isolated_namespaces) - tokens.names())
    if missing:
        raise ConfigurationError(f"isolated namespaces need a token: {', '.join(missing)}")
    if not settings.open_namespaces and not tokens.names():
        raise ConfigurationError("open_namespaces is off and no namespace has a token: all calls would fail")
    addresses = (*settings.listen, *filter(None, (settings.http_listen,)))
    in_clear = [] if settings.tls_cert is not None else list(filter(is_reachable, addresses))
    if tokens.names() and in_clear:
        log.warning("without tls_cert, tokens are sent unencrypted", listen=",".join(in_clear))
    return tokens


def call_gate(
    settings: Settings, tokens: NamespaceTokens, metrics: Metrics, admission: Admission
) -> CallGate:
    """The gate of all calls. admission: counts their messages. Registers the gate's metrics, so call it once
    per registry."""
    gate = CallGate(tokens, CallPermits(settings.max_calls), admission, settings.max_message_bytes)
    metrics.gauge("ve_open_calls", "Calls in progress.", lambda: gate.permits.num_calls)
    metrics.counter_view(
        "ve_refused_calls",
        "Calls refused before their handler, by reason: too many calls, no valid token, no request in time.",
        lambda: gate.refused,
        "reason",
    )
    return gate


def open_grpc(settings: Settings, gate: CallGate) -> GrpcServer:
    """A server that is not bound yet. Raises ConfigurationError for certificates that cannot be read."""
    certificates = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificates = certificate_files(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return GrpcServer(settings, gate, certificates, settings.connection_age_s)


def is_reachable(address: str) -> bool:
    """Whether a listening address can be reached from other hosts."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def method_handlers(
    servicer: VisionEncoderServicer, gate: CallGate
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers by method name, behind the gate. All are registered as request-streaming, because the gate
    reads the message of each call. Streams of rows serialise their own chunks; all other messages are plain
    protobuf."""

    def handled(name: str, behaviour: Callable[..., Awaitable[Any]], request: type[Any]) -> Any:
        gated = gate.passed(behaviour, request)
        return observed.observed(name, gated, servicer.metrics, servicer.instance_id)

    unary = (
        ("GetServerInfo", servicer.get_server_info, pb.GetServerInfoRequest, pb.GetServerInfoResponse),
        ("Lookup", servicer.lookup, pb.LookupRequest, pb.LookupResponse),
        ("Prefetch", servicer.prefetch, pb.PrefetchRequest, pb.PrefetchResponse),
        ("Touch", servicer.touch, pb.TouchRequest, pb.TouchResponse),
    )
    streams = (
        ("Encode", servicer.encode, pb.EncodeRequest),
        ("Fetch", servicer.fetch, pb.FetchRequest),
    )
    return {
        name: grpc.stream_unary_rpc_method_handler(
            handled(name, behaviour, request), None, response.SerializeToString
        )
        for name, behaviour, request, response in unary
    } | {
        name: grpc.stream_stream_rpc_method_handler(handled(name, behaviour, request), None, serialize_event)
        for name, behaviour, request in streams
    }


def server_credentials(files: Reloaded[Certificates]) -> grpc.ServerCredentials:
    """Credentials that follow the certificate files. gRPC asks for them before each handshake; open
    connections keep theirs. Whether clients need a certificate is decided once, here."""
    used: Certificates | None = None

    def configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
        pair = certificates.key, certificates.chain
        return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        current = files.current()
        if current is used:
            return None  # gRPC keeps the former ones
        used = current
        return configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        configuration(files.current()),
        changed,  # type: ignore[arg-type]
        require_client_authentication=files.current().client_ca is not None,
    )
