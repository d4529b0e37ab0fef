"""The server that entries of the shared tier lie on: Valkey, or Redis, whose protocol it keeps.

Owns the client, and which commands read and write one entry in pieces: a value of tens of megabytes in one
reply or one command is copied several times over by a client's reader and writer, each time with the event
loop waiting. Knows nothing of what an entry is. How long a call may take is its caller's: to be cancelled at
any await ends the connection that was in use, and nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from pydantic import SecretStr

from encoder_service.errors import ConfigurationError

# The most that one reply or command carries: what the loop waits for at a time is a part of a millisecond.
PIECE_BYTES = 512 << 10
# Replies that are asked for at once.
PIECES_AT_ONCE = 16
# A value that is being written lives so long, should its writer die.
STAGING_TTL_MS = 60_000

Piece: TypeAlias = bytes | memoryview


class ServerFailed(Exception):
    """It cannot be reached, does not know us, or breaks the protocol."""


class ServerRefused(Exception):
    """It is well and does not take this value: no memory left, or it takes no writes."""


class EntryServer(Protocol):
    """Values by name, each bounded in bytes and in time. Every method raises ServerFailed."""

    async def read(self, name: bytes, offset: int, num_bytes: int) -> list[bytes]:
        """So many bytes of a value, in order and in pieces; fewer where it ends or is gone."""

    async def read_heads(self, names: Sequence[bytes], num_bytes: int) -> list[bytes]:
        """The first so many bytes of each value; fewer, or none, where it ends or is not there."""

    async def write(self, name: bytes, pieces: Sequence[Piece], ttl_ms: int) -> None:
        """Puts the value in place at once, whatever was there before. Raises ServerRefused."""

    async def delete(self, name: bytes) -> None: ...

    async def close(self) -> None: ...


class ValkeyServer:
    """See ``EntryServer``. url: redis://, rediss:// (TLS, whose files may be named in the query:
    ssl_ca_certs, ssl_certfile, ssl_keyfile) or unix://, with user and password as the server wants them.
    prefix: of all keys. Raises ConfigurationError without the extra ``shared`` or for a URL of another kind.
    Connects when it is first used."""

    def __init__(self, url: SecretStr, *, prefix: str, max_connections: int) -> None:
        try:
            from redis.asyncio import ConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
            from redis.maint_notifications import MaintNotificationsConfig
        except ImportError as error:
            raise ConfigurationError("shared_url needs the extra 'shared' (redis)") from error
        self._failures = (RedisError, OSError, EOFError)
        self._prefix = prefix.encode()
        try:
            # Times are bounded by whoever calls, and what failed is encoded instead of tried again.
            pool: ConnectionPool = ConnectionPool.from_url(
                url.get_secret_value(),
                max_connections=max_connections,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=None,
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except ValueError as error:
            # The client's own text may repeat the URL, and so a password.
            raise ConfigurationError("shared_url is no redis://, rediss:// or unix:// URL") from error
        self._client = Redis.from_pool(pool)

    async def read(self, name: bytes, offset: int, num_bytes: int) -> list[bytes]:
        ends_at = offset + num_bytes
        pieces: list[bytes] = []
        while offset < ends_at:
            batch = range(offset, ends_at, PIECE_BYTES)[:PIECES_AT_ONCE]
            pieces += await self._read_ranges(
                [(name, at, min(at + PIECE_BYTES, ends_at) - 1) for at in batch]
            )
            if not pieces[-1]:
                break
            offset = batch[-1] + PIECE_BYTES
        return pieces

    async def read_heads(self, names: Sequence[bytes], num_bytes: int) -> list[bytes]:
        return await self._read_ranges([(name, 0, num_bytes - 1) for name in names])

    async def _read_ranges(self, ranges: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
        """Bytes of values, from one to the last that is wanted. Raises ServerFailed."""
        replies = await self._call(
            [("GETRANGE", self._key(name), first, last) for name, first, last in ranges]
        )
        found: list[bytes] = []
        for reply in replies:
            if not isinstance(reply, bytes):
                raise ServerFailed(f"a reply that should be bytes is {type(reply).__name__}")
            found.append(reply)
        return found

    async def write(self, name: bytes, pieces: Sequence[Piece], ttl_ms: int) -> None:
        key = self._key(name)
        if sum(map(len, pieces)) <= PIECE_BYTES:
            await self._call([("SET", key, b"".join(pieces), "PX", ttl_ms)])
            return
        # Beside its place first, of which readers know nothing, and with an end from the start. The last
        # piece goes first: the server takes the memory of all of it once, or refuses before the rest is sent.
        staging = key + b":" + secrets.token_hex(8).encode()
        # Each part is copied when it is sent: what a connection that is cut off still holds of it must not be
        # memory that has gone to others since.
        parts = _cut(pieces)
        try:
            at, part = parts.pop()
            await self._call(
                [("SET", staging, b"", "PX", STAGING_TTL_MS), ("SETRANGE", staging, at, bytes(part))]
            )
            for at, part in parts:
                await self._call([("SETRANGE", staging, at, bytes(part))])
            await self._call([("PEXPIRE", staging, ttl_ms), ("RENAME", staging, key)])
        except ServerRefused:
            await self._call([("UNLINK", staging)])
            raise

    async def delete(self, name: bytes) -> None:
        await self._call([("UNLINK", self._key(name))])

    async def close(self) -> None:
        await self._client.aclose()

    def _key(self, name: bytes) -> bytes:
        """The braces keep a value and its staging in one slot, behind proxies of a cluster too."""
        return self._prefix + b":{" + name.hex().encode() + b"}"

    async def _call(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[object]:
        """The replies of commands that travel together. Raises ServerFailed, ServerRefused."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            # Errors are looked at here: the text of those that it would raise repeats the command's payload.
            replies = await pipeline.execute(raise_on_error=False)
        except self._failures as error:
            raise ServerFailed(f"{type(error).__name__}: {error}") from None
        for reply in replies:
            if isinstance(reply, Exception):
                raise _refusal(reply)
        return replies


def _refusal(error: Exception) -> Exception:
    """What an error reply means. Only those of a server that takes no writes are refusals."""
    kind, text = type(error).__name__, str(error)
    refused = kind in ("OutOfMemoryError", "ReadOnlyError") or text.startswith(("OOM", "MISCONF"))
    return (ServerRefused if refused else ServerFailed)(f"{kind}: {text[:200]}")


def _cut(pieces: Sequence[Piece]) -> list[tuple[int, memoryview]]:
    """The pieces, none above PIECE_BYTES, each with its offset."""
    parts: list[tuple[int, memoryview]] = []
    at = 0
    for piece in pieces:
        view = memoryview(piece)
        parts += [
            (at + start, view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES)
        ]
        at += len(view)
    return parts
