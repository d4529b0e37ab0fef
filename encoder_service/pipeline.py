"""One item from request to result, top to bottom. Read this first.

Owns the order of things: identity, lookup before decode, single-flight, admission, ingest, the device,
the store. Knows nothing of gRPC. Runs on one event loop; hashing of large contents, decoding and resizing
run on worker threads; the device has a thread of its own.

An encode in progress is a *flight*. Callers join it; it is cancelled when the last has left, unless a
prefetch holds it. Its failure is told to everyone on board and is not remembered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceFault,
    Draining,
    ImageTooLarge,
    InternalError,
    UnknownKey,
    UnsupportedContent,
    VisionEncoderError,
)
from encoder_service.ingest import identity
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.metrics import Metrics
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.scheduler.planner import Ticket
from encoder_service.store.embedding_store import EmbeddingStore
from encoder_service.towers.tower import Tower
from encoder_service.types import (
    CacheTier,
    DigestOnly,
    EncodedFile,
    EncodedItem,
    Grid,
    Item,
    Modality,
    PixelValues,
    StageTimings,
    TowerItem,
)

log = structlog.get_logger(__name__)
Result = TypeVar("Result")

# Content below this is hashed on the event loop: a thread hop costs more than the hash.
HASH_INLINE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ServedModel:
    """The one model of this process."""

    name: str
    family: str
    fingerprint: bytes
    tower: Tower
    preprocessor: Preprocessor


@dataclass(frozen=True)
class Delivered:
    """One item's rows as a caller gets them."""

    encoded: EncodedItem
    tier: CacheTier
    timings: StageTimings


@dataclass(frozen=True)
class Announced:
    """What is known of a prefetched item at once."""

    key: bytes
    content_digest: bytes
    grid: Grid
    num_rows: int
    resident: bool


@dataclass(eq=False)
class Flight:
    """One encode in progress and who waits for it."""

    key: bytes
    content_digest: bytes
    namespace: str
    ticket: Ticket
    timings: StageTimings
    announced: asyncio.Future[Grid]
    task: asyncio.Task[EncodedItem] | None = None
    num_waiting: int = 0
    held: bool = False


@dataclass
class PipelineCounters:
    flights: int = 0
    joined: int = 0
    abandoned: int = 0


@dataclass
class Pipeline:
    """The service without its wire. All methods run on the event loop that made it.

    clock: monotonic seconds; deadlines are in it. max_patches_per_item: the largest item taken.
    """

    model: ServedModel
    store: EmbeddingStore
    admission: Admission
    engine: DeviceEngine
    workers: Executor
    metrics: Metrics
    max_patches_per_item: int
    clock: Callable[[], float] = time.monotonic
    counters: PipelineCounters = field(default_factory=PipelineCounters)
    _flights: dict[tuple[str, bytes], Flight] = field(default_factory=dict)
    _draining: bool = False

    # -- what the wire calls ---------------------------------------------------------------------------

    async def encode(
        self, item: Item, *, namespace: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> Delivered:
        """An item's rows, from the store, from a flight that is under way, or encoded now.

        Raises any VisionEncoderError; a failure concerns this item alone.
        """
        started_s = self.clock()
        digest, key = await self._identify(item, namespace)
        identify_ms = (self.clock() - started_s) * 1e3

        resident = self.store.get(namespace, key)
        if resident is not None:
            timings = StageTimings(identify_ms=identify_ms)
            return self._delivered(resident, CacheTier.HOST, timings, started_s)

        flight, tier = self._board(item, digest, key, namespace, priority, deadline_s)
        encoded = await self._wait(flight, deadline_s)
        return self._delivered(encoded, tier, replace(flight.timings, identify_ms=identify_ms), started_s)

    async def prefetch(self, item: Item, *, namespace: str = "", priority: int = 0) -> Announced:
        """Starts an encode that no caller has to wait for. Returns once the item is identified, its grid
        known and admitted. Raises as ``encode`` does, as far as the failure shows that early."""
        digest, key = await self._identify(item, namespace)
        resident = self.store.get(namespace, key)
        if resident is not None:
            return Announced(key, digest, resident.grid, resident.spec.num_rows, True)
        flight, _ = self._board(item, digest, key, namespace, priority, None)
        flight.held = True
        grid = await asyncio.shield(flight.announced)
        return Announced(key, digest, grid, self.model.tower.num_rows(grid), False)

    async def fetch(self, key: bytes, *, namespace: str = "", deadline_s: float | None = None) -> Delivered:
        """Rows by key; waits for a flight.
        Raises InvalidDigest, UnknownKey, or the flight's failure."""
        started_s = self.clock()
        identity.check_digest(key, "key")
        resident = self.store.get(namespace, key)
        if resident is not None:
            return self._delivered(resident, CacheTier.HOST, StageTimings(), started_s)
        flight = self._flights.get((namespace, key))
        if flight is None:
            raise UnknownKey(f"key {key.hex()} is neither held nor being encoded", key=key.hex())
        self.counters.joined += 1
        encoded = await self._wait(flight, deadline_s)
        return self._delivered(encoded, CacheTier.IN_FLIGHT, flight.timings, started_s)

    def lookup(self, key: bytes, *, namespace: str = "") -> EncodedItem | Flight | None:
        """What is held or under way for a key. Raises InvalidDigest."""
        identity.check_digest(key, "key")
        return self.store.peek(namespace, key) or self._flights.get((namespace, key))

    @property
    def num_flights(self) -> int:
        return len(self._flights)

    async def drain(self, grace_s: float) -> bool:
        """Refuses new encodes and waits for those under way. False when some outlived the grace."""
        self._draining = True
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=grace_s)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        return not pending

    # -- identity --------------------------------------------------------------------------------------

    async def _identify(self, item: Item, namespace: str) -> tuple[bytes, bytes]:
        """The item's content digest and embedding key."""
        self.model.preprocessor.check_options(item.modality, item.options)
        size = content_bytes(item)
        if item.content_digest is None and size > HASH_INLINE_BYTES:
            digest = await self._on_worker(identity.content_digest, item)
        else:
            digest = identity.content_digest(item)
        key = identity.embedding_key(
            item,
            digest,
            namespace=namespace,
            model_fingerprint=self.model.fingerprint,
            preprocess_fingerprint=self.model.preprocessor.fingerprint,
            dtype=self.model.tower.dtype,
        )
        return digest, key

    # -- single-flight ---------------------------------------------------------------------------------

    def _board(
        self, item: Item, digest: bytes, key: bytes, namespace: str, priority: int, deadline_s: float | None
    ) -> tuple[Flight, CacheTier]:
        """The flight for a key: the one under way, or a new one. No await between the look and the start,
        so that one key never flies twice."""
        flight = self._flights.get((namespace, key))
        if flight is not None:
            self.counters.joined += 1
            flight.ticket.priority = max(flight.ticket.priority, priority)
            flight.ticket.deadline_s = later(flight.ticket.deadline_s, deadline_s)
            return flight, CacheTier.IN_FLIGHT
        if isinstance(item.content, DigestOnly):
            raise UnknownKey(f"no content was sent and key {key.hex()} is not held", key=key.hex())
        if self._draining:
            raise Draining("the service is stopping and takes no new work")
        if self.engine.fault is not None:
            raise DeviceFault(self.engine.fault.message)

        loop = asyncio.get_running_loop()
        flight = Flight(
            key, digest, namespace, Ticket(0, priority, deadline_s), StageTimings(), loop.create_future()
        )
        flight.task = loop.create_task(self._fly(flight, item))
        self._flights[namespace, key] = flight
        self.counters.flights += 1
        flight.task.add_done_callback(lambda task: self._land(flight, task))
        return flight, CacheTier.MISS

    def _land(self, flight: Flight, task: asyncio.Task[EncodedItem]) -> None:
        """A flight's last act: it leaves the table, and whoever waits for its grid learns why it failed."""
        if self._flights.get((flight.namespace, flight.key)) is flight:
            del self._flights[flight.namespace, flight.key]
        error: BaseException | None
        if task.cancelled():
            self.counters.abandoned += 1
            error = Cancelled("every caller left before the item was encoded")
        else:
            error = task.exception()
        if not flight.announced.done():
            assert error is not None
            flight.announced.set_exception(error)
        # Read once, so that a flight nobody waits for does not end in an "exception was never retrieved".
        if not flight.announced.cancelled():
            flight.announced.exception()

    async def _wait(self, flight: Flight, deadline_s: float | None) -> EncodedItem:
        """The flight's item. A caller that leaves (cancellation, deadline) leaves the flight to the others,
        and ends it when it was the last and nobody holds it."""
        assert flight.task is not None
        flight.num_waiting += 1
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - self.clock())
            done, _ = await asyncio.wait([flight.task], timeout=timeout_s)
            if not done:
                raise DeadlineExceeded("the deadline passed before the item was encoded")
            if flight.task.cancelled():
                raise Cancelled("the service stopped before the item was encoded")
            return flight.task.result()
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.held and not flight.task.done():
                flight.ticket.cancelled = True
                flight.task.cancel()
                # A caller that arrives before the task has ended must not board a flight that is over.
                self._flights.pop((flight.namespace, flight.key), None)

    # -- a flight --------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, item: Item) -> EncodedItem:
        """Admission, ingest, device, store."""
        permit = self.admission.acquire(content_bytes(item))
        try:
            tower_item = await self._ingest(flight, item, permit)
            encoded = await self._run_tower(flight, tower_item)
            stored_s = self.clock()
            self.store.put(flight.namespace, encoded)
            flight.timings.store_ms = (self.clock() - stored_s) * 1e3
            return encoded
        except VisionEncoderError:
            raise
        except Exception as error:
            log.exception("item failed by a defect", key=flight.key.hex())
            raise InternalError(f"{type(error).__name__}: {error}") from error
        finally:
            permit.release()

    async def _ingest(self, flight: Flight, item: Item, permit: Permit) -> TowerItem:
        """The item's pixels, admitted by their patches before any is decoded."""
        preprocessor = self.model.preprocessor
        started_s = self.clock()
        match item.content:
            case EncodedFile(data):
                if item.modality is not Modality.IMAGE:
                    raise UnsupportedContent("encoded clips are not taken; send a clip as pixel tensors")
                grid = await self._on_worker(preprocessor.probe_image, data, item.options)
                self._admit(flight, grid, permit)
                flight.timings.admit_ms = (self.clock() - started_s) * 1e3
                frames, decode_ms, resize_ms = await self._on_worker(
                    preprocessor.load_image, data, item.options
                )
                flight.timings.decode_ms = decode_ms
                flight.timings.resize_ms = resize_ms
                return frames
            case PixelValues():
                self.model.tower.check_grid(item.content.grid)
                self._admit(flight, item.content.grid, permit)
                flight.timings.admit_ms = (self.clock() - started_s) * 1e3
                checked_s = self.clock()
                patches = await self._on_worker(preprocessor.check_pixels, item.content)
                flight.timings.decode_ms = (self.clock() - checked_s) * 1e3
                return patches
            case DigestOnly():
                raise UnknownKey(f"no content was sent and key {flight.key.hex()} is not held")

    def _admit(self, flight: Flight, grid: Grid, permit: Permit) -> None:
        """Takes room for the item's patches and tells its grid. Raises ImageTooLarge, QueueFull."""
        num_patches = grid.num_patches
        if num_patches > self.max_patches_per_item:
            raise ImageTooLarge(
                f"the item has {num_patches} patches (grid {tuple(grid)}), at most "
                f"{self.max_patches_per_item} are taken",
                num_patches=num_patches,
                max_patches=self.max_patches_per_item,
            )
        permit.add_patches(num_patches)
        flight.ticket.num_patches = num_patches
        flight.announced.set_result(grid)

    async def _run_tower(self, flight: Flight, tower_item: TowerItem) -> EncodedItem:
        """The item's rows, through the device's queue."""
        queued_s = self.clock()
        future = self.engine.submit(tower_item, flight.ticket)
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            flight.ticket.cancelled = True
            raise
        flight.timings.queue_ms = (result.started_s - queued_s) * 1e3
        flight.timings.tower_ms = result.tower_ms
        return EncodedItem(
            flight.key,
            flight.content_digest,
            tower_item.grid,
            result.rows,
            self.model.tower.num_deepstack_levels,
        )

    # -- small things ----------------------------------------------------------------------------------

    def _delivered(
        self, encoded: EncodedItem, tier: CacheTier, timings: StageTimings, started_s: float
    ) -> Delivered:
        timings = replace(timings, total_ms=(self.clock() - started_s) * 1e3)
        self.metrics.items.labels(tier.value).inc()
        self.metrics.rows_bytes.inc(encoded.spec.num_bytes)
        for name, milliseconds in timings.as_mapping().items():
            if milliseconds == 0.0:
                continue  # a stage that this item did not pass
            self.metrics.stage_seconds.labels(name.removesuffix("_ms")).observe(milliseconds / 1e3)
        return Delivered(encoded, tier, timings)

    async def _on_worker(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)


def content_bytes(item: Item) -> int:
    """Bytes of content that an item holds while it waits."""
    match item.content:
        case EncodedFile(data):
            return len(data)
        case PixelValues(pixel_values):
            return pixel_values.nbytes
        case DigestOnly():
            return 0


def later(first_s: float | None, second_s: float | None) -> float | None:
    """The later of two deadlines, where None never comes."""
    return None if first_s is None or second_s is None else max(first_s, second_s)
