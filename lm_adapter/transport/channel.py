"""What both clients need to open a channel: settings, TLS, the token's metadata, method paths, the health
check's bytes.

Owns gRPC's own names. Streams of rows are received as raw bytes (no deserialiser): ``assembly`` reads them.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from lm_adapter.errors import InvalidRequest
from lm_adapter.transport.followed import FilePath, Followed
from lm_adapter.transport.followed_channel import FollowedAioChannel, FollowedChannel
from vision_encoder.v1 import encoder_pb2

__all__ = [
    "DIGEST_HEADER",
    "HEALTH_CHECK",
    "RING_HASH_ENVIRONMENT",
    "ClientTls",
    "EncryptedKey",
    "FollowedTls",
    "bearer",
    "channel_options",
    "followed_credentials",
    "health_is_serving",
    "method_path",
    "open_aio_channel",
    "open_channel",
    "ring_hash_options",
    "stream_call",
]

DIGEST_HEADER = "x-content-digest"
"""Hex digest of a call's only item, for ring-hash load balancing."""
RING_HASH_ENVIRONMENT = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"
"""gRFC A76: a call without the header goes anywhere, instead of failing."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["VisionEncoder"].full_name

_DEFAULT_OPTIONS: dict[str, int | str] = {
    # A message holds one chunk of rows, or one answer about many keys; requests are bounded by the server.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
    "grpc.max_send_message_length": -1,
    # Rows come by the megabyte: so much of a stream may be sent before its sender hears of its reader, in few
    # frames.
    "grpc.http2.lookahead_bytes": 8 * 1024 * 1024,
    "grpc.http2.max_frame_size": 4 * 1024 * 1024,
    # A host that vanishes without a FIN is found in keepalive_time + keepalive_timeout.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    # A restarted server is found again in well under a second.
    "grpc.initial_reconnect_backoff_ms": 100,
    # Its name misleads: the time that one attempt may take, handshakes included.
    "grpc.min_reconnect_backoff_ms": 5_000,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # No call is sent twice behind the caller's back.
    "grpc.enable_retries": 0,
}


class EncryptedKey(InvalidRequest):
    """Nobody is asked for a password."""


@dataclass(frozen=True)
class ClientTls:
    """TLS to the service, from PEM files. A client that is given it uses, within a second of a change, what
    is in the files then for its new calls.

    ca: authorities of the server's certificate; empty for the public ones. cert, key: the client's own, where
    the server asks for one. server_name: what the server's certificate is made out to, where that is not the
    target's host.
    """

    ca: FilePath = ""
    cert: FilePath = ""
    key: FilePath = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if bool(self.cert) != bool(self.key):
            raise InvalidRequest("a client certificate and its key are given together or not at all")

    def check_authorities(self) -> None:
        """Raises InvalidRequest where ``ca`` has no certificate. gRPC would take an empty file for the public
        ones, and tell of any other with the first call."""
        if not self.ca:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
        except OSError as error:
            raise InvalidRequest(f"{os.fspath(self.ca)} has no certificate: {error}") from None

    def check_pair(self) -> None:
        """Raises InvalidRequest for a key of another certificate, EncryptedKey."""
        if not self.cert:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.cert, self.key, self._no_password)
        except OSError as error:
            raise InvalidRequest(
                f"{os.fspath(self.cert)} and {os.fspath(self.key)} are no certificate and its key: {error}"
            ) from None

    def _no_password(self) -> bytes:
        raise EncryptedKey(f"the key in {os.fspath(self.key)} is encrypted, which is not supported")


@dataclass(frozen=True)
class FollowedTls:
    """A ``ClientTls`` whose files were read: for several clients, of which one that is made while they are
    not in order has what the others have."""

    files: Followed[grpc.ChannelCredentials]
    server_name: str = ""


def followed_credentials(
    credentials: grpc.ChannelCredentials | None, tls: ClientTls | FollowedTls | None
) -> Followed[grpc.ChannelCredentials] | None:
    """What channels are to be secured with that follow their files; None without such files. Raises
    InvalidRequest."""
    if tls is None:
        return None
    if credentials is not None:
        raise InvalidRequest("credentials and tls say the same in two ways: give one")
    if isinstance(tls, FollowedTls):
        return tls.files
    names = [name for name in ("ca", "key", "cert") if getattr(tls, name)]

    def make(contents: Sequence[bytes]) -> grpc.ChannelCredentials:
        tls.check_authorities()
        tls.check_pair()
        pem = dict(zip(names, contents, strict=True))
        return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("key"), pem.get("cert"))

    return Followed([getattr(tls, name) for name in names], make, what="certificates")


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    tls: ClientTls | FollowedTls | None,
    options: Mapping[str, int | str] | None,
) -> grpc.Channel:
    """A channel that connects when it is used. Raises InvalidRequest."""
    followed, arguments = followed_credentials(credentials, tls), channel_options(options, tls)
    if followed is not None:
        opened = FollowedChannel(followed, lambda made: grpc.secure_channel(target, made, options=arguments))
        return cast("grpc.Channel", opened)
    if credentials is None:
        return grpc.insecure_channel(target, options=arguments)
    return grpc.secure_channel(target, credentials, options=arguments)


def open_aio_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    tls: ClientTls | FollowedTls | None,
    options: Mapping[str, int | str] | None,
) -> grpc.aio.Channel:
    """As ``open_channel``, for the loop that runs."""
    followed, arguments = followed_credentials(credentials, tls), channel_options(options, tls)
    if followed is not None:
        opened = FollowedAioChannel(
            followed, lambda made: grpc.aio.secure_channel(target, made, options=arguments)
        )
        return cast("grpc.aio.Channel", opened)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=arguments)
    return grpc.aio.secure_channel(target, credentials, options=arguments)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that opens a namespace; none without a token. Raises InvalidRequest for a token that no
    header can carry."""
    if not token:
        return ()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidRequest("a token has printable ASCII characters only, and no space")
    return (("authorization", f"Bearer {token}"),)


def channel_options(
    overrides: Mapping[str, int | str] | None = None, tls: ClientTls | FollowedTls | None = None
) -> list[tuple[str, int | str]]:
    """gRPC channel arguments: ours, with the caller's on top."""
    named = {"grpc.ssl_target_name_override": tls.server_name} if tls and tls.server_name else {}
    return list({**_DEFAULT_OPTIONS, **named, **(overrides or {})}.items())


def ring_hash_options(*, min_dns_interval_s: float = 5.0) -> dict[str, int | str]:
    """Channel arguments for gRPC's own ring-hash policy over every address behind a target
    (``dns:///host:port``): a call with one item goes by its digest. For a client of one item per call that
    takes rows inline; what it lacks beside ``lm_adapter.fleet`` is in docs/fleet.md.

    Raises InvalidRequest unless the environment has RING_HASH_ENVIRONMENT, which gRPC reads when it is first
    imported: without it every call would fail with INTERNAL, "hash attribute not present".
    """
    if os.environ.get(RING_HASH_ENVIRONMENT, "").lower() != "true":
        raise InvalidRequest(
            f"gRPC's ring hash needs {RING_HASH_ENVIRONMENT}=true in the environment before grpc is imported"
        )
    policy = {"ring_hash_experimental": {"requestHashHeader": DIGEST_HEADER}}
    return {
        "grpc.service_config": json.dumps({"loadBalancingConfig": [policy]}),
        "grpc.dns_min_time_between_resolutions_ms": round(1000 * min_dns_interval_s),
    }


def method_path(method: str) -> str:
    """``/vision_encoder.v1.VisionEncoder/<method>``."""
    return f"/{_SERVICE}/{method}"


def stream_call(
    channel: Any, method: str, request: bytes, metadata: tuple[tuple[str, str], ...]
) -> Callable[[float], Any]:
    """What begins a call whose answer is a stream, for some seconds: without a deserialiser, messages arrive
    as bytes and chunks are never copied by protobuf. channel: of either kind."""

    def begin(timeout_s: float) -> Any:
        return channel.unary_stream(method_path(method))(request, timeout=timeout_s, metadata=metadata)

    return begin


def health_is_serving(response: bytes) -> bool:
    """Whether a serialised HealthCheckResponse says SERVING: field 1 (status), value 1."""
    return response.startswith(b"\x08\x01")
