"""One item from request to result, top to bottom. Read this first.

Owns the order of things: identity, lookup before decode, single-flight, admission, ingest, the device,
the store. Knows nothing of gRPC. Runs on one event loop; hashing of large contents, decoding and resizing
run on worker threads; the device has threads of its own.

An encode in progress is a *flight* (``flights.py``): callers who ask for its key meanwhile join it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from encoder_service import traces
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.patches import looked_through
from encoder_service.errors import (
    DeviceFault,
    Draining,
    ImageTooLarge,
    InternalError,
    UndecodableImage,
    UnknownKey,
    UnsupportedContent,
    VisionEncoderError,
)
from encoder_service.flights import Flight, Flights
from encoder_service.ingest import identity
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.load import DeviceLoad
from encoder_service.metrics import Metrics
from encoder_service.scheduler.admission import Admission, Permit, Undelivered
from encoder_service.store.embedding_store import Held, RowStore, Tier
from encoder_service.store.shared_tier import SharedTier
from encoder_service.store.tiers import TieredStore
from encoder_service.tower_run import TowerRun
from encoder_service.towers.precision import AS_DTYPE, Precision
from encoder_service.towers.tower import Tower
from encoder_service.types import (
    CacheTier,
    DigestOnly,
    EncodedFile,
    EncodedItem,
    FrameItem,
    Grid,
    Item,
    Modality,
    PatchItem,
    PixelValues,
    PreprocessOptions,
    StageTimings,
    TowerItem,
)

log = structlog.get_logger(__name__)
Result = TypeVar("Result")

# Content below this is hashed on the event loop: a thread hop costs more than the hash.
HASH_INLINE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ServedModel:
    """The one model of this process. fingerprint: of the weights under the precision that serves them."""

    name: str
    family: str
    fingerprint: bytes
    tower: Tower
    preprocessor: Preprocessor
    precision: Precision = AS_DTYPE


@dataclass(frozen=True)
class Delivered:
    """One item's rows as a caller gets them. held: keeps them in place until ``release``. ready_s: when they
    were there, in the pipeline's clock."""

    encoded: EncodedItem
    tier: CacheTier
    timings: StageTimings
    held: Held | None = None
    ready_s: float = 0.0

    def release(self) -> None:
        """The rows were delivered, or will not be. Twice is once."""
        if self.held is not None:
            self.held.drop()


@dataclass(frozen=True)
class Announced:
    """What is known of a prefetched item at once."""

    key: bytes
    content_digest: bytes
    grid: Grid
    num_rows: int
    resident: bool


@dataclass
class Pipeline:
    """The service without its wire. All methods run on the event loop that made it.

    clock: monotonic seconds; deadlines are in it. max_patches_per_item: the largest item taken. shared_tier:
    where other replicas' rows are looked for before an encode.
    """

    model: ServedModel
    store: RowStore
    admission: Admission
    engine: DeviceEngine
    workers: Executor
    metrics: Metrics
    max_patches_per_item: int
    undelivered: Undelivered = field(default_factory=lambda: Undelivered(1 << 30))
    shared_tier: SharedTier | None = None
    clock: Callable[[], float] = time.monotonic
    _draining: bool = False

    def __post_init__(self) -> None:
        self.flights = Flights(self.clock)
        graphs = self.engine.graphs
        self.load = DeviceLoad(self.engine.counters, None if graphs is None else graphs.ladder)
        if isinstance(self.store, TieredStore):  # its copies may be the first to find a fault
            self.store.on_copy_error = self.engine.report
        self._run = TowerRun(
            self.engine, self.store, self.workers, self.model.tower, self.clock, self.shared_tier
        )

    # -- what the wire calls ---------------------------------------------------------------------------

    async def encode(
        self, item: Item, *, namespace: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> Delivered:
        """An item's rows, from the store, from a flight that is under way, or encoded now. The caller
        releases what it is given.

        Raises any VisionEncoderError; a failure concerns this item alone.
        """
        started_s = self.clock()
        digest, key = await self._identify(item, namespace)
        identify_ms = (self.clock() - started_s) * 1e3

        held = self.store.hold(namespace, key)
        if held is not None:
            timings = StageTimings(identify_ms=identify_ms)
            return self._delivered(held, cache_tier(held), timings, started_s)

        flight, joined = self._board(item, digest, key, namespace, priority, deadline_s)
        held = await self.flights.wait(flight, deadline_s)
        tier = CacheTier.IN_FLIGHT if joined else flight.tier
        return self._delivered(held, tier, replace(flight.timings, identify_ms=identify_ms), started_s)

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
        """Rows by key; waits for a flight. The caller releases what it is given.
        Raises InvalidDigest, UnknownKey, or the flight's failure."""
        started_s = self.clock()
        identity.check_digest(key, "key")
        held = self.store.hold(namespace, key)
        if held is not None:
            return self._delivered(held, cache_tier(held), StageTimings(), started_s)
        flight = self.flights.join(namespace, key, 0, deadline_s)
        if flight is None:
            raise UnknownKey(f"key {key.hex()} is neither held nor being encoded", key=key.hex())
        held = await self.flights.wait(flight, deadline_s)
        return self._delivered(held, CacheTier.IN_FLIGHT, flight.timings, started_s)

    def found(self, held: Held, started_s: float) -> Delivered:
        """Rows that their caller has got hold of in the store, which count as delivered by it."""
        return self._delivered(held, cache_tier(held), StageTimings(), started_s)

    async def placed(self, delivered: Delivered, namespace: str, tier: Tier) -> Delivered:
        """The same rows where their reader can read them, as far as there is room: see ``RowStore.placed``.
        The caller releases what it is given in place of ``delivered``, or ``delivered`` when this raises."""
        if delivered.held is None:
            return delivered
        try:
            held = await self.store.placed(delivered.held, namespace, tier)
        except Exception as error:
            if self.engine.fault is not None:
                raise DeviceFault(self.engine.fault.message) from error
            raise
        if held is delivered.held:
            return delivered
        return replace(delivered, encoded=held.item, held=held)

    def lookup(self, key: bytes, *, namespace: str = "") -> EncodedItem | Flight | None:
        """What is held or under way for a key. Raises InvalidDigest."""
        identity.check_digest(key, "key")
        return self.store.peek(namespace, key) or self.flights.get(namespace, key)

    async def drain(self, grace_s: float) -> bool:
        """Refuses new encodes and waits for those under way. False when some outlived the grace."""
        self._draining = True
        return await self.flights.drain(grace_s)

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

    def _board(
        self, item: Item, digest: bytes, key: bytes, namespace: str, priority: int, deadline_s: float | None
    ) -> tuple[Flight, bool]:
        """The flight for a key, and whether it was under way. No await between look and start, so that one
        key never flies twice."""
        flight = self.flights.join(namespace, key, priority, deadline_s)
        if flight is not None:
            return flight, True
        if isinstance(item.content, DigestOnly):
            raise UnknownKey(f"no content was sent and key {key.hex()} is not held", key=key.hex())
        if self._draining:
            raise Draining("the service is stopping and takes no new work")
        if self.engine.fault is not None:
            raise DeviceFault(self.engine.fault.message)
        self.undelivered.check_room()
        flight = self.flights.start(
            namespace, key, digest, priority, deadline_s, lambda flight: self._fly(flight, item)
        )
        return flight, False

    # -- a flight --------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, item: Item) -> Held:
        """Admission, ingest, device, store; after the first the store at once for rows of another replica."""
        permit = self.admission.acquire(content_bytes(item))
        started_s = self.clock()
        try:
            if (found := await self._run.find(flight)) is not None:
                self._observe(flight.timings)
                return found
            tower_item = await self._ingest(flight, item, permit)
            ingested_s = self.clock()
            held = await self._run.run(flight, tower_item)
            self._run.share(flight, held)
            self._observe(flight.timings)
            traces.add_stages(flight.timings, started_s, ingested_s, self.clock())
            return held
        except VisionEncoderError:
            raise
        except Exception as error:
            log.exception("item failed by a defect", key=flight.key.hex())
            raise InternalError(f"{type(error).__name__}: {error}") from error
        finally:
            self.load.remove(flight.ticket)
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
                frames, decode_ms, resize_ms = await self._on_worker(self._load_image, data, item.options)
                flight.timings.decode_ms = decode_ms
                flight.timings.resize_ms = resize_ms
                if frames.grid != grid:
                    raise UndecodableImage(
                        f"the file's header promises grid {tuple(grid)}, its pixels give {tuple(frames.grid)}"
                    )
                return frames
            case PixelValues():
                self.model.tower.check_grid(item.content.grid)
                self._admit(flight, item.content.grid, permit)
                flight.timings.admit_ms = (self.clock() - started_s) * 1e3
                checked_s = self.clock()
                patches = await self._on_worker(self._check_pixels, item.content)
                flight.timings.decode_ms = (self.clock() - checked_s) * 1e3
                return patches
            case DigestOnly():
                raise UnknownKey(f"no content was sent and key {flight.key.hex()} is not held")

    def _load_image(self, data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
        """On a worker: frames where the device can read them; pinning counts as resizing."""
        frames, decode_ms, resize_ms = self.model.preprocessor.load_image(data, options)
        started_s = self.clock()
        tower = self.model.tower
        ready = pinned(frames, tower.device, tower.dtype)
        if ready is not frames:
            resize_ms += (self.clock() - started_s) * 1e3
        return looked_through(ready, tower), decode_ms, resize_ms

    def _check_pixels(self, pixels: PixelValues) -> PatchItem:
        """On a worker: checked patches where the device can read them."""
        patches = self.model.preprocessor.check_pixels(pixels)
        tower = self.model.tower
        return looked_through(pinned(patches, tower.device, tower.dtype), tower)

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
        flight.ticket.namespace = flight.namespace
        if self.model.tower.merges_time:
            flight.ticket.num_frames = grid.t
        else:
            flight.ticket.num_sequences = grid.t
        self.load.add(flight.ticket)
        flight.announced.set_result(grid)

    # -- small things ----------------------------------------------------------------------------------

    def _delivered(self, held: Held, tier: CacheTier, timings: StageTimings, started_s: float) -> Delivered:
        encoded = held.item
        ready_s = self.clock()
        timings = replace(timings, total_ms=(ready_s - started_s) * 1e3)
        self.metrics.items.labels(tier.value).inc()
        self.metrics.rows_bytes.inc(encoded.spec.num_bytes)
        # The stages of the flight are observed once, by the flight: those who joined it did not pass them.
        self._observe(StageTimings(identify_ms=timings.identify_ms, total_ms=timings.total_ms))
        return Delivered(encoded, tier, timings, held, ready_s)

    def _observe(self, timings: StageTimings) -> None:
        for name, milliseconds in timings.as_mapping().items():
            if milliseconds == 0.0:
                continue  # a stage that this item did not pass
            self.metrics.stage_seconds.labels(name.removesuffix("_ms")).observe(milliseconds / 1e3)

    async def _on_worker(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)


def cache_tier(held: Held) -> CacheTier:
    """Which tier rows that are held were found in."""
    on_device = held.arena is not None and held.arena.geometry.kind == "device"
    return CacheTier.DEVICE if on_device else CacheTier.HOST


def content_bytes(item: Item) -> int:
    """Bytes of content that an item holds while it waits."""
    match item.content:
        case EncodedFile(data):
            return len(data)
        case PixelValues(pixel_values):
            return pixel_values.nbytes
        case DigestOnly():
            return 0
