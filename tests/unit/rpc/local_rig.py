"""A server of local calls on a loop of its own thread, with handlers that do what a test says."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from encoder_service.rpc.local_connection import LocalBounds
from encoder_service.rpc.local_server import LocalServer
from lm_adapter.transport.local_calls import LocalCalls
from lm_adapter.transport.local_frames import PREAMBLE, LocalError
from vision_encoder.v1 import broker_pb2 as pb

HEADER = struct.Struct(">BI")


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def head(method: str = "Echo", **fields: Any) -> bytes:
    return frame(pb.LOCAL_FRAME_HEAD, pb.LocalCall(method=method, **fields).SerializeToString())


def message(payload: bytes = b"question") -> bytes:
    return frame(pb.LOCAL_FRAME_MESSAGE, payload)


class Handlers:
    """Each is what its name says. ``events`` is what happened in them."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.go_on = threading.Event()

    def by_name(self) -> dict[str, Any]:
        streams = [
            self.echo,
            self.twice,
            self.last,
            self.last_refused,
            self.refuse_unread,
            self.refuse,
            self.fail,
            self.wait,
            self.flood,
            self.tell,
            self.double,
            self.end_itself,
            self.abort_oddly,
        ]
        made: dict[str, Any] = {
            each.__name__.title().replace("_", ""): grpc.stream_stream_rpc_method_handler(each, None, bytes)  # type: ignore[arg-type]
            for each in streams
        }
        made["Unary"] = grpc.stream_unary_rpc_method_handler(self.unary, None, lambda text: text.encode())  # type: ignore[arg-type]
        return made

    async def echo(self, _: object, context: Any) -> None:
        await context.write(await context.read())
        context.set_trailing_metadata((("said", "so"), ("raw-bin", b"\xff\x00")))

    async def twice(self, _: object, context: Any) -> None:
        data = await context.read()
        await context.write(data)
        await context.write(data)

    async def last(self, _: object, context: Any) -> None:
        await context.write_last(await context.read())
        self.events.append("written")
        while not self.go_on.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)
        context.set_trailing_metadata((("said", "so"),))

    async def last_refused(self, _: object, context: Any) -> None:
        await context.write_last(await context.read())
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async def tell(self, _: object, context: Any) -> None:
        await context.read()
        self.events.append((context.invocation_metadata(), context.time_remaining(), context.peer()))

    async def unary(self, _: object, context: Any) -> str:
        data: bytes = await context.read()
        return data.decode().upper()

    async def refuse_unread(self, _: object, context: Any) -> None:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "no", (("why-bin", b"\x01\x80"), ("more", "text"))
        )

    async def refuse(self, _: object, context: Any) -> None:
        await context.read()
        await context.write(b"first")
        await context.abort(grpc.StatusCode.NOT_FOUND, "not here")

    async def fail(self, _: object, context: Any) -> None:
        await context.read()
        raise ValueError("broken")

    async def double(self, _: object, context: Any) -> None:
        await context.write(2 * await context.read())

    async def end_itself(self, _: object, context: Any) -> None:
        await context.read()
        raise asyncio.CancelledError

    async def abort_oddly(self, _: object, context: Any) -> None:
        kind = await context.read()
        if kind == b"text":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no file \udcff")
        context.set_trailing_metadata((("name", "\u0100"),))

    async def wait(self, _: object, context: Any) -> None:
        await context.read()
        self.events.append("waits")
        try:
            while not self.go_on.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        await context.write(b"went on")

    async def flood(self, _: object, context: Any) -> None:
        size = int(await context.read())
        for number in range(size):
            await context.write(bytes(1 << 16))
            self.events.append(number)


class LocalRig:
    def __init__(self, folder: Path, bounds: LocalBounds, *, starts: bool = True, **options: Any) -> None:
        self.handlers = Handlers()
        self.path = str(folder / "calls")
        self.server = LocalServer(self.path, bounds, **options)
        self.errors: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.on_loop(self.bind())
        if starts:
            self.start()

    async def bind(self) -> None:
        self.server.bind()

    def start(self) -> None:
        self.on_loop(self.server.start(self.handlers.by_name()))

    def on_loop(self, work: Awaitable[Any], timeout_s: float = 30.0) -> Any:
        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout_s)

    def later(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        self.handlers.go_on.set()
        self.on_loop(self.server.stop(5))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()
        assert not self.errors, self.errors

    def raw(self) -> socket.socket:
        """A connection that may say anything; nothing has been said."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(20)
        made.connect(self.path)
        return made

    def waiting_bytes(self) -> int:
        """What the connections' clients have not taken yet."""
        transports = [each._transport for each in self.server._connections]
        return sum(each.get_write_buffer_size() for each in transports if each is not None)

    def closed_for(self, cause: str) -> int:
        return self.server.counters.closed[cause]


@contextmanager
def local_rig(folder: Path, bounds: LocalBounds | None = None, **options: Any) -> Iterator[LocalRig]:
    rig = LocalRig(folder, bounds or LocalBounds(), **options)
    try:
        yield rig
    finally:
        rig.close()


class Answered:
    """How one call ended."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.trailers: tuple[Any, ...] = ()
        self.error: LocalError | None = None

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self.error is None else self.error.code()


def no_grpc(_: float) -> Any:
    """Where a call would go otherwise."""
    raise LocalError(grpc.StatusCode.ABORTED, "by gRPC")


def ask(
    calls: LocalCalls,
    path: str,
    method: str,
    request: bytes = b"question",
    timeout_s: float = 20.0,
    metadata: Any = (),
    otherwise: Callable[[float], Any] = no_grpc,
) -> Answered:
    """By a thread's call."""
    call = calls.begin(path, method, request, timeout_s, metadata, otherwise)
    found = Answered()
    try:
        found.messages.extend(call)
        found.trailers = call.trailing_metadata()
    except LocalError as error:
        found.error = error
    finally:
        call.cancel()
    return found


def ask_on_loop(
    calls: LocalCalls,
    path: str,
    method: str,
    request: bytes = b"question",
    timeout_s: float = 20.0,
    metadata: Any = (),
    otherwise: Callable[[float], Any] = no_grpc,
) -> Answered:
    """By a loop's call, on a loop of its own."""

    async def run() -> Answered:
        call = calls.begin_on_loop(path, method, request, timeout_s, metadata, otherwise)
        found = Answered()
        try:
            async for received in call:
                found.messages.append(received)
            found.trailers = await call.trailing_metadata()
        except LocalError as error:
            found.error = error
        finally:
            call.cancel()
        return found

    return asyncio.run(run())


Ask = Callable[..., Answered]
ASKS: tuple[Ask, ...] = (ask, ask_on_loop)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    found = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except ConnectionError:
            return found
        if not data:
            return found
        found += data


def reply(connection: socket.socket) -> bytes:
    """Some of what the server says behind its greeting."""
    data = b""
    while data in (b"", PREAMBLE):
        more = connection.recv(1 << 16)
        assert more, "the server closed it"
        data += more
    return data.removeprefix(PREAMBLE)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


__all__ = ["ASKS", "HEADER", "PREAMBLE", "Answered", "Ask", "LocalRig", "ask", "ask_on_loop", "frame", "head"]
