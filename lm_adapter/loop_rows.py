"""The RPCs of one Encode or Fetch on an event loop, an outcome at a time.

Owns their order, and how one that fails ends. What they ask for and what they bring is ``calls``'; the sync
client has its own loop around these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from lm_adapter.calls import RowsCall
from lm_adapter.errors import ItemFailed
from lm_adapter.events import parsed
from lm_adapter.session import Deadline, Session
from lm_adapter.transport.channel import stream_call
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.pixel_choice import NO_PIXELS, CallPixels
from lm_adapter.types import Outcome

__all__ = ["LoopLine", "LoopRows"]


@dataclass(eq=False)
class LoopLine:
    """One client's way to its service, and whether the client was closed."""

    session: Session
    channel: grpc.aio.Channel
    is_closed: bool = False

    def check_open(self, method: str) -> None:
        """Raises CallCancelled."""
        if self.is_closed:
            raise self.session.closed_under(method)

    def raise_if_closed_under(self, method: str, error: asyncio.CancelledError) -> None:
        """grpc.aio cancels the calls of a channel that closes, which looks like a cancelled task but is
        none: only a task that was asked to end may see CancelledError."""
        task = asyncio.current_task()
        if self.is_closed and (task is None or not task.cancelling()):
            raise self.session.closed_under(method) from error


class LoopRows:
    """The calls one after another, each with those for what could not be read out of shared memory. ``next``
    until it gives None, then ``close`` in any case."""

    def __init__(
        self,
        line: LoopLine,
        calls: Iterable[RowsCall],
        deadline: Deadline,
        streams: CallerStreams,
        refused: dict[int, ItemFailed] | None = None,
        pixels: CallPixels = NO_PIXELS,
    ) -> None:
        """refused: what is never sent, handed out first. pixels: closed at the end."""
        self._line, self._deadline, self._streams, self._pixels = line, deadline, streams, pixels
        self._refused: Iterator[tuple[int, Outcome]] | None = iter(refused.items()) if refused else None
        self._calls = iter(calls)
        self._call = next(self._calls, None)
        self._stream: Any = None

    async def next(self) -> tuple[int, Outcome] | None:
        """The index and outcome of the item that finished next; None when all have. Raises CallFailed."""
        if self._refused is not None:
            for finished in self._refused:
                return finished
        while (call := self._call) is not None:
            found = await self._next_of(call)
            if found is not None:
                return found
            self._end_stream()
            self._call = call.follow_up() or next(self._calls, None)
        return None

    def close(self) -> None:
        """Cancels what is under way. Twice is once."""
        self._end_stream()
        if self._pixels is not NO_PIXELS:
            self._pixels.close()

    async def _next_of(self, call: RowsCall) -> tuple[int, Outcome] | None:
        """None when this call has ended."""
        streams = self._streams
        try:
            if self._stream is None:
                self._stream = self._begin(call)
            async for message in self._stream:
                event = parsed(message)
                num_bytes = call.copied_bytes(event)
                if streams.are_here(num_bytes):
                    finished = call.feed(event)
                else:
                    finished = await streams.run(num_bytes, partial(call.feed, event))
                if finished is not None:
                    return finished
            call.finish(await self._stream.trailing_metadata())
        except grpc.RpcError as error:
            failure = call.failed(error, closed=self._line.is_closed)
            try:
                if not call.absorbs(failure):
                    raise failure from error
            finally:
                del failure  # with its traceback, which leads here
        except asyncio.CancelledError as error:
            self._line.raise_if_closed_under(call.method, error)
            raise
        return None

    def _begin(self, call: RowsCall) -> Any:
        line = self._line
        line.check_open(call.method)
        request, metadata = call.request.SerializeToString(), line.session.bearer + call.metadata
        by_grpc = stream_call(line.channel, call.method, request, metadata)
        return line.session.local.begin_on_loop(
            call.calls_path, call.method, request, self._deadline.left_s, metadata, by_grpc
        )

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
