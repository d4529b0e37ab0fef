"""One client's connection for calls without gRPC, and the call that it carries.

Owns frames, what a client may leave half done, and what a handler sees of its call: the part of gRPC's
context that handlers use, so that they are the same behind either door. Runs on the event loop, with no other
thread in between: on an idle machine, waking one takes longer than all that is done here. The form of frames
is ``broker.proto``'s, who may connect ``local_server``'s, what a call passes before its handler ``gate``'s.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from encoder_service.rpc.local_frames import HEADER, PREAMBLE, Metadata, end_of, metadata_of
from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

Handlers: TypeAlias = Mapping[str, Any]
"""gRPC's own records of handlers, by method."""

LOG_EVERY_S = 1.0
JOINED_BYTES = 1 << 16
"""A payload up to this is sent together with its header, for the price of a copy."""


@dataclass(frozen=True, slots=True)
class LocalBounds:
    """What one connection, and all of them, may do. Times in seconds. head_s: from the connect, or a head's
    first bytes, to the whole head. stuck_s: a client that takes nothing of what waits for it for this long
    does not read. idle_s: a connection without a call for so long is closed."""

    max_connections: int = 1024
    max_head_bytes: int = 16384
    max_message_bytes: int = 64 << 20
    head_s: float = 20.0
    stuck_s: float = 80.0
    idle_s: float = 1800.0


@dataclass
class LocalCounters:
    """Read by metrics at any time; written on the event loop."""

    calls: Counter[str] = field(default_factory=Counter)
    """By method."""
    closed: Counter[str] = field(default_factory=Counter)
    """Connections that were ended from here, by cause."""
    logged_s: float = float("-inf")
    """When the last line about what is no call was written."""


class Violation(Exception):
    """What came is no call; the connection ends."""


class LocalContext:
    """What a handler sees of its call: so much of ``grpc.aio.ServicerContext`` as handlers use."""

    def __init__(self, connection: LocalConnection, head: pb.LocalCall) -> None:
        self.serialize: Callable[[Any], bytes] = bytes
        """Of what the handler writes."""
        self._connection = connection
        self._metadata = metadata_of(head.metadata)
        self._loop = connection.loop
        self.ends_s = connection.loop.time() + head.timeout_us / 1e6 if head.timeout_us else None
        self.status = grpc.StatusCode.OK
        self.text = ""
        self.trailers: Metadata = ()
        self.last: bytes | None = None
        """What is written together with the call's end."""

    async def read(self) -> bytes:
        """The call's one message. Raises AbortError where it is longer than is taken."""
        found = await self._connection.message()
        if isinstance(found, bytes):
            return found
        limit = self._connection.bounds.max_message_bytes
        text = f"Received message larger than max ({found} vs. {limit})"  # in gRPC's words
        return await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    async def write(self, message: object) -> None:
        """Returns once the client has room for more. Raises AbortError for what is longer than gRPC sends."""
        await self._connection.send(pb.LOCAL_FRAME_MESSAGE, await self._payload(message))

    async def write_last(self, message: object) -> None:
        """As ``write``, of the call's last message, which goes out with its end: its client wakes up once."""
        self.last = await self._payload(message)

    async def _payload(self, message: object) -> bytes:
        payload, limit = self.serialize(message), self._connection.bounds.max_message_bytes
        if len(payload) > limit:
            text = f"SERVER: Sent message larger than max ({len(payload)} vs. {limit})"
            await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        return payload

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self.status, self.text, self.trailers = code, details, trailing_metadata
        raise grpc.aio.AbortError

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        self.trailers = trailing_metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds, or None without a deadline."""
        return None if self.ends_s is None else max(0.0, self.ends_s - self._loop.time())

    def peer(self) -> str:
        return "unix:"

    def code(self) -> int:
        """gRPC's own context says 0 as long as nothing has failed."""
        number: int = self.status.value[0]
        return number

    def details(self) -> str:
        return self.text


class LocalConnection(asyncio.Protocol):
    """Carries one call at a time. ``check_time`` is to be called now and then."""

    def __init__(
        self,
        handlers: Handlers,
        bounds: LocalBounds,
        counters: LocalCounters,
        connections: set[LocalConnection],
        refusal: Callable[[socket.socket], str],
    ) -> None:
        """connections: it enters itself there while it lasts. refusal: why a client is not let in, empty for
        one that is."""
        self.bounds = bounds
        self.loop = asyncio.get_running_loop()
        self._handlers = handlers
        self._counters = counters
        self._connections = connections
        self._refusal = refusal
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._is_greeted = False
        self._call: asyncio.Task[None] | None = None
        self._has_message = False
        self._message: asyncio.Future[bytes | int] | None = None
        self._is_full = False
        self._room: asyncio.Future[None] | None = None
        self._written_bytes = self._taken_bytes = 0
        self._cut: tuple[grpc.StatusCode, str] | None = None
        self._is_last = False
        self._waits_since_s = self._took_s = self.loop.time()

    @property
    def call(self) -> asyncio.Task[None] | None:
        """The one in progress."""
        return self._call

    # -- asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        refusal = self._refusal(self._transport.get_extra_info("socket"))
        if refusal:
            self.close(refusal)
            return
        self._connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.discard(self)
        if self._call is not None:  # its caller has left
            self._call.cancel()

    def eof_received(self) -> None:
        self.close()  # whoever closes one half gives the call up too

    def data_received(self, data: bytes) -> None:
        if not self._buffer and self._is_greeted:
            self._waits_since_s = self.loop.time()
        self._buffer += data
        try:
            self._advance()
        except Violation as error:
            now_s = self.loop.time()
            if now_s - self._counters.logged_s >= LOG_EVERY_S:
                self._counters.logged_s = now_s
                log.warning("local connection closed", error=str(error))
            self.close("protocol_error")

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # -- in --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Does what can be done with what has come. Raises Violation."""
        buffer = self._buffer
        if not self._is_greeted:
            found = bytes(buffer[: len(PREAMBLE)])
            if not PREAMBLE.startswith(found):
                raise Violation(f"it begins with {found!r}, not with {PREAMBLE!r}")
            if found != PREAMBLE:
                return
            del buffer[: len(PREAMBLE)]
            self._is_greeted = True
            self._waits_since_s = self.loop.time()
            if self._transport is not None:
                self._transport.write(PREAMBLE)
        if self._call is None:
            payload = self._frame(pb.LOCAL_FRAME_HEAD, self.bounds.max_head_bytes)
            if payload is None:
                return
            if isinstance(payload, int):
                raise Violation(f"a head of {payload} bytes, at most {self.bounds.max_head_bytes} are taken")
            try:
                head = pb.LocalCall.FromString(payload)
            except DecodeError:
                raise Violation(f"{len(payload)} bytes are no {pb.LocalCall.DESCRIPTOR.full_name}") from None
            self._has_message = False
            self._call = self.loop.create_task(self._run(head))
        elif self._has_message:
            if buffer:
                raise Violation(f"{len(buffer)} bytes behind a call that has not ended")
        elif self._message is not None and not self._message.done():
            message = self._frame(pb.LOCAL_FRAME_MESSAGE, self.bounds.max_message_bytes)
            if message is not None:
                self._message.set_result(message)

    def _frame(self, kind: int, max_bytes: int) -> bytes | int | None:
        """The frame's payload; its length where that is too long; None before it is there. Raises Violation
        for one of another kind."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        found, num_bytes = HEADER.unpack_from(buffer)
        if found != kind:
            raise Violation(f"a frame of kind {found}, expected {kind}")
        if num_bytes > max_bytes:
            return int(num_bytes)
        end = HEADER.size + num_bytes
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            payload = bytes(view[HEADER.size : end])
        del buffer[:end]
        return payload

    async def message(self) -> bytes | int:
        """The call's message, or its length where that is too long."""
        self._message = self.loop.create_future()
        self.data_received(b"")  # for what has come already
        found = await self._message
        self._has_message = isinstance(found, bytes)
        if self._buffer:
            self.data_received(b"")  # for what must not have come yet
        return found

    # -- out -------------------------------------------------------------------------------------------

    async def send(self, kind: int, payload: bytes, behind: bytes = b"") -> None:
        """Returns once the client has room for more. behind: a frame that follows at once."""
        transport = self._transport
        assert transport is not None
        if transport.is_closing():
            return
        header = HEADER.pack(kind, len(payload))
        self._written_bytes += len(header) + len(payload) + len(behind)
        if len(payload) <= JOINED_BYTES:
            transport.write(b"".join((header, payload, behind)))
        else:
            for piece in (header, payload, behind):
                transport.write(piece)
        while self._is_full:
            self._room = (
                self.loop.create_future()
            )  # one that was waited for by a call that was cut is no more
            await self._room

    # -- a call ----------------------------------------------------------------------------------------

    async def _run(self, head: pb.LocalCall) -> None:
        context = LocalContext(self, head)
        timer = None if context.ends_s is None else self.loop.call_at(context.ends_s, self._end_late)
        try:
            try:
                await self._handle(head.method, context)
            finally:
                if timer is not None:
                    timer.cancel()
            end = end_of(context.status, context.text, context.trailers)
            if context.last is None:
                await self.send(pb.LOCAL_FRAME_END, end)
            else:
                await self.send(
                    pb.LOCAL_FRAME_MESSAGE, context.last, HEADER.pack(pb.LOCAL_FRAME_END, len(end)) + end
                )
        except BaseException:
            self.close()  # its caller has left, or does not read
            raise
        finally:
            self._call = self._message = self._cut = None
            self._waits_since_s = self.loop.time()
        if not self._has_message or self._buffer:
            self.close("ended_early")
        elif self._is_last:
            self.close()

    async def _handle(self, method: str, context: LocalContext) -> None:
        """Leaves how it ended in the context. Raises CancelledError where its caller has left."""
        handler = self._handlers.get(method)
        if handler is None:
            context.status, context.text = (
                grpc.StatusCode.UNIMPLEMENTED,
                f"there is no method {method[:64]!r}",
            )
            return
        self._counters.calls[method] += 1
        context.serialize = cast("Callable[[Any], bytes]", handler.response_serializer)
        try:
            if handler.response_streaming:
                await handler.stream_stream(None, context)
            else:
                await context.write_last(await handler.stream_unary(None, context))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if self._transport is None or self._transport.is_closing():
                raise
            ended_itself = grpc.StatusCode.CANCELLED, "the call was cancelled by the service"
            context.status, context.text = self._cut or ended_itself
        except Exception as error:
            log.exception("a handler failed", method=method)
            context.status, context.text = grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"

    def cut(self, code: grpc.StatusCode, text: str) -> None:
        """Ends the call, where there is one, with this status."""
        if self._call is not None and self._cut is None:
            self._cut = code, text
            self._call.cancel()

    def _end_late(self) -> None:
        self.cut(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    # -- time and end ----------------------------------------------------------------------------------

    def check_time(self) -> None:
        """Closes the connection when something has taken longer than it may."""
        now_s, bounds, transport = self.loop.time(), self.bounds, self._transport
        assert transport is not None
        waiting_bytes = transport.get_write_buffer_size()
        taken_bytes = self._written_bytes - waiting_bytes
        if not waiting_bytes or taken_bytes != self._taken_bytes:
            self._took_s, self._taken_bytes = now_s, taken_bytes
        if now_s - self._took_s > bounds.stuck_s:
            self.abort("not_reading")
        elif self._call is None:
            waits_s = bounds.head_s if self._buffer or not self._is_greeted else bounds.idle_s
            if now_s - self._waits_since_s > waits_s:
                self.close("idle")

    def finish(self) -> None:
        """Closes the connection, after its call where there is one."""
        self._is_last = True
        if self._call is None:
            self.close()

    def close(self, cause: str = "") -> None:
        """Ends the connection: at once where the client does not read, else when it has what was sent."""
        if self._is_full or self._call is not None:
            self.abort(cause)
            return
        assert self._transport is not None
        self._count(cause)
        self._transport.close()

    def abort(self, cause: str = "") -> None:
        """Ends the connection at once, whatever waits for its client."""
        assert self._transport is not None
        self._count(cause)
        self._transport.abort()

    def _count(self, cause: str) -> None:
        if cause and self._transport is not None and not self._transport.is_closing():
            self._counters.closed[cause] += 1
