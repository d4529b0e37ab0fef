"""Rows by Mooncake: a buffer that rows are copied to, and writes from it into memory that receivers name.

Over RDMA the buffer is registered with Mooncake's engine. Every process that reaches it can read what is
registered, so it is this buffer and never the arena. Over TCP a sender's memory needs no registration, and
nothing is registered.

An engine's first write to a peer waits up to a minute for its answer, and all other writes of the engine wait
with it. Over TCP each receiving host therefore has an engine of its own.

A write that failed may go on reading for a while: its part of the buffer is used again after QUARANTINE_S.
Used from one event loop; copies and writes run on threads of its own.

Shape legend: R rows (visual tokens), D the language model's width, L deepstack levels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import structlog
import torch

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError, TransportUnavailable
from encoder_service.store.allocator import RangeAllocator

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
# Metadata is exchanged between the two engines, without a server.
METADATA = "P2PHANDSHAKE"
# Read by Mooncake at its start: seconds for a write, and for a peer of a write that stands still.
LIMITS = {"MC_TRANSFER_TIMEOUT": "10", "MC_TCP_PROGRESS_TIMEOUT_SEC": "5", "MC_TCP_STATUS_TIMEOUT_SEC": "5"}
QUARANTINE_S = 30.0
# Writes at a time, in all and to one host; each blocks a thread.
MAX_WRITES, MAX_WRITES_TO_HOST = 256, 8
# Over TCP; an engine takes 2 threads and 5 file descriptors.
MAX_ENGINES = 64
# Sessions that have answered.
MAX_KNOWN = 4096
# Over RDMA, for a peer's port to take a connection.
PROBE_S = 2.0
# One host's rows take at most this share of the buffer, so that a host that stands still leaves room.
HOST_SHARE = 0.5


@dataclass
class StagedRows:
    """One item's rows in the buffer. main [R, D], deepstack [R, L * D]: views of it. work: what uses it.
    A write returns 0 if all bytes arrived."""

    main: torch.Tensor
    deepstack: torch.Tensor
    work: list[Future[int]] = field(default_factory=list)


class Mooncake:
    """Engines and their buffer. Raises ConfigurationError where either is not possible."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """device: of the tower. Over RDMA the buffer is in its memory if Mooncake can register that."""
        os.environ.update({name: value for name, value in LIMITS.items() if name not in os.environ})
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigurationError(
                f"serve_tokenspeed needs Mooncake, which does not load: {error}; "
                "pip install 'vision-encoder[tokenspeed]', and the system's libibverbs1"
            ) from None
        self._new_engine: Callable[[], Any] = TransferEngine
        self._rdma = settings.tokenspeed_rdma
        # Peers of a TCP write never call back.
        self._host = settings.serve_tokenspeed.rpartition(":")[0] if self._rdma else LOOPBACK
        engine = self._start_engine()
        # Without a device Mooncake uses TCP, and what is registered is then open to all.
        if self._rdma and not any(map(any, json.loads(engine.get_local_topology()).values())):
            raise ConfigurationError(f"tokenspeed_rdma is {self._rdma!r}, and Mooncake finds no such device")
        # By the host that it writes to, the last used at the end. The registered engine stays the only one.
        self._engines = {LOOPBACK: engine}
        self._max_engines = 1 if self._rdma else MAX_ENGINES
        if device.type == "cuda":  # pinned memory is made by this thread's current device
            torch.cuda.set_device(device)
        self._ranges = RangeAllocator(settings.tokenspeed_send_bytes)
        self.size_bytes = self._ranges.size_bytes
        self._buffer = self._registered(engine, device) if self._rdma else self._host_memory(device)
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(MAX_WRITES, "mooncake")
        # Sessions that have answered, the oldest first.
        self._known: dict[str, None] = {}
        # By host: bytes that its rows take, who waits to take some, places for writes.
        self._held: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def close(self) -> None:
        """Writes in progress end by their own limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def staged(
        self, rows: torch.Tensor, width: int, dtype: torch.dtype, host: str
    ) -> AsyncIterator[StagedRows]:
        """Rows [R, D * (1 + L)] in the buffer, in another dtype if wanted. rows: complete, as the pipeline
        delivers them. width: D. host: that they go to. Waits for room. Raises TransportUnavailable for rows
        that exceed the buffer."""
        num_rows, num_columns = rows.shape
        num_bytes = rows.numel() * dtype.itemsize
        offset = await self._reserve(host, num_bytes)
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
            self._free_after(staged.work, lambda: self._free(host, offset, num_bytes))

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
        # A peer that has never answered may not answer at all: its host's writes wait here, not in Mooncake.
        is_known = session in self._known
        limit = asyncio.Semaphore(MAX_WRITES_TO_HOST if is_known else 1)
        places = self._places.setdefault((host, is_known), limit)
        await places.acquire()
        try:
            if self._rdma:
                await probe(session)
            engine = self._engine_of(host)
        except BaseException:
            places.release()
            raise
        writing: Future[int] = self._threads.submit(
            engine.batch_transfer_sync_write,
            session,
            [source.data_ptr() for source in sources],
            list(addresses),
            [source.nbytes for source in sources],
        )
        staged.work.append(writing)
        # A caller that leaves does not end the write.
        writing.add_done_callback(on_loop(loop, places.release))
        if status := await asyncio.wrap_future(writing):
            raise TransportUnavailable(
                f"Mooncake could not write {sum(source.nbytes for source in sources)} bytes to {session}: "
                f"status {status}",
                session=session,
            )
        self._known[session] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    # -- engines ---------------------------------------------------------------------------------------

    def _start_engine(self) -> Any:
        """Raises ConfigurationError."""
        engine = self._new_engine()
        protocol, devices = "rdma" if self._rdma else "tcp", self._rdma.replace("auto", "")
        if engine.initialize(self._host, METADATA, protocol, devices):
            raise ConfigurationError(f"Mooncake does not start on {self._host}")
        return engine

    def _engine_of(self, host: str) -> Any:
        """Raises TransportUnavailable."""
        engine = self._engines.pop(host, None)
        if engine is None and len(self._engines) < self._max_engines:
            try:
                engine = self._start_engine()
            except ConfigurationError as error:
                raise TransportUnavailable(error.message) from None
        elif engine is None:
            # Used again: the end of an engine stops the interpreter for a second.
            engine = self._engines.pop(next(iter(self._engines)))
        self._engines[host] = engine
        return engine

    # -- the buffer ------------------------------------------------------------------------------------

    async def _reserve(self, host: str, num_bytes: int) -> int:
        """An offset; freed by ``_free``. Hosts take turns, and so do the rows for one host."""
        if num_bytes > self.size_bytes:
            raise TransportUnavailable(
                f"the rows have {num_bytes} bytes, tokenspeed_send_bytes is {self.size_bytes}",
                found_bytes=num_bytes,
                max_bytes=self.size_bytes,
            )
        async with self._turns.setdefault(host, asyncio.Lock()):
            while self._held[host] and self._held[host] + num_bytes > HOST_SHARE * self.size_bytes:
                await self._freed.wait()
            async with self._turn:
                while (offset := self._ranges.allocate(num_bytes)) is None:
                    await self._freed.wait()
            self._held[host] += num_bytes
        return offset

    def _free_after(self, work: Sequence[Future[int]], free: Callable[[], None]) -> None:
        """Frees once nothing uses the memory."""
        loop = asyncio.get_running_loop()
        pending = [one for one in work if not one.done()]
        if pending:
            pending[0].add_done_callback(on_loop(loop, lambda: self._free_after(work, free)))
        elif all(one.cancelled() or (one.exception() is None and not one.result()) for one in work):
            free()
        else:
            loop.call_later(QUARANTINE_S, free)

    def _free(self, host: str, offset: int, num_bytes: int) -> None:
        self._ranges.free(offset)
        self._held[host] -= num_bytes
        if not self._held[host]:
            del self._held[host]
        self._freed.set()
        self._freed = asyncio.Event()

    def _copy(self, rows: torch.Tensor, staged: StagedRows) -> int:
        """Returns once the rows are in the buffer."""
        width = staged.main.shape[1]
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            staged.main.copy_(rows[:, :width], non_blocking=True)
            staged.deepstack.copy_(rows[:, width:], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return 0

    def _host_memory(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def _registered(self, engine: Any, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
            if engine.register_memory(memory.data_ptr(), memory.nbytes) == 0:
                return memory
            log.warning("Mooncake cannot register device memory: rows pass through host memory")
        memory = self._host_memory(device)
        if engine.register_memory(memory.data_ptr(), memory.nbytes):
            raise ConfigurationError(f"Mooncake cannot register {memory.nbytes} bytes of host memory")
        return memory


async def probe(session: str) -> None:
    """Whether the host answers. Raises TransportUnavailable."""
    host, _, port = session.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # also a timeout
        why = str(error) or f"no answer within {PROBE_S} s"
        raise TransportUnavailable(f"Mooncake's engine at {session} does not answer: {why}") from None
    writer.close()


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> Callable[[Future[int]], None]:
    """A callback for a thread's future that runs ``function`` on the loop, if that still runs."""

    def call(_: Future[int]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call
