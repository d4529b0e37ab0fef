"""Between the connector's two halves: which rows each rank is to read, and what became of it.

Owns the socket, its frames and the orders that are open. vLLM carries nothing between them in steps without
tokens (its first model runner does not call connectors there), and while a request waits for rows there may
be no other steps; so orders and reports have a way of their own, a unix socket on the host. Rows are never in
it.
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

from lm_adapter.engines.shared.reasons import MAX_MESSAGE_CHARS, MAX_REASON_CHARS
from lm_adapter.errors import EncoderError, ItemFailed
from lm_adapter.items import Grid

CONNECT_S = 0.05
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 20
BROKEN = (EOFError, OSError, ValueError, KeyError, TypeError)
"""What the end of a connection or a wrong frame raises."""
MAX_DROPS = 4096
"""The latest drops, which a rank gets again when it connects again."""
INTERNAL = 13
"""gRPC's status of a failure with no other."""


@dataclass(frozen=True)
class RowsOrder:
    """Rows to read. number: names them from then on; what is read a second time has another one."""

    number: int
    key: bytes
    routing_digest: bytes
    grid: Grid

    def frame(self) -> dict[str, Any]:
        return {
            "read": self.number,
            "key": self.key.hex(),
            "routing_digest": self.routing_digest.hex(),
            "grid": list(self.grid),
        }

    @classmethod
    def of_frame(cls, frame: dict[str, Any]) -> RowsOrder:
        digest = bytes.fromhex(frame["routing_digest"])
        return cls(frame["read"], bytes.fromhex(frame["key"]), digest, Grid(*frame["grid"]))


@dataclass
class StepRows:
    """With one of vLLM's steps. hand_over: (number, vLLM's identifier) of rows that it computes with. drop:
    numbers of rows that earlier steps computed with, and no later one does."""

    hand_over: list[tuple[int, str]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)


@dataclass
class _Open:
    """An order that not every rank has reported on. waiting: the ranks' connections."""

    done: asyncio.Future[None]
    waiting: set[asyncio.StreamWriter] = field(default_factory=set)


def send(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    body = json.dumps(frame).encode()
    writer.write(LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises EOFError at the connection's end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise EOFError(f"a frame has {length} bytes, at most {MAX_FRAME_BYTES} are taken")
    frame: dict[str, Any] = json.loads(await reader.readexactly(length))
    return frame


async def connect(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A rank's connection. Waits until the scheduler listens: its workers start before it."""
    while True:
        with contextlib.suppress(OSError):
            return await asyncio.open_unix_connection(f"\0{name}")
        await asyncio.sleep(CONNECT_S)


def report(number: int, error: EncoderError | None) -> dict[str, Any]:
    """The frame of a rank that has the rows, or why it has not. The encoder's texts are cut: a frame has a
    limit, above which the connection ends."""
    if error is None:
        return {"done": number}
    return {
        "failed": number,
        "reason": error.reason[:MAX_REASON_CHARS],
        "message": error.message[:MAX_MESSAGE_CHARS],
        "status": getattr(error, "status", INTERNAL),
        "retryable": error.retryable,
        "retry_after_ms": error.retry_after_ms,
    }


class RankLink:
    """The scheduler's side, on one event loop."""

    def __init__(self, name: str, num_ranks: int) -> None:
        """name: of the socket, in Linux's abstract namespace; secret. num_ranks: that read rows."""
        self._name = name
        self._num_ranks = num_ranks
        self._ranks: set[asyncio.StreamWriter] = set()
        self._open: dict[int, _Open] = {}
        self._dropped: deque[int] = deque(maxlen=MAX_DROPS)
        self._all_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, f"\0{self._name}")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._ranks:
            writer.close()

    async def read(self, order: RowsOrder, timeout_s: float) -> None:
        """Returns once every rank has the rows, which it holds until ``drop``. Raises ItemFailed; then no
        rank holds them."""
        mine = _Open(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._ranks) < self._num_ranks:
                    # Ranks may come and go before this task goes on.
                    await self._all_here.wait()
                mine.waiting = set(self._ranks)
                self._open[order.number] = mine
                for writer in self._ranks:
                    send(writer, order.frame())
                await mine.done
        except BaseException as error:
            if order.number in self._open:
                self.drop(order.number)
            if isinstance(error, TimeoutError):
                behind, what = len(mine.waiting), "have no rows"
                if not behind:
                    behind, what = self._num_ranks - len(self._ranks), "are away, or on another host,"
                raise ItemFailed(
                    f"{behind} of {self._num_ranks} ranks {what} after {timeout_s:.1f} s",
                    reason="DEADLINE_EXCEEDED",
                    status=4,
                ) from None
            raise
        finally:
            self._open.pop(order.number, None)

    def drop(self, number: int) -> None:
        """Frees the rows on every rank; on one whose connection is broken when it connects again."""
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
            self._all_here.set()
        try:
            while True:
                self._note(await receive(reader), writer)
        except BROKEN:
            pass
        finally:
            self._ranks.discard(writer)
            self._all_here.clear()
            writer.close()
            for one in self._open.values():
                if not one.done.done():
                    one.done.set_exception(ItemFailed("the link to a worker of the engine broke"))

    def _note(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        one = self._open.get(frame["done"] if "done" in frame else frame["failed"])
        if one is None or one.done.done():
            return
        one.waiting.discard(writer)
        if "failed" in frame:
            one.done.set_exception(
                ItemFailed(
                    frame["message"],
                    reason=frame["reason"],
                    status=frame["status"],
                    retryable=frame["retryable"],
                    retry_after_ms=frame["retry_after_ms"],
                )
            )
        elif not one.waiting:
            one.done.set_result(None)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side runs as the same user."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    (_, uid, _) = struct.unpack("3i", peer)
    return bool(uid == os.getuid())
