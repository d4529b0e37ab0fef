"""The tier below the host's: finished rows that replicas share, on a server of their own.

Owns when the server is asked and what for: looked at once for a key that this process lacks, before anything
is decoded; written after an encode, behind everybody's back. It is a favour and never a need: a look takes
``timeout_s`` at most, what waits to be written is bounded in bytes and else given up, and a server that is
slow or gone is left alone (``shared_tier_breaker``). What is believed of an entry is ``shared_tier_entry``'s,
how it travels ``shared_tier_server``'s. Used from the event loop only; hashes and copies run on workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from encoder_service.store.embedding_store import Held, RowStore
from encoder_service.store.shared_tier_breaker import BreakerState, CircuitBreaker
from encoder_service.store.shared_tier_entry import (
    HEADER_BYTES,
    Layout,
    Seal,
    UnusableEntry,
    entry_header,
    open_entry,
    read_header,
    rows_view,
)
from encoder_service.store.shared_tier_server import (
    PIECE_BYTES,
    EntryServer,
    ServerFailed,
    ServerRefused,
)
from encoder_service.types import EncodedItem, Grid

log = structlog.get_logger(__name__)
Found = TypeVar("Found")

# Looks at once. Items that look are not admitted yet, so this many may wait here; further ones do not look.
MAX_LOOKS = 64
# Of a value being written, which nobody waits for.
WRITE_TIMEOUT_S = 5.0
# Of the pace of transfers: what a new figure counts, and how it rises while nothing is measured.
PACE_WEIGHT, PACE_RISE = 0.3, 1.02


class SharedTier(Protocol):
    """What the pipeline asks of it. Nothing here fails: the worst is that an item is encoded."""

    async def get(self, namespace: str, key: bytes, *, within_s: float | None = None) -> EncodedItem | None:
        """The item with rows of their own on the host, or None. within_s: takes no longer, whatever the
        tier's own limit is."""

    async def grids(
        self, namespace: str, keys: Sequence[bytes], *, within_s: float | None = None
    ) -> Mapping[bytes, Grid]:
        """The grids of those of the keys that have an entry, as their headers tell them: nothing of an entry
        is proven before its rows were read. One look for all. within_s: as of ``get``."""

    def put(self, namespace: str, held: Held) -> None:
        """Has the rows written when there is time for it. Takes ``held`` over and drops it."""

    async def stop(self) -> None:
        """Gives up what waits. Twice is once."""


@dataclass(frozen=True)
class SharedTierLimits:
    """timeout_s: of a look. max_value_bytes: of one item's rows, either way. max_read_bytes: rows under way
    in here at a time. max_queued_bytes: rows that wait to be written, which stay where they are meanwhile.
    excluded: namespaces whose rows do not leave the process."""

    timeout_s: float = 0.1
    ttl_s: float = 86_400.0
    max_value_bytes: int = 64 << 20
    max_read_bytes: int = 256 << 20
    max_queued_bytes: int = 128 << 20
    excluded: frozenset[str] = frozenset()


@dataclass
class SharedTierCounters:
    """looks: by how they ended: hit, miss, corrupt, foreign, oversized, timeout (no answer), slow (too many
    bytes for the time), late (its caller had less time), failed, left (its caller did), refused (by the
    breaker), busy, excluded. writes: stored, full,
    timeout, failed, and given up before they began: refused, queue, oversized, excluded, stopped."""

    looks: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    written_bytes: int = 0


class TransferPace:
    """How fast rows come from the server, lately: what would not come in time is not begun, and says nothing
    of how well the server is. Each that was not begun makes the next a little more likely, since a pace that
    is never measured would stay what it was."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None

    def allows(self, num_bytes: int, within_s: float) -> bool:
        if self.bytes_per_s is None or num_bytes <= self.bytes_per_s * within_s:
            return True
        self.bytes_per_s *= PACE_RISE
        return False

    def took(self, num_bytes: int, seconds: float) -> None:
        """As many bytes came so fast, or did not come any faster."""
        found = num_bytes / max(seconds, 1e-6)
        known = self.bytes_per_s
        self.bytes_per_s = found if known is None else known + PACE_WEIGHT * (found - known)


@dataclass
class _Look:
    """One that is under way. transfer: bytes that are coming and since when, once the server has answered."""

    ends_s: float
    transfer: tuple[int, float] | None = None


class ServerTier:
    """See ``SharedTier``. store: brings rows to the host before they are written. clock: monotonic seconds;
    wall_clock: unix seconds. look_ended: is told the seconds and the outcome of each look that was made."""

    def __init__(
        self,
        server: EntryServer,
        seal: Seal,
        layout: Layout,
        store: RowStore,
        workers: Executor,
        limits: SharedTierLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        look_ended: Callable[[float, str], None] | None = None,
    ) -> None:
        self.limits = limits
        self.counters = SharedTierCounters()
        # Apart, since a server that is full or read-only still answers looks.
        self.looks, self.writes = CircuitBreaker(clock), CircuitBreaker(clock)
        self.pace = TransferPace()
        self.queued_bytes = 0
        self.reading_bytes = 0
        self._server, self._seal, self._layout = server, seal, layout
        self._store, self._workers = store, workers
        self._clock, self._wall_clock, self._look_ended = clock, wall_clock, look_ended
        self._num_looks = 0
        self._queue: deque[tuple[str, Held]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._stopped = False

    # -- looks -----------------------------------------------------------------------------------------

    async def get(self, namespace: str, key: bytes, *, within_s: float | None = None) -> EncodedItem | None:
        """See ``SharedTier``."""
        name = self._seal.name(namespace, key)
        return await self._made(namespace, lambda look: self._look(look, name, key), within_s)

    async def grids(
        self, namespace: str, keys: Sequence[bytes], *, within_s: float | None = None
    ) -> Mapping[bytes, Grid]:
        """See ``SharedTier``."""
        names = [self._seal.name(namespace, key) for key in keys]
        return await self._made(namespace, lambda _: self._look_at_heads(names, keys), within_s) or {}

    async def _made(
        self, namespace: str, ask: Callable[[_Look], Awaitable[Found | None]], within_s: float | None
    ) -> Found | None:
        """What a look finds, or None: also where none may be made now."""
        limits = self.limits
        if namespace in limits.excluded or self._stopped:
            self.counters.looks["excluded"] += 1
            return None
        if self._num_looks >= MAX_LOOKS:
            self.counters.looks["busy"] += 1
            return None
        call = self.looks.enter()
        if call is None:
            self.counters.looks["refused"] += 1
            return None
        self._num_looks += 1
        started_s = self._clock()
        outcome: str = "left"
        found: Found | None = None
        is_cut = within_s is not None and within_s < limits.timeout_s
        timeout_s = within_s if within_s is not None and is_cut else limits.timeout_s
        look = _Look(started_s + timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                found = await ask(look)
            call.succeeded()
            outcome = "hit" if found else "miss"
        except UnusableEntry as entry:
            call.succeeded()
            outcome = entry.outcome
            note = log.warning if outcome in ("corrupt", "foreign") else log.debug
            note("an entry of the shared tier is not used", outcome=outcome, reason=str(entry))
        except TimeoutError:
            outcome = "late" if is_cut else "timeout"
            if look.transfer is not None:
                outcome = "slow"
                call.succeeded()
                self.pace.took(look.transfer[0], self._clock() - look.transfer[1])
            elif not is_cut:
                self._note_failure(call.failed, self.looks, outcome)
        except ServerFailed as failure:
            outcome = "failed"
            self._note_failure(call.failed, self.looks, str(failure))
        except Exception:  # a defect of ours costs an encode and not the item
            outcome = "failed"
            log.exception("a look into the shared tier failed by a defect", namespace=namespace)
        finally:
            call.abandoned()
            self._num_looks -= 1
            self.counters.looks[outcome] += 1
            if self._look_ended is not None:
                self._look_ended(self._clock() - started_s, outcome)
        return found

    async def _look(self, look: _Look, name: bytes, key: bytes) -> EncodedItem | None:
        """Raises UnusableEntry, ServerFailed."""
        first = (await self._server.read(name, 0, PIECE_BYTES))[0]
        if not first:
            return None
        try:
            header = read_header(first)
            header.check_layout(self._layout)
            if header.num_bytes > self.limits.max_value_bytes:
                raise UnusableEntry("oversized", f"{header.num_bytes} bytes of rows", is_ours=False)
            if self.reading_bytes + header.num_bytes > self.limits.max_read_bytes:
                raise UnusableEntry("busy", f"{self.reading_bytes} bytes are under way", is_ours=False)
            now_s = self._clock()
            if not self.pace.allows(header.num_bytes, look.ends_s - now_s):
                raise UnusableEntry("slow", f"{header.num_bytes} bytes of rows", is_ours=False)
            look.transfer = header.num_bytes, now_s
            self.reading_bytes += header.num_bytes
            try:
                pieces = [memoryview(first)[HEADER_BYTES:]]
                left_bytes = header.num_bytes - len(pieces[0])
                if left_bytes > 0:
                    rest = await self._server.read(name, len(first), left_bytes)
                    if not rest[0]:
                        return None  # gone since
                    pieces += map(memoryview, rest)
                arguments = self._seal, name, key, header, pieces
                item = await asyncio.get_running_loop().run_in_executor(self._workers, open_entry, *arguments)
            finally:
                self.reading_bytes -= header.num_bytes
        except UnusableEntry as found:
            if found.is_ours:
                await self._server.delete(name)
            raise
        self.pace.took(header.num_bytes, self._clock() - now_s)
        self.counters.read_bytes += header.num_bytes
        return item

    async def _look_at_heads(self, names: Sequence[bytes], keys: Sequence[bytes]) -> Mapping[bytes, Grid]:
        """Raises ServerFailed. An entry that is none of ours is as good as absent, and deleted by ``get``."""
        grids: dict[bytes, Grid] = {}
        for key, head in zip(keys, await self._server.read_heads(names, HEADER_BYTES), strict=True):
            with suppress(UnusableEntry):
                if head:
                    header = read_header(head)
                    header.check_layout(self._layout)
                    grids[key] = header.grid
        return grids

    # -- writes ----------------------------------------------------------------------------------------

    def put(self, namespace: str, held: Held) -> None:
        """See ``SharedTier``."""
        limits, num_bytes = self.limits, held.item.spec.num_bytes
        refusal = None
        if namespace in limits.excluded:
            refusal = "excluded"
        elif num_bytes > limits.max_value_bytes:
            refusal = "oversized"
        elif self._stopped:
            refusal = "stopped"
        elif self.looks.state is BreakerState.OPEN or self.writes.state is BreakerState.OPEN:
            refusal = "refused"
        elif self.queued_bytes + num_bytes > limits.max_queued_bytes:
            refusal = "queue"
        if refusal is not None:
            self.counters.writes[refusal] += 1
            held.drop()
            return
        self.queued_bytes += num_bytes
        self._queue.append((namespace, held))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        """Until the queue is empty."""
        try:
            while self._queue:
                namespace, held = self._queue.popleft()
                outcome = "stopped"
                try:
                    outcome = await self._write(namespace, held)
                finally:
                    self.queued_bytes -= held.item.spec.num_bytes
                    self.counters.writes[outcome] += 1
        finally:
            self._writer = None

    async def _write(self, namespace: str, held: Held) -> str:
        """How it ended. Drops what is held."""
        call = self.writes.enter()
        if call is None:
            held.drop()
            return "refused"
        try:
            held = await self._store.placed(held, namespace, "host")
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._send(namespace, held.item)
            call.succeeded()
        except ServerRefused as refusal:
            self._note_failure(call.failed, self.writes, str(refusal))
            return "full"
        except TimeoutError:
            self._note_failure(call.failed, self.writes, "timeout")
            return "timeout"
        except ServerFailed as failure:
            self._note_failure(call.failed, self.writes, str(failure))
            return "failed"
        except Exception:  # a defect of ours ends neither the writer nor the item
            log.exception("rows could not be written to the shared tier")
            return "failed"
        else:
            self.counters.written_bytes += held.item.spec.num_bytes
            return "stored"
        finally:
            call.abandoned()
            held.drop()

    async def _send(self, namespace: str, item: EncodedItem) -> None:
        name = self._seal.name(namespace, item.key)
        arguments = self._seal, name, item, int(self._wall_clock() * 1e3)
        hashing = asyncio.get_running_loop().run_in_executor(self._workers, entry_header, *arguments)
        try:
            header = await asyncio.shield(hashing)
        except asyncio.CancelledError:
            await asyncio.wait([hashing])  # which reads memory that would be given back
            raise
        await self._server.write(name, [header, rows_view(item.rows)], int(self.limits.ttl_s * 1e3))

    # -- life ------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """See ``SharedTier``."""
        if self._stopped:
            return
        self._stopped = True
        waiting, self._queue = self._queue, deque()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
            self._writer = None
        for _, held in waiting:
            self.queued_bytes -= held.item.spec.num_bytes
            self.counters.writes["stopped"] += 1
            held.drop()
        with suppress(ServerFailed):
            await self._server.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is counted is there; idle, all of it is zero."""
        assert self.queued_bytes >= sum(held.item.spec.num_bytes for _, held in self._queue)
        if self._writer is None and not self._num_looks:
            assert self.queued_bytes == self.reading_bytes == 0

    def _note_failure(self, end: Callable[[], None], breaker: CircuitBreaker, reason: str) -> None:
        """One line when it opens, none while it stays so."""
        before = breaker.num_opened
        end()
        if breaker.num_opened > before:
            what = "looks" if breaker is self.looks else "writes"
            log.warning("the shared tier is left alone for now", what=what, reason=reason)
