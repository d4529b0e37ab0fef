"""Builds the gRPC server and its gate from the settings.

Owns the mapping from settings to these parts, which do not know the settings.
"""

from __future__ import annotations

import ipaddress

import structlog

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tls import certificate_files
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.rpc.auth import Access
from encoder_service.rpc.gate import CallGate, CallPermits
from encoder_service.rpc.server import GrpcServer

log = structlog.get_logger(__name__)

# Streams per connection beyond the limit of calls, so that health checks pass when all calls are in use.
SPARE_STREAMS = 64


def open_tokens(settings: Settings) -> NamespaceTokens:
    """The tokens of all namespaces, for gRPC and the broker. Raises ConfigurationError for a tokens file that
    cannot be read, for an isolated namespace without a token, and if no token could open any namespace."""
    tokens = NamespaceTokens(
        settings.namespace_tokens(), file=settings.tokens_file, open_namespaces=settings.open_namespaces
    )
    missing = sorted(set(settings.isolated_namespaces) - tokens.names())
    if missing:
        raise ConfigurationError(f"isolated namespaces need a token: {', '.join(missing)}")
    if not settings.open_namespaces and not tokens.names():
        raise ConfigurationError("open_namespaces is off and no namespace has a token: all calls would fail")
    in_clear = [] if settings.tls_cert is not None else list(filter(is_reachable, settings.listen))
    if tokens.names() and in_clear:
        log.warning("tokens travel in clear without tls_cert", listen=",".join(in_clear))
    return tokens


def call_gate(settings: Settings, tokens: NamespaceTokens, metrics: Metrics) -> CallGate:
    """The gate of all calls. Registers its metrics, so call it once per registry."""
    gate = CallGate(Access(tokens), CallPermits(settings.max_calls))
    metrics.gauge("ve_open_calls", "Calls in progress.", lambda: gate.permits.num_calls)
    metrics.counter_view(
        "ve_refused_calls",
        "Calls refused before their handler: too many, no token that opens, no request in time.",
        lambda: gate.refused,
        "reason",
    )
    return gate


def open_grpc(settings: Settings, gate: CallGate) -> GrpcServer:
    """The server, not bound yet. Raises ConfigurationError for certificates that cannot be read."""
    certificates = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificates = certificate_files(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return GrpcServer(
        gate=gate,
        max_message_bytes=settings.max_message_bytes,
        max_connections=settings.max_connections,
        max_streams=settings.max_calls + SPARE_STREAMS,
        connection_age_s=settings.connection_age_s,
        certificates=certificates,
    )


def is_reachable(address: str) -> bool:
    """Whether a listening address can be reached from other hosts."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
