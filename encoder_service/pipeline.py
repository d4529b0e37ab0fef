"""One item from request to result, top to bottom. Read this first.

Owns the order of things: identity, lookup before decode, single-flight, admission, ingest, the device,
the store. Knows nothing of gRPC. Runs on one event loop; hashing of large contents, decoding and resizing
run on worker threads; the device has threads of its own.

An encode in progress is a *flight* (``flights.py``): callers who ask for its key meanwhile join it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from encoder_service import traces
from encoder_service.clip_run import ClipRun, RowsAhead
from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import (
    DeviceFault,
    Draining,
    InternalError,
    UnknownKey,
    VisionEncoderError,
)
from encoder_service.flights import Flight, Flights
from encoder_service.ingest import identity
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest_run import IngestRun
from encoder_service.load import DeviceLoad
from encoder_service.metrics import Metrics
from encoder_service.scheduler.admission import Admission, UnreadBytes
from encoder_service.store.embedding_store import Held, RowStore, Tier
from encoder_service.store.shared_tier import SharedTier
from encoder_service.store.tiers import TieredStore, cache_tier
from encoder_service.tower_run import TowerRun
from encoder_service.towers.precision import AS_DTYPE, Precision
from encoder_service.towers.tower import Tower
from encoder_service.types import (
    CacheTier,
    DigestOnly,
    EncodedFile,
    EncodedItem,
    FrameArray,
    Grid,
    Item,
    Modality,
    StageTimings,
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
    were there, in the pipeline's clock. ahead: of a clip, how its rows come into encoded's."""

    encoded: EncodedItem
    tier: CacheTier
    timings: StageTimings
    held: Held | None = None
    ready_s: float = 0.0
    ahead: RowsAhead | None = None

    def release(self) -> None:
        """The rows were delivered, or will not be. Twice is once."""
        if self.held is not None:
            self.held.drop()
        if self.ahead is not None:
            self.ahead.release()


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
    where other replicas' rows are looked for before an encode. max_clip_patches, clip_piece_patches: see
    ``ClipRun``.
    """

    model: ServedModel
    store: RowStore
    admission: Admission
    engine: DeviceEngine
    workers: Executor
    metrics: Metrics
    max_patches_per_item: int
    undelivered: UnreadBytes = field(default_factory=lambda: UnreadBytes(1 << 30))
    shared_tier: SharedTier | None = None
    max_clip_patches: int = 262_144
    clip_piece_patches: int = 8192
    clock: Callable[[], float] = time.monotonic
    _draining: bool = False

    def __post_init__(self) -> None:
        self.flights = Flights(self.clock, self._observe)
        graphs = self.engine.graphs
        self.load = DeviceLoad(self.engine.counters, None if graphs is None else graphs.ladder)
        if isinstance(self.store, TieredStore):  # its copies may be the first to find a fault
            self.store.on_copy_error = self.engine.report
        tower, preprocessor = self.model.tower, self.model.preprocessor
        self._dtype = tower.dtype  # a tower looks for it in its parameters
        self._run = TowerRun(
            self.engine,
            self.store,
            self.workers,
            tower,
            self.clock,
            asyncio.get_running_loop(),
            self.shared_tier,
        )
        self._ingest = IngestRun(
            preprocessor,
            tower,
            self.load,
            self.workers,
            self.max_patches_per_item,
            self.clock,
        )
        self._clips = ClipRun(
            self._run, preprocessor, self.load, self.max_clip_patches, self.clip_piece_patches
        )

    # -- what the wire calls ---------------------------------------------------------------------------

    async def encode(
        self,
        item: Item,
        *,
        namespace: str = "",
        deadline_s: float | None = None,
        rows_ahead: bool = False,
    ) -> Delivered:
        """An item's rows, from the store, from a flight that is under way, or encoded now. The caller
        releases what it is given. rows_ahead: it reads the item, a clip, as its rows come.

        Raises any VisionEncoderError; a failure concerns this item alone.
        """
        started_s = self.clock()
        digest, key = await self._identify(item, namespace)
        identify_ms = (self.clock() - started_s) * 1e3

        held = self.store.hold(namespace, key)
        if held is not None:
            timings = StageTimings(identify_ms=identify_ms)
            return self._delivered(held, cache_tier(held), timings, started_s)

        while True:
            flight, joined = self._board(item, digest, key, namespace, False, deadline_s)
            waiting = self.flights.wait(flight, deadline_s)
            flight.wants_rows_ahead |= rows_ahead
            try:
                found: Held | RowsAhead = await (RowsAhead.of(flight, waiting) if rows_ahead else waiting)
                break
            except UnknownKey:
                if not joined or isinstance(item.content, DigestOnly):
                    raise
                await asyncio.sleep(0)  # it was another's, who had no content; till all of them know
        tier = CacheTier.IN_FLIGHT if joined else flight.tier
        return self._delivered(found, tier, flight.timings.identified_in(identify_ms), started_s)

    async def prefetch(self, item: Item, *, namespace: str = "") -> Announced:
        """Starts an encode that no caller has to wait for. Returns once the item is identified, its grid
        known and admitted. Raises as ``encode`` does, as far as the failure shows that early."""
        digest, key = await self._identify(item, namespace)
        resident = self.store.get(namespace, key)
        if resident is not None:
            return Announced(key, digest, resident.grid, resident.spec.num_rows, True)
        while True:
            flight, joined = self._board(item, digest, key, namespace, True, None)
            flight.held = True
            try:
                grid = await asyncio.shield(flight.announced)
                break
            except UnknownKey:
                if not joined or isinstance(item.content, DigestOnly):
                    raise
                await asyncio.sleep(0)
        return Announced(key, digest, grid, flight.num_rows or self.model.tower.num_rows(grid), False)

    async def fetch(self, key: bytes, *, namespace: str = "", deadline_s: float | None = None) -> Delivered:
        """Rows by key; waits for a flight. The caller releases what it is given.
        Raises InvalidDigest, UnknownKey, or the flight's failure."""
        started_s = self.clock()
        identity.check_digest(key, "key")
        held = self.store.hold(namespace, key)
        if held is not None:
            return self._delivered(held, cache_tier(held), StageTimings(), started_s)
        flight = self.flights.join(namespace, key, False, deadline_s)
        joined = flight is not None
        if flight is None:
            flight = self._seek(namespace, key, b"", False, deadline_s)
        held = await self.flights.wait(flight, deadline_s)
        tier = CacheTier.IN_FLIGHT if joined else flight.tier
        return self._delivered(held, tier, replace(flight.timings), started_s)

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

    async def lookup_shared(
        self, keys: Sequence[bytes], *, namespace: str = "", deadline_s: float | None = None
    ) -> Mapping[bytes, Grid]:
        """Those of the keys that lie in the tier that replicas share, where there is one that answers, with
        the grids that are told there. One look for all of them; takes half of the time at most."""
        return await self._run.grids(namespace, keys, deadline_s)

    async def drain(self, grace_s: float) -> bool:
        """Refuses new encodes and waits for those under way. False when some outlived the grace."""
        self._draining = True
        return await self.flights.drain(grace_s)

    # -- identity --------------------------------------------------------------------------------------

    async def _identify(self, item: Item, namespace: str) -> tuple[bytes, bytes]:
        """The item's content digest and embedding key."""
        self.model.preprocessor.check_options(item.modality, item.options)
        size = identity.content_bytes(item)
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
            dtype=self._dtype,
        )
        return digest, key

    def _board(
        self,
        item: Item,
        digest: bytes,
        key: bytes,
        namespace: str,
        is_prefetch: bool,
        deadline_s: float | None,
    ) -> tuple[Flight, bool]:
        """The flight for a key, and whether it was under way. No await between look and start, so that one
        key never flies twice."""
        flight = self.flights.join(namespace, key, is_prefetch, deadline_s)
        if flight is not None:
            return flight, True
        if isinstance(item.content, DigestOnly):
            return self._seek(namespace, key, digest, is_prefetch, deadline_s), False
        if self._draining:
            raise Draining("the service is stopping and takes no new work")
        if self.engine.fault is not None:
            raise DeviceFault(self.engine.fault.message)
        self.undelivered.check_room()
        flight = self.flights.start(
            namespace, key, digest, is_prefetch, deadline_s, lambda flight: self._fly(flight, item)
        )
        return flight, False

    def _seek(
        self, namespace: str, key: bytes, digest: bytes, is_prefetch: bool, deadline_s: float | None
    ) -> Flight:
        """The flight of a key whose content nobody has sent, which looks into the tier that replicas share.
        Raises UnknownKey where there is none to look into, or the service is leaving."""
        if self.shared_tier is None or self._draining or self.engine.fault is not None:
            raise unknown(key)
        self.undelivered.check_room()
        return self.flights.start(namespace, key, digest, is_prefetch, deadline_s, self._fly_unsent)

    # -- a flight --------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, item: Item) -> Held:
        """Admission, ingest, device, store; after the first the store at once for rows of another replica."""
        permit = self.admission.acquire(identity.content_bytes(item))
        started_s = self.clock()
        try:
            if (found := await self._run.find(flight)) is not None:
                return found
            if item.modality is Modality.VIDEO and isinstance(item.content, EncodedFile | FrameArray):
                return await self._clips.run(flight, item.content, item.options, permit)
            held = await self._run.run(flight, *await self._ingest.admitted(flight, item, permit))
            self._run.share(flight, held)
            traces.add_stages(flight.timings, started_s, flight.queued_s, self.clock())
            return held
        except VisionEncoderError:
            raise
        except Exception as error:
            log.exception("item failed by a defect", key=flight.key.hex())
            raise InternalError(f"{type(error).__name__}: {error}") from error
        finally:
            self.load.remove(flight.ticket)
            permit.release()

    async def _fly_unsent(self, flight: Flight) -> Held:
        """A flight's whole way without content. Raises UnknownKey."""
        found = await self._run.find(flight)
        if found is None:
            raise unknown(flight.key)
        return found

    # -- small things ----------------------------------------------------------------------------------

    def _delivered(
        self, held: Held | RowsAhead, tier: CacheTier, timings: StageTimings, started_s: float
    ) -> Delivered:
        encoded = held.item
        ready_s = self.clock()
        timings.total_ms = (ready_s - started_s) * 1e3
        metrics = self.metrics
        metrics.count(metrics.items, tier.value)
        metrics.rows_bytes.inc(encoded.spec.num_bytes)
        # The stages of the flight are observed once, by the flight: those who joined it did not pass them.
        if timings.identify_ms:
            metrics.stage_seconds.observe("identify", timings.identify_ms / 1e3)
        metrics.stage_seconds.observe("total", timings.total_ms / 1e3)
        if isinstance(held, RowsAhead):
            return Delivered(encoded, tier, timings, None, ready_s, held)
        return Delivered(encoded, tier, timings, held, ready_s)

    def _observe(self, timings: StageTimings) -> None:
        for name, milliseconds in timings.as_mapping().items():
            if milliseconds:  # else a stage that this item did not pass
                self.metrics.stage_seconds.observe(name[: -len("_ms")], milliseconds / 1e3)

    async def _on_worker(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)


def unknown(key: bytes) -> UnknownKey:
    text = f"key {key.hex()} is neither held nor being encoded, and no content was sent"
    return UnknownKey(text, key=key.hex())
