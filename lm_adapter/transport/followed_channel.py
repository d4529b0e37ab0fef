"""A gRPC channel whose TLS files may change: new calls go over a channel made with the new ones.

gRPC reads certificates once, when a channel is made. Owns the channels that were replaced: calls under way on
them end there, and after ``LINGER_S`` they are closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from lm_adapter.transport.followed import Followed

__all__ = ["LINGER_S", "FollowedAioChannel", "FollowedChannel"]

LINGER_S = 900.0
"""A call that takes longer ends then."""


class FollowedChannel:
    """As much of ``grpc.Channel`` as the clients use. Thread-safe."""

    def __init__(
        self,
        files: Followed[grpc.ChannelCredentials],
        connect: Callable[[grpc.ChannelCredentials], grpc.Channel],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._connect, self._clock = files, connect, clock
        self._lock = threading.Lock()
        self._credentials = files.current()
        self._channel = connect(self._credentials)
        self._replaced: list[tuple[grpc.Channel, float]] = []
        self._closed = False

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """As ``grpc.Channel``'s."""
        return self._current().unary_unary(*arguments, **named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """As ``grpc.Channel``'s."""
        return self._current().unary_stream(*arguments, **named)

    def close(self) -> None:
        """Calls in progress end. Twice is once."""
        with self._lock:
            self._closed = True
            channels = [self._channel, *(channel for channel, _ in self._replaced)]
            self._replaced.clear()
        for channel in channels:
            channel.close()

    def _current(self) -> grpc.Channel:
        if self._files.current() is self._credentials and not self._replaced:
            return self._channel
        over: list[grpc.Channel] = []
        with self._lock:
            now_s = self._clock()
            # Asked for again: another thread may have gone on to later ones meanwhile.
            credentials = self._files.current()
            if credentials is not self._credentials and not self._closed:
                self._replaced.append((self._channel, now_s + LINGER_S))
                self._credentials, self._channel = credentials, self._connect(credentials)
            while self._replaced and self._replaced[0][1] <= now_s:
                over.append(self._replaced.pop(0)[0])
            channel = self._channel
        for one in over:
            one.close()
        return channel


class FollowedAioChannel:
    """As much of ``grpc.aio.Channel`` as the clients use, for one loop."""

    def __init__(
        self,
        files: Followed[grpc.ChannelCredentials],
        connect: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._files, self._connect = files, connect
        self._credentials = files.current()
        self._channel = connect(self._credentials)
        self._replaced: dict[grpc.aio.Channel, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """As ``grpc.aio.Channel``'s."""
        return self._current().unary_unary(*arguments, **named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """As ``grpc.aio.Channel``'s."""
        return self._current().unary_stream(*arguments, **named)

    async def close(self) -> None:
        """Calls in progress end. Twice is once."""
        self._closed = True
        for channel, timer in [*self._replaced.items()]:
            timer.cancel()
            self._end(channel)
        await asyncio.gather(self._channel.close(), *self._closing)

    def _current(self) -> grpc.aio.Channel:
        credentials = self._files.current()
        if credentials is not self._credentials and not self._closed:
            timer = asyncio.get_running_loop().call_later(LINGER_S, self._end, self._channel)
            self._replaced[self._channel] = timer
            self._credentials, self._channel = credentials, self._connect(credentials)
        return self._channel

    def _end(self, channel: grpc.aio.Channel) -> None:
        del self._replaced[channel]
        closing = asyncio.ensure_future(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
