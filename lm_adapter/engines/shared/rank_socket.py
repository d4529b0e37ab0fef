"""Socket from the process that has a request to its ranks: orders to read rows, and reports of reads.

Owns the unix socket, its frames and the orders that are pending. In vLLM the scheduler orders, because vLLM
carries nothing to its workers in steps without tokens: its first model runner (V1) does not call connectors
there. While a request waits for rows, those may be the only steps. In LMDeploy the API server orders, which
answers requests without rows, and the engine's process is the rank. Rows never pass this socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lm_adapter.engines.shared.error_text import MAX_MESSAGE_CHARS, MAX_REASON_CHARS
from lm_adapter.errors import EncoderError, ItemFailed
from lm_adapter.items import Grid
from lm_adapter.shm.attachment import TRANSPORTS

CONNECT_S = 0.05
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 20
LINK_ERRORS = (EOFError, OSError, ValueError, KeyError, TypeError)
"""Raised at the end of a connection and by a malformed frame."""
MAX_DROPS = 4096
"""Drops kept to be sent again to a rank that reconnects."""
INTERNAL = 13
"""gRPC's status for a failure that states none."""


@dataclass(frozen=True)
class RowsOrder:
    """Rows to read. number: identifies the rows on the ranks; rows that are read again get another number.
    on_host: they stay off a rank's GPU."""

    number: int
    key: bytes
    routing_digest: bytes
    grid: Grid
    on_host: bool = False

    def frame(self) -> dict[str, Any]:
        return {
            "read": self.number,
            "key": self.key.hex(),
            "routing_digest": self.routing_digest.hex(),
            "grid": list(self.grid),
            "on_host": self.on_host,
        }

    @classmethod
    def of_frame(cls, frame: dict[str, Any]) -> RowsOrder:
        digest = bytes.fromhex(frame["routing_digest"])
        key, grid = bytes.fromhex(frame["key"]), Grid(*frame["grid"])
        return cls(frame["read"], key, digest, grid, frame["on_host"])


@dataclass(frozen=True)
class RowsRead:
    """Rows that every rank has. number: of their order. transport: how they came, of several ranks' ways the
    one that comes last in ``TRANSPORTS``. was_lost: an eviction overtook some rank's first copy."""

    number: int
    transport: str = TRANSPORTS[0]
    was_lost: bool = False

    def frame(self) -> dict[str, Any]:
        """A rank's report."""
        return {"done": self.number, "transport": self.transport, "was_lost": self.was_lost}

    def with_report(self, frame: dict[str, Any]) -> RowsRead:
        """With one rank's report. Raises one of LINK_ERRORS."""
        last = max(TRANSPORTS.index(self.transport), TRANSPORTS.index(frame["transport"]))
        return RowsRead(self.number, TRANSPORTS[last], self.was_lost or bool(frame["was_lost"]))


@dataclass
class _PendingOrder:
    """An order that some rank has not reported on. read: as the others have read. missing: the connections of
    these ranks."""

    done: asyncio.Future[RowsRead]
    read: RowsRead
    missing: set[asyncio.StreamWriter] = field(default_factory=set)


def send(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    body = json.dumps(frame).encode()
    writer.write(LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises EOFError at the connection's end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise EOFError(f"a frame has {length} bytes, the limit is {MAX_FRAME_BYTES}")
    frame: dict[str, Any] = json.loads(await reader.readexactly(length))
    return frame


async def connect(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A rank's connection. Waits until the other side listens: vLLM's workers start before it."""
    while True:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(f"\0{name}")
        await asyncio.sleep(CONNECT_S)


def failure_frame(number: int, error: EncoderError) -> dict[str, Any]:
    """A rank's report of an error. The encoder's texts are cut, because a frame above MAX_FRAME_BYTES ends
    the connection."""
    return {
        "failed": number,
        "reason": error.reason[:MAX_REASON_CHARS],
        "message": error.message[:MAX_MESSAGE_CHARS],
        "status": getattr(error, "status", INTERNAL),
        "retryable": error.retryable,
        "retry_after_ms": error.retry_after_ms,
    }


class RankSocket:
    """The side that orders, on one event loop."""

    def __init__(self, name: str, num_ranks: int) -> None:
        """name: of the socket, in Linux's abstract namespace; secret. num_ranks: number of ranks that read
        rows."""
        self.name = name
        self._num_ranks = num_ranks
        self._ranks: set[asyncio.StreamWriter] = set()
        self._pending: dict[int, _PendingOrder] = {}
        self._dropped: deque[int] = deque(maxlen=MAX_DROPS)
        self._all_connected = asyncio.Event()
        self._was_connected = False
        self._server: asyncio.Server | None = None

    @property
    def num_connected(self) -> int:
        """Number of ranks that are connected."""
        return len(self._ranks)

    async def are_connected(self, timeout_s: float) -> bool:
        """Whether all ranks are connected, or were not yet. Waits for one that was."""
        if not self._was_connected or self._all_connected.is_set():
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_connected.wait(), timeout_s)
        return self._all_connected.is_set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, f"\0{self.name}")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._ranks:
            writer.close()

    async def read(self, order: RowsOrder, timeout_s: float) -> RowsRead:
        """Returns once every rank has the rows; ranks hold them until ``drop``. Raises ItemFailed; then no
        rank holds them."""
        pending = _PendingOrder(asyncio.get_running_loop().create_future(), RowsRead(order.number))
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._ranks) < self._num_ranks:
                    # A rank may disconnect before this task continues.
                    await self._all_connected.wait()
                pending.missing = set(self._ranks)
                self._pending[order.number] = pending
                for writer in self._ranks:
                    send(writer, order.frame())
                return await pending.done
        except BaseException as error:
            if order.number in self._pending:
                self.drop(order.number)
            if isinstance(error, TimeoutError):
                num_late, state = len(pending.missing), "have no rows"
                if not num_late:
                    num_late, state = self._num_ranks - len(self._ranks), "are away, or on another host,"
                raise ItemFailed(
                    f"{num_late} of {self._num_ranks} ranks {state} after {timeout_s:.1f} s",
                    reason="DEADLINE_EXCEEDED",
                    status=4,
                ) from None
            raise
        finally:
            self._pending.pop(order.number, None)

    def drop(self, number: int) -> None:
        """Frees the rows on every rank. A rank whose connection is broken frees them when it reconnects."""
        self._dropped.append(number)
        for writer in self._ranks:
            send(writer, {"drop": number})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not _is_ours(writer) or len(self._ranks) >= self._num_ranks:
            writer.close()
            return
        self._ranks.add(writer)
        for number in self._dropped:
            send(writer, {"drop": number})
        if len(self._ranks) == self._num_ranks:
            self._all_connected.set()
            self._was_connected = True
        try:
            while True:
                self._take_report(await receive(reader), writer)
        except LINK_ERRORS:
            pass
        finally:
            self._ranks.discard(writer)
            self._all_connected.clear()
            writer.close()
            for pending in self._pending.values():
                if not pending.done.done():
                    error = ItemFailed(
                        "the connection to a worker of the engine broke", reason="ENGINE_UNAVAILABLE"
                    )
                    pending.done.set_exception(error)

    def _take_report(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        pending = self._pending.get(frame["done"] if "done" in frame else frame["failed"])
        if pending is None or pending.done.done():
            return
        if "failed" in frame:
            pending.done.set_exception(
                ItemFailed(
                    frame["message"],
                    reason=frame["reason"],
                    status=frame["status"],
                    retryable=frame["retryable"],
                    retry_after_ms=frame["retry_after_ms"],
                )
            )
            return
        pending.read = pending.read.with_report(frame)
        pending.missing.discard(writer)
        if not pending.missing:
            pending.done.set_result(pending.read)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side runs as the same user."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    (_, uid, _) = struct.unpack("3i", peer)
    return bool(uid == os.getuid())
