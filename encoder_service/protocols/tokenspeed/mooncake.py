"""Rows by Mooncake: a buffer that rows are copied to, and writes from it into memory that receivers name.

Over RDMA the buffer is registered with Mooncake's engine. Every process that reaches it can read what is
registered, so the buffer is registered and never the arena. Over TCP a sender's memory needs no registration,
and nothing is registered.

An engine's first write to a peer waits up to a minute for its answer, and all other writes of the engine wait
with it. Over TCP each receiving host therefore has an engine of its own.

A write that failed may go on reading for a while: its part of the buffer is reused after QUARANTINE_S. Used
from one event loop; copies and writes run on threads of their own.

Shape legend: R rows (visual tokens), D the language model's width, L deepstack levels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import structlog
import torch

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError, TransportUnavailable
from encoder_service.store.allocator import RangeAllocator

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
# The two engines exchange their metadata themselves, without a server.
METADATA = "P2PHANDSHAKE"
# Mooncake reads these at its start: seconds for a write, and for a write whose peer makes no progress.
LIMITS = {"MC_TRANSFER_TIMEOUT": "10", "MC_TCP_PROGRESS_TIMEOUT_SEC": "5", "MC_TCP_STATUS_TIMEOUT_SEC": "5"}
QUARANTINE_S = 30.0
# Concurrent writes, in total and to one host. Each blocks a thread.
MAX_WRITES, MAX_WRITES_TO_HOST = 256, 8
# Over TCP. An engine takes 2 threads and 5 file descriptors.
MAX_ENGINES = 64
# Sessions that have answered.
MAX_KNOWN = 4096
# Over RDMA: for a peer's port to take a connection.
PROBE_S = 2.0
# The rows of one host take at most this part of the buffer, so that a host that does not answer leaves room.
HOST_SHARE = 0.5


# mooncake.engine.TransferEngine, which has no type hints. Its methods return 0 for success.
Engine: TypeAlias = Any


class Engines:
    """Mooncake's engines by the host that they write to. Over TCP a host's first write starts one, up to
    MAX_ENGINES. Over RDMA there is one, because the buffer is registered with it."""

    def __init__(self, settings: Settings) -> None:
        """Starts the first engine. Raises ConfigurationError."""
        os.environ.update({name: value for name, value in LIMITS.items() if name not in os.environ})
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigurationError(
                f"serve_tokenspeed needs Mooncake, which does not load: {error}; "
                "pip install '.[serve,tokenspeed]' in a checkout, and the system's libibverbs1"
            ) from None
        self._new_engine: Callable[[], Engine] = TransferEngine
        self._devices = settings.tokenspeed_rdma
        self._max_engines = 1 if self._devices else MAX_ENGINES
        # Peers of a TCP write never connect back.
        self._host = settings.serve_tokenspeed.rpartition(":")[0] if self._devices else LOOPBACK
        engine = self._start()
        # Without a device Mooncake uses TCP, and what is registered is then open to all.
        if self._devices and not any(map(any, json.loads(engine.get_local_topology()).values())):
            raise ConfigurationError(
                f"tokenspeed_rdma is {self._devices!r}, and Mooncake finds no such device"
            )
        # The most recently used at the end.
        self._by_host = {LOOPBACK: engine}

    def register(self, memory: torch.Tensor) -> bool:
        """Registers memory with the engine, and returns whether that was possible. Only over RDMA."""
        (engine,) = self._by_host.values()
        return bool(engine.register_memory(memory.data_ptr(), memory.nbytes) == 0)

    def of_host(self, host: str) -> Engine:
        """Raises TransportUnavailable."""
        engine = self._by_host.pop(host, None)
        if engine is None and len(self._by_host) < self._max_engines:
            try:
                engine = self._start()
            except ConfigurationError as error:
                raise TransportUnavailable(error.message) from None
        elif engine is None:
            # The least recently used one is reused: ending an engine stops the interpreter for a second.
            engine = self._by_host.pop(next(iter(self._by_host)))
        self._by_host[host] = engine
        return engine

    def _start(self) -> Engine:
        """Raises ConfigurationError."""
        engine = self._new_engine()
        protocol, devices = "rdma" if self._devices else "tcp", self._devices.replace("auto", "")
        if engine.initialize(self._host, METADATA, protocol, devices):
            raise ConfigurationError(f"Mooncake does not start on {self._host}")
        return engine


class HostShare:
    """What one receiving host may use: a part of the buffer, and concurrent writes. Both are granted in the
    order of the requests. num_bytes: what its rows take of the buffer."""

    def __init__(self, max_bytes: float) -> None:
        self.num_bytes = 0
        # Held by the rows that are next to get a part of the buffer.
        self.rows_lock = asyncio.Lock()
        self._max_bytes = max_bytes
        # By whether the session of the write has answered before. One that never has may not answer at all:
        # further writes wait for the slot, where they can be cancelled, and not in Mooncake.
        self._write_slots = {True: asyncio.Semaphore(MAX_WRITES_TO_HOST), False: asyncio.Semaphore(1)}

    def has_room(self, num_bytes: int) -> bool:
        """Rows above the whole share have room where they are the only ones."""
        return not self.num_bytes or self.num_bytes + num_bytes <= self._max_bytes

    async def acquire_write(self, has_answered: bool) -> None:
        """Waits for a slot. has_answered: whether the session has, for ``release_write`` too."""
        await self._write_slots[has_answered].acquire()

    def release_write(self, has_answered: bool) -> None:
        self._write_slots[has_answered].release()


@dataclass
class StagedRows:
    """One item's rows in the buffer. main [R, D], deepstack [R, L * D]: views of it. work: copies and writes
    that use them; a write returns 0 if all bytes arrived."""

    main: torch.Tensor
    deepstack: torch.Tensor
    work: list[Future[int]] = field(default_factory=list)


class Mooncake:
    """The send buffer and the writes from it. held_bytes: what rows take of the buffer. Raises
    ConfigurationError where the buffer or an engine is not possible."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """device: of the tower. Over RDMA the buffer is in its memory if Mooncake can register that."""
        self._engines = Engines(settings)
        self._is_rdma = bool(settings.tokenspeed_rdma)
        self._ranges = RangeAllocator(settings.tokenspeed_send_bytes)
        self.size_bytes = self._ranges.size_bytes
        self.held_bytes = 0
        self._stream = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # pinned memory is made by this thread's current device
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer = self._registered(device) if self._is_rdma else self._host_memory(device)
        self._threads = ThreadPoolExecutor(MAX_WRITES, "mooncake")
        # Sessions that have answered, the oldest first.
        self._known: dict[str, None] = {}
        # A share lasts as long as rows or writes of its host.
        self._hosts: WeakValueDictionary[str, HostShare] = WeakValueDictionary()
        # Held by the host that is next to get a part of the buffer.
        self._buffer_lock = asyncio.Lock()
        self._freed = asyncio.Event()

    def close(self) -> None:
        """Writes in progress end by their own limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def staged(
        self, rows: torch.Tensor, width: int, dtype: torch.dtype, host: str
    ) -> AsyncIterator[StagedRows]:
        """Rows [R, D * (1 + L)] in the buffer, converted to ``dtype``. rows: complete, as the pipeline
        delivers them. width: D. host: the receiver's. Waits for room. Raises TransportUnavailable for rows
        that exceed the buffer."""
        num_rows, num_columns = rows.shape
        num_bytes = rows.numel() * dtype.itemsize
        share = self._share_of(host)
        offset = await self._reserve(share, num_bytes)
        memory = self._buffer[offset : offset + num_bytes].view(dtype)
        staged = StagedRows(
            memory[: num_rows * width].view(num_rows, width),
            memory[num_rows * width :].view(num_rows, num_columns - width),
        )
        try:
            copying = self._threads.submit(self._copy, rows, staged)
            staged.work.append(copying)
            await asyncio.wrap_future(copying)
            yield staged
        finally:
            self._free_after(staged.work, lambda: self._free(share, offset, num_bytes))

    async def write(
        self,
        staged: StagedRows,
        session: str,
        sources: Sequence[torch.Tensor],
        addresses: Sequence[int],
    ) -> None:
        """Writes contiguous parts of the staged rows to addresses of the receiver's. session: its engine's
        host:port. Raises TransportUnavailable."""
        host, loop = session.rpartition(":")[0], asyncio.get_running_loop()
        share, has_answered = self._share_of(host), session in self._known
        await share.acquire_write(has_answered)
        try:
            if self._is_rdma:
                await probe(session)
            engine = self._engines.of_host(host)
        except BaseException:
            share.release_write(has_answered)
            raise
        num_bytes = sum(source.nbytes for source in sources)
        writing = self._threads.submit(
            engine.batch_transfer_sync_write,
            session,
            [source.data_ptr() for source in sources],
            list(addresses),
            [source.nbytes for source in sources],
        )
        staged.work.append(writing)
        # A caller that leaves does not end the write.
        writing.add_done_callback(on_loop(loop, lambda: share.release_write(has_answered)))
        if status := await asyncio.wrap_future(writing):
            raise TransportUnavailable(
                f"Mooncake could not write {num_bytes} bytes to {session}: status {status}", session=session
            )
        self._known[session] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    # -- the buffer ------------------------------------------------------------------------------------

    def _share_of(self, host: str) -> HostShare:
        return self._hosts.setdefault(host, HostShare(HOST_SHARE * self.size_bytes))

    async def _reserve(self, share: HostShare, num_bytes: int) -> int:
        """Returns an offset, for ``_free``. Hosts take turns. Raises TransportUnavailable."""
        if num_bytes > self.size_bytes:
            raise TransportUnavailable(
                f"the rows have {num_bytes} bytes, tokenspeed_send_bytes is {self.size_bytes}",
                found_bytes=num_bytes,
                max_bytes=self.size_bytes,
            )
        async with share.rows_lock:
            while not share.has_room(num_bytes):
                await self._freed.wait()
            async with self._buffer_lock:
                while (offset := self._ranges.allocate(num_bytes)) is None:
                    await self._freed.wait()
            share.num_bytes += num_bytes
            self.held_bytes += num_bytes
        return offset

    def _free_after(self, work: Sequence[Future[int]], free: Callable[[], None]) -> None:
        """Frees once nothing uses the memory, after QUARANTINE_S where some work failed."""
        loop = asyncio.get_running_loop()
        pending = next((future for future in work if not future.done()), None)
        if pending is not None:
            pending.add_done_callback(on_loop(loop, lambda: self._free_after(work, free)))
        elif all(has_succeeded(future) for future in work):
            free()
        else:
            loop.call_later(QUARANTINE_S, free)

    def _free(self, share: HostShare, offset: int, num_bytes: int) -> None:
        self._ranges.free(offset)
        share.num_bytes -= num_bytes
        self.held_bytes -= num_bytes
        # Wakes all that wait now. Those that come later wait for the next range.
        self._freed.set()
        self._freed.clear()

    def _copy(self, rows: torch.Tensor, staged: StagedRows) -> int:
        """Returns 0 once the rows are in the buffer."""
        width = staged.main.shape[1]
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            staged.main.copy_(rows[:, :width], non_blocking=True)
            staged.deepstack.copy_(rows[:, width:], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return 0

    def _host_memory(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def _registered(self, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
            if self._engines.register(memory):
                return memory
            log.warning("Mooncake cannot register device memory: rows pass through host memory")
        memory = self._host_memory(device)
        if not self._engines.register(memory):
            raise ConfigurationError(f"Mooncake cannot register {memory.nbytes} bytes of host memory")
        return memory


async def probe(session: str) -> None:
    """Returns if the session's port takes a connection. Raises TransportUnavailable."""
    host, _, port = session.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # also a timeout
        why = str(error) or f"no answer within {PROBE_S} s"
        raise TransportUnavailable(f"Mooncake's engine at {session} does not answer: {why}") from None
    writer.close()


def has_succeeded(work: Future[int]) -> bool:
    """Whether finished work no longer uses its memory: it never started, or it returned 0."""
    return work.cancelled() or (work.exception() is None and not work.result())


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> Callable[[Future[int]], None]:
    """A callback for a thread's future that runs ``function`` on the loop, if that still runs."""

    def call(_: Future[int]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call
