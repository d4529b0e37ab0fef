"""The gRPC channel to the service: options, TLS, the token, and reloading of their files.

Owns the channel. gRPC reads certificates once, when a channel is created, so changed files need a new
channel; calls in progress finish on the old one. Also owns the metadata of every call: the token and the W3C
trace headers of the caller's span.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from lm_adapter.errors import InvalidRequest

MAX_FILE_BYTES = 4 << 20
MAX_TOKEN_BYTES = 4096
RECHECK_S = 1.0
"""Interval between checks of the files' modification times."""
LINGER_S = 900.0
"""Time that calls in progress have to finish on a replaced channel."""

FilePath: TypeAlias = str | os.PathLike[str]
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_log = logging.getLogger(__name__)

_DEFAULT_OPTIONS: dict[str, int | str] = {
    # A message holds one chunk of rows, or the states of many keys. The server limits requests.
    "grpc.max_receive_message_length": 64 * 1024 * 1024,
    "grpc.max_send_message_length": -1,
    # Rows are megabytes long: use a large flow-control window and large frames.
    "grpc.http2.lookahead_bytes": 8 * 1024 * 1024,
    "grpc.http2.max_frame_size": 4 * 1024 * 1024,
    # A host that disappears without a FIN is detected after the sum of these two times.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    # Reconnects to a restarted server within half a second. Clients of a process share no refused connection.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 500,
    # Despite its name, this is the timeout of one connection attempt, handshakes included.
    "grpc.min_reconnect_backoff_ms": 5_000,
    # The client retries calls itself, where that is safe.
    "grpc.enable_retries": 0,
}


@dataclass(frozen=True)
class ClientTls:
    """TLS to the service, from PEM files. New calls use changed files within about a second.

    ca: certificate authorities that sign the server's certificate; empty: the system's public ones. cert,
    key: the client's own certificate, for servers that require one. server_name: the name in the server's
    certificate, if it differs from the target's host."""

    ca: FilePath = ""
    cert: FilePath = ""
    key: FilePath = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest if only one of ``cert`` and ``key`` is set."""
        if bool(self.cert) != bool(self.key):
            raise InvalidRequest("a client certificate and its key are given together or not at all")

    @property
    def paths(self) -> tuple[FilePath, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path)

    def credentials(self) -> grpc.ChannelCredentials:
        """gRPC credentials from the current content of the files. Raises InvalidRequest for invalid files,
        which gRPC would only report with the first call, and for a ``ca`` file without a certificate, which
        gRPC would replace with the public authorities."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            problem = f"{os.fspath(self.ca)} has no certificate"
            if self.ca:
                context.load_verify_locations(self.ca)
            problem = f"{os.fspath(self.cert)} and {os.fspath(self.key)} are not a certificate and its key"
            if self.cert:
                context.load_cert_chain(self.cert, self.key, self._no_password)
        except OSError as error:
            raise InvalidRequest(f"{problem}: {error}") from None
        ca, key, cert = (read_file(path) if path else None for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _no_password(self) -> bytes:
        raise InvalidRequest(f"the key in {os.fspath(self.key)} is encrypted, which is not supported")


class Channel:
    """The channel of one client, on one event loop."""

    def __init__(
        self,
        target: str,
        *,
        tls: ClientTls | None,
        token: str,
        token_file: FilePath,
        options: Mapping[str, int | str] | None,
    ) -> None:
        """Does not connect; the first call does. Raises InvalidRequest for unusable files."""
        if token and token_file:
            raise InvalidRequest("token and token_file exclude each other")
        self._target = target
        self._tls = tls
        self._token_file = token_file
        self._options = channel_options(options, tls)
        self._paths = (*(tls.paths if tls else ()), *((token_file,) if token_file else ()))
        self._stats = self._stat()
        self._checked_s = time.monotonic()
        self.token = read_token_file(token_file) if token_file else token
        bearer(self.token)  # raises for a token that a header cannot carry
        self._channel = self._open()
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def current(self) -> grpc.aio.Channel:
        """The channel for a new call."""
        now_s = time.monotonic()
        if self._paths and now_s >= self._checked_s + RECHECK_S:
            self._checked_s = now_s
            self._reload_if_changed()
        return self._channel

    def metadata(self) -> Metadata:
        """The metadata of a new call: the token, and the trace headers of the current span."""
        return bearer(self.token) + _trace_headers()

    async def close(self) -> None:
        """Closes the channels and ends calls in progress. Can be repeated."""
        replaced = list(self._replaced.items())
        for task, _ in replaced:
            task.cancel()
        await asyncio.gather(self._channel.close(), *(channel.close() for _, channel in replaced))

    def _open(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        return grpc.aio.secure_channel(self._target, self._tls.credentials(), options=self._options)

    def _reload_if_changed(self) -> None:
        """Opens a new channel if the files changed. Incomplete or invalid files leave the channel as it is;
        they are read again after their next change."""
        stats = self._stat()
        if stats == self._stats:
            return
        self._stats = stats
        try:
            token = read_token_file(self._token_file) if self._token_file else self.token
            replaced, self._channel = self._channel, self._open() if self._tls else self._channel
        except InvalidRequest as error:
            _log.warning("changed TLS or token files are not used: %s", error.message)
            return
        self.token = token
        if replaced is not self._channel:
            task = asyncio.get_running_loop().create_task(replaced.close(LINGER_S))
            self._replaced[task] = replaced
            task.add_done_callback(self._replaced.pop)
        _log.info("TLS and token files were read again")

    def _stat(self) -> list[tuple[int, int, int]]:
        """Modification time, inode and size of each file. Follows links, because Kubernetes updates a mounted
        Secret by replacing a link."""
        stats = []
        for path in self._paths:
            try:
                status = Path(path).stat()
            except OSError:
                stats.append((0, 0, 0))
            else:
                stats.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return stats


def channel_options(
    overrides: Mapping[str, int | str] | None = None, tls: ClientTls | None = None
) -> list[tuple[str, int | str]]:
    """gRPC channel arguments: this module's defaults, updated with ``overrides``."""
    named = {"grpc.ssl_target_name_override": tls.server_name} if tls and tls.server_name else {}
    return list({**_DEFAULT_OPTIONS, **named, **(overrides or {})}.items())


def bearer(token: str) -> Metadata:
    """The authorization metadata of a call; empty without a token. Raises InvalidRequest for a token that a
    header cannot carry."""
    if not token:
        return ()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidRequest("a token has printable ASCII characters only, and no space")
    return (("authorization", f"Bearer {token}"),)


def read_token_file(path: FilePath) -> str:
    """Reads the token, the only word in the file. Raises InvalidRequest; the text never quotes the file."""
    name, content = f"token file {os.fspath(path)}", read_file(path)
    if len(content) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"{name} has {len(content)} bytes, at most {MAX_TOKEN_BYTES} are allowed")
    words = content.split()
    if len(words) != 1:
        raise InvalidRequest(f"{name} has {len(words)} words, needs 1")
    token = words[0].decode("latin-1")
    bearer(token)  # raises for a token that a header cannot carry
    return token


def read_file(path: FilePath) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{os.fspath(path)} has more than {MAX_FILE_BYTES} bytes")
    return content


def _trace_headers() -> Metadata:
    """``traceparent`` and ``tracestate`` of the current OpenTelemetry span. Empty if the process does not use
    OpenTelemetry; this function does not import it on its own."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
