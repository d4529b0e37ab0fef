"""The gRPC server and its gate as the settings describe them.

Owns the way from settings to the parts; the parts know no settings.
"""

from __future__ import annotations

import ipaddress
import time

import structlog

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.metrics import Metrics
from encoder_service.rpc.auth import Access
from encoder_service.rpc.gate import CallGate
from encoder_service.rpc.local_connection import LocalBounds
from encoder_service.rpc.local_server import LocalServer, path_beside
from encoder_service.rpc.server import ConnectionBounds, GrpcServer
from encoder_service.scheduler.admission import CallPermits
from encoder_service.tls import CertificateFiles
from encoder_service.tokens import NamespaceTokens

log = structlog.get_logger(__name__)

# On one connection, beyond what a host's calls may take: health checks go on when all of those are in use.
SPARE_STREAMS = 64


def open_grpc(settings: Settings, metrics: Metrics) -> GrpcServer:
    """Not bound yet; with it what takes calls without gRPC, where that is on. Raises ConfigurationError for
    certificates that are none."""
    certificates = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificates = CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    local = open_local(settings)
    if local is not None:
        export_local(metrics, local)
    return GrpcServer(
        max_message_bytes=settings.max_message_bytes,
        bounds=ConnectionBounds(
            max_connections=settings.max_connections,
            max_streams=(settings.max_calls_per_host or settings.max_calls) + SPARE_STREAMS,
            idle_s=settings.connection_idle_s,
            age_s=settings.connection_age_s,
        ),
        certificates=certificates,
        local=local,
    )


def open_local(settings: Settings) -> LocalServer | None:
    """Where clients on this host call without gRPC; None where that is off. Not bound yet."""
    if not settings.local_calls or not settings.broker_path:
        return None
    path = path_beside(settings.broker_path)
    if not path:
        log.warning("no local calls: the socket's path would be too long", broker_path=settings.broker_path)
        return None
    return LocalServer(
        path,
        LocalBounds(
            max_connections=settings.max_connections,
            max_message_bytes=settings.max_message_bytes,
            idle_s=settings.connection_idle_s,
        ),
        mode=int(settings.broker_mode, 8),
        gid=settings.broker_gid,
        allowed_uids=frozenset(settings.broker_allowed_uids) or None,
    )


def call_gate(settings: Settings, metrics: Metrics) -> CallGate:
    """Raises ConfigurationError for a tokens file that cannot be read, or an isolated namespace without a
    token."""
    tokens = NamespaceTokens(
        settings.namespace_tokens(), file=settings.tokens_file, open_namespaces=settings.open_namespaces
    )
    missing = sorted(set(settings.isolated_namespaces) - tokens.names())
    if missing:
        raise ConfigurationError(f"isolated namespaces need a token: {', '.join(missing)}")
    if not settings.open_namespaces and not tokens.names():
        raise ConfigurationError("open_namespaces is off and no namespace has a token: nobody could call")
    in_clear = [] if settings.tls_cert is not None else list(filter(is_reachable, settings.listen))
    if tokens.names() and in_clear:
        log.warning("tokens travel in clear without tls_cert", listen=",".join(in_clear))
    gate = CallGate(
        access=Access(tokens),
        permits=CallPermits(settings.max_calls, settings.max_calls_per_host, time.monotonic),
        receive_s=settings.receive_timeout_s,
        metrics=metrics,
    )
    export_gate(metrics, gate)
    return gate


def export_gate(metrics: Metrics, gate: CallGate) -> None:
    """Registers what operators see of the gate; once per registry."""
    metrics.gauge("ve_open_calls", "Calls in progress.", lambda: gate.permits.num_calls)
    metrics.gauge(
        "ve_open_calls_busiest_host",
        "Calls in progress from the address that has most; callers by unix socket are one.",
        lambda: max(gate.permits.by_host.values(), default=0),
    )
    metrics.counter_view_by(
        "ve_refused_calls",
        "Calls that came no further than the gate: too many, no token that opens, no request in time.",
        "reason",
        lambda: gate.refused,
    )


def export_local(metrics: Metrics, local: LocalServer) -> None:
    """Registers what operators see of calls without gRPC; once per registry."""
    metrics.gauge(
        "ve_local_connections", "Connections for calls without gRPC.", lambda: local.num_connections
    )
    metrics.counter_view_by(
        "ve_local_calls",
        "Calls that came without gRPC, by method; they are among ve_requests_total too.",
        "method",
        lambda: local.counters.calls,
    )
    metrics.counter_view_by(
        "ve_local_closed_connections",
        "Connections for calls without gRPC that were closed from here, by cause.",
        "cause",
        lambda: local.counters.closed,
    )


def is_reachable(address: str) -> bool:
    """Whether others than this host's own processes may reach a listening address."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
