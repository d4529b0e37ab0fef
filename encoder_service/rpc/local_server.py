"""Calls without gRPC, at a unix socket beside the broker's: for clients on this host.

Owns the socket, who may connect, and the end of connections. What a call is, is the same as over gRPC: the
same handlers behind the same gate, with the same statuses and metadata. One connection's life is
``local_connection``'s.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import grpc
import structlog

from encoder_service.rpc.local_connection import Handlers, LocalBounds, LocalConnection, LocalCounters
from encoder_service.transport.access import peer_credentials
from encoder_service.transport.socket_file import MAX_PATH_BYTES, ListeningSocket

log = structlog.get_logger(__name__)

SUFFIX = ".calls"
"""Behind the path of the broker's socket."""
CHECK_S = 1.0
"""Between two looks at what takes too long."""
LAST_WORDS_S = 0.5
"""For calls that are cut off to say so, and then for clients to read it."""
LAST_POLL_S = 0.01


def path_beside(broker_path: str) -> str:
    """Where calls are taken; empty where the path would be too long for a socket."""
    path = broker_path + SUFFIX
    return path if broker_path and len(path.encode()) <= MAX_PATH_BYTES else ""


class LocalServer:
    """``bind``, ``start``, ``stop`` in that order, on one event loop."""

    def __init__(
        self,
        path: str,
        bounds: LocalBounds,
        *,
        mode: int = 0o660,
        gid: int | None = None,
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        """mode, gid: of the socket's file. allowed_uids: None for any."""
        self.path = path
        self.counters = LocalCounters()
        self._bounds = bounds
        self._mode, self._gid = mode, gid
        self._allowed_uids = allowed_uids
        self._connections: set[LocalConnection] = set()
        self._listener: ListeningSocket | None = None
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def bind(self) -> None:
        """Holds the path from now on; who comes before ``start`` is turned away. Raises
        ConfigurationError."""
        self._listener = ListeningSocket(self.path, mode=self._mode, gid=self._gid)
        asyncio.get_running_loop().add_reader(self._listener.socket, self._turn_away, self._listener.socket)

    async def start(self, handlers: Handlers) -> None:
        """Answers calls from now on. handlers: by method's name, each behind its gate."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        listening = self._listener.socket
        loop.remove_reader(listening)
        self._server = await loop.create_unix_server(
            partial(self._connect, handlers), sock=listening, backlog=1024
        )
        self._timer = loop.call_later(CHECK_S, self._check_time, loop)
        log.info("local calls are taken", path=self.path)

    def _turn_away(self, listening: socket.socket) -> None:
        try:
            connected, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left
            log.warning("local connections wait for the start", error=error.strerror)
            asyncio.get_running_loop().remove_reader(listening)
            return
        connected.close()
        self.counters.closed["not_started"] += 1

    def _connect(self, handlers: Handlers) -> asyncio.Protocol:
        return LocalConnection(handlers, self._bounds, self.counters, self._connections, self._refusal)

    def _refusal(self, connected: socket.socket) -> str:
        """Why this client may not connect; empty where it may."""
        if self._is_stopping:
            return "stopping"
        if len(self._connections) >= self._bounds.max_connections:
            return "too_many"
        if self._allowed_uids is not None and peer_credentials(connected).uid not in self._allowed_uids:
            return "uid_not_allowed"
        return ""

    def _check_time(self, loop: asyncio.AbstractEventLoop) -> None:
        for connection in list(self._connections):
            connection.check_time()
        self._timer = loop.call_later(CHECK_S, self._check_time, loop)

    async def stop(self, grace_s: float) -> None:
        """No new connections and calls; those in progress may take ``grace_s``. Harmless when done twice."""
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None and self._listener.socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.socket)
            # asyncio forgets, open, what it has accepted and not yet made a transport for when this closes.
            await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()
        await self._finish(grace_s)
        for connection in list(self._connections):
            connection.cut(grpc.StatusCode.UNAVAILABLE, "the service has stopped")
        await self._finish(LAST_WORDS_S)
        await self._close_all()

    async def _close_all(self) -> None:
        """Waits a moment for what clients still read and for what handlers clean up."""
        loop = asyncio.get_running_loop()
        calls = [each.call for each in self._connections if each.call is not None]
        for connection in list(self._connections):
            connection.close("stopping")
        ends_s = loop.time() + LAST_WORDS_S
        while (self._connections or not all(each.done() for each in calls)) and loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LAST_POLL_S)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    async def _finish(self, timeout_s: float) -> None:
        """Has every connection end with its call, and waits for those."""
        for connection in list(self._connections):
            connection.finish()
        calls = [each.call for each in self._connections if each.call is not None]
        if calls:
            await asyncio.wait(calls, timeout=timeout_s)
