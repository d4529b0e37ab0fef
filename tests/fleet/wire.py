"""A wire to one replica that can be cut, blocked and slowed: what a kill, a partition and a bad link look
like.

Owns its sockets. A cut wire resets its connections and refuses new ones, as the host of a killed process
does; a blocked one takes connections and bytes and lets nothing through, in either direction."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

PIECE_BYTES = 1 << 16


class Wire:
    """From ``target`` to ``beyond`` (``host:port``). On one loop."""

    def __init__(self, host: str, beyond: str) -> None:
        self.beyond = beyond
        self.target = ""
        self.delay_s = 0.0
        self._host, self._port = host, 0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens; after a cut, where it listened before."""
        self._server = await asyncio.start_server(self._take, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.target = f"{self._host}:{self._port}"

    def block(self) -> None:
        self._open.clear()

    def unblock(self) -> None:
        self._open.set()

    async def cut(self) -> None:
        if self._server is not None:
            # A connection whose turn comes after its server was closed is never closed itself (Python 3.11).
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self._server.close()
            self._server = None
        for end in list(self._ends):
            raw = end.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """At once, and not when its task first runs: a cut has to find every connection."""
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        self._ends.add(writer)
        task.add_done_callback(lambda _: self._forget(task, writer))

    def _forget(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        """A task that was cancelled before it ran has closed nothing."""
        self._tasks.discard(task)
        self._ends.discard(writer)
        writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            host, _, port = self.beyond.rpartition(":")
            onward_reader, onward = await asyncio.open_connection(host, int(port))
            ends.append(onward)
            self._ends.add(onward)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, onward))
                both.create_task(self._pump(onward_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            for end in ends:
                self._ends.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            await self._open.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(piece)
            await writer.drain()
        raise ConnectionResetError("the other end closed")
