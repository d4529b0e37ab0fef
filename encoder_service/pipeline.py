"""One item from request to result, top to bottom. Read this first.

Owns the order: identity, lookup before decode, single-flight, admission, decode, device, store. Knows nothing
of gRPC. Used from one event loop. Worker threads hash large contents, open files, decode and resize; the
engine has two threads. A miss runs on the loop, a worker (header), the loop (admission), a worker (pixels),
the engine's threads, and the loop again:

    opened = await open(item)
    admit(opened.grid)
    pixels = await load(opened)
    output = reserve(rows)
    await engine.submit(pixels, output)
    held = commit(output)

An encode in progress is shared by all callers of its key (``inflight``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from encoder_service.clips import ClipEncoder
from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import (
    ClipTooLarge,
    DeviceFault,
    Draining,
    ImageTooLarge,
    InternalError,
    UndecodableImage,
    UnknownKey,
    VisionEncoderError,
)
from encoder_service.inflight import InFlightEncode, InFlightEncodes
from encoder_service.ingest import identity
from encoder_service.ingest.pinned import host_rows, pinned
from encoder_service.ingest.preprocessor import OpenItem, Preprocessor
from encoder_service.ingest.workers import MAX_HASHED_ON_LOOP_BYTES, IngestWorkers
from encoder_service.load import DeviceLoad
from encoder_service.ops import traces
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder
from encoder_service.output import OutputReservation
from encoder_service.scheduler.admission import Admission, Permit, UndeliveredBytes
from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import EmbeddingStore, PinnedRows
from encoder_service.towers.tower import Tower
from encoder_service.types import (
    CacheTier,
    ClipFacts,
    DigestOnly,
    EncodedFile,
    EncodedItem,
    FrameArray,
    Grid,
    Item,
    LoadedPixels,
    Modality,
    PreprocessOptions,
    StageTimings,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The model of this process. fingerprint: of the vision weights and the sizes. folder: its checkpoint."""

    name: str
    family: str
    fingerprint: bytes
    tower: Tower
    preprocessor: Preprocessor
    folder: Path


@dataclass(frozen=True)
class EncodeResult:
    """One item's rows for one caller. held: keeps them in memory until ``release``. ready_s: when they were
    complete, in the pipeline's clock."""

    held: PinnedRows
    tier: CacheTier
    timings: StageTimings
    ready_s: float

    @property
    def encoded(self) -> EncodedItem:
        return self.held.item

    def release(self) -> None:
        """Releases the rows, once they are delivered or will not be. A second call does nothing."""
        self.held.drop()


@dataclass(frozen=True)
class _Request:
    """One caller's item, identified."""

    item: Item
    namespace: str
    holder: Holder
    digest: bytes
    key: bytes
    permit: Permit | None


class Pipeline:
    """The service without its protocols. All methods run on one event loop."""

    def __init__(
        self,
        *,
        model: ServedModel,
        store: EmbeddingStore,
        admission: Admission,
        engine: DeviceEngine,
        workers: IngestWorkers,
        metrics: Metrics,
        max_patches_per_item: int,
        undelivered: UndeliveredBytes | None = None,
        max_clip_patches: int = 262_144,
        clip_piece_patches: int = 8192,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_patches_per_item: of an image or a tensor of patches. max_clip_patches: of a whole clip.
        clip_piece_patches: of a clip's piece, which is encoded at a time. undelivered: no encode starts while
        it is full. clock: monotonic seconds; deadlines and the engine use the same clock."""
        self.model = model
        self.store = store
        self.admission = admission
        self.workers = workers
        self.metrics = metrics
        self.undelivered = UndeliveredBytes(1 << 30) if undelivered is None else undelivered
        self.clock = clock
        self.inflight = InFlightEncodes(clock)
        graphs = engine.graphs
        self.load = DeviceLoad(admission, engine.counters, None if graphs is None else graphs.ladder)
        self._engine = engine
        self._max_patches_per_item = max_patches_per_item
        self._max_clip_patches = max_clip_patches
        self._draining = False
        # Kept here because a tower finds both by a search of its parameters.
        self._device, self._dtype = model.tower.device, model.tower.dtype
        self._clips = ClipEncoder(model.tower, workers, clip_piece_patches, clock)

    # -- what protocols call ---------------------------------------------------------------------------

    async def encode(
        self,
        item: Item,
        *,
        namespace: str = "",
        holder: Holder | None = None,
        permit: Permit | None = None,
        deadline_s: float | None = None,
        is_prefetch: bool = False,
    ) -> EncodeResult:
        """An item's rows: from the store, from an encode in progress, or encoded now. The caller must release
        them. holder: the holder that the work counts as in shared limits; None for the namespace. permit:
        counts the item's content; None if nothing does yet. is_prefetch: the item is queued behind items
        that callers wait for.

        Raises any VisionEncoderError; it concerns this item alone.
        """
        started_s = self.clock()
        holder = holder or holder_of(namespace)
        request = await self._identify(item, namespace, holder, permit)
        key = request.key
        identify_ms = (self.clock() - started_s) * 1e3
        held = self.store.hold(namespace, key)
        if held is not None:
            return self._result(held, CacheTier(held.tier), StageTimings(identify_ms=identify_ms), started_s)
        joined = self.inflight.join(namespace, key, deadline_s, is_prefetch=is_prefetch)
        encode = joined or self._start(request, deadline_s, is_prefetch=is_prefetch)
        held = await self.inflight.wait(encode, deadline_s)
        timings = replace(encode.timings, identify_ms=identify_ms)
        tier = CacheTier.MISS if joined is None else CacheTier.IN_FLIGHT
        return self._result(held, tier, timings, started_s)

    async def prefetch(
        self,
        item: Item,
        *,
        namespace: str = "",
        holder: Holder | None = None,
        permit: Permit | None = None,
    ) -> EncodedItem:
        """Starts an encode that goes on without a caller. Returns once the item is admitted, which is after
        its grid is known. Its rows are a meta tensor, unless the store has them. Raises as ``encode``, but
        only failures until the admission."""
        holder = holder or holder_of(namespace)
        request = await self._identify(item, namespace, holder, permit)
        resident = self.store.peek(namespace, request.key)
        if resident is not None:
            return resident
        joined = self.inflight.join(namespace, request.key, None, is_prefetch=True)
        encode = joined or self._start(request, None, is_prefetch=True)
        return await asyncio.shield(encode.expected)

    async def fetch(
        self, key: bytes, *, namespace: str = "", deadline_s: float | None = None
    ) -> EncodeResult:
        """Rows by key; waits for an encode in progress. The caller must release them. Raises InvalidDigest,
        UnknownKey, or the encode's failure."""
        started_s = self.clock()
        identity.check_digest(key, "key")
        held = self.store.hold(namespace, key)
        if held is not None:
            return self._result(held, CacheTier(held.tier), StageTimings(), started_s)
        encode = self.inflight.join(namespace, key, deadline_s)
        if encode is None:
            raise unknown(key)
        held = await self.inflight.wait(encode, deadline_s)
        return self._result(held, CacheTier.IN_FLIGHT, replace(encode.timings), started_s)

    def lookup(self, key: bytes, *, namespace: str = "") -> EncodedItem | InFlightEncode | None:
        """The stored item of a key, or else its encode in progress. Raises InvalidDigest."""
        identity.check_digest(key, "key")
        return self.store.peek(namespace, key) or self.inflight.get(namespace, key)

    async def ensure_tier(self, delivered: EncodeResult, namespace: str, tier: TierName) -> EncodeResult:
        """The same rows in ``tier``, if it has room. Takes over ``delivered``, even when it raises. Raises as
        ``EmbeddingStore.ensure_tier``, and DeviceFault if a copy has failed because the device has."""
        try:
            held = await self.store.ensure_tier(delivered.held, namespace, tier)
        except Exception:
            self._check_device()
            raise
        return delivered if held is delivered.held else replace(delivered, held=held)

    async def drain(self, grace_s: float) -> bool:
        """Refuses new encodes and waits up to ``grace_s`` for those in progress. Returns False if it had to
        cancel any."""
        self._draining = True
        return await self.inflight.drain(grace_s)

    def _check_device(self) -> None:
        """Raises DeviceFault once the device has failed."""
        if self._engine.fault is not None:
            raise DeviceFault(self._engine.fault.message)

    # -- identity --------------------------------------------------------------------------------------

    async def _identify(self, item: Item, namespace: str, holder: Holder, permit: Permit | None) -> _Request:
        """The item with its content digest and embedding key."""
        preprocessor = self.model.preprocessor
        preprocessor.check_options(item.modality, item.options)
        if item.content_digest is None and identity.content_bytes(item) > MAX_HASHED_ON_LOOP_BYTES:
            digest = await self.workers.run(holder, identity.content_digest, item)
        else:
            digest = identity.content_digest(item)
        key = identity.embedding_key(
            item,
            digest,
            namespace=namespace,
            model_fingerprint=self.model.fingerprint,
            preprocess_fingerprint=preprocessor.fingerprint,
            dtype=self._dtype,
        )
        return _Request(item, namespace, holder, digest, key, permit)

    def _start(self, request: _Request, deadline_s: float | None, *, is_prefetch: bool) -> InFlightEncode:
        """A new encode. Raises UnknownKey, Draining, DeviceFault, QueueFull if it cannot start now."""
        if isinstance(request.item.content, DigestOnly):
            raise unknown(request.key)
        if self._draining:
            raise Draining("the service is stopping and takes no new work")
        self._check_device()
        self.undelivered.check_room(request.holder)
        return self.inflight.start(
            request.namespace,
            request.key,
            request.digest,
            deadline_s,
            lambda encode: self._run(encode, request),
            is_prefetch=is_prefetch,
        )

    # -- one encode ------------------------------------------------------------------------------------

    async def _run(self, encode: InFlightEncode, request: _Request) -> PinnedRows:
        """Admission, decode, device, store."""
        item = request.item
        permit = self.admission.acquire(identity.content_bytes(item), request.holder, request.permit)
        try:
            is_clip = item.modality is Modality.VIDEO
            if is_clip and isinstance(item.content, EncodedFile | FrameArray):
                held = await self._encode_clip(encode, item.content, item.options, permit)
            else:
                held = await self._encode_single(encode, item, permit)
        except VisionEncoderError:
            raise
        except Exception as error:
            log.exception("item failed by a defect", key=encode.key.hex())
            raise InternalError(f"{type(error).__name__}: {error}") from error
        finally:
            permit.release()
        self.metrics.observe_encode(encode.timings)
        return held

    async def _encode_single(self, encode: InFlightEncode, item: Item, permit: Permit) -> PinnedRows:
        """Encodes an image, or patches that the caller made."""
        timings, tower = encode.timings, self.model.tower
        started_s = self.clock()
        opened = await self._open(item, permit.holder)
        grid = opened.grid
        tower.check_grid(grid)
        expected = self._expected_item(encode, grid, tower.num_rows(grid))
        ticket = encode.ticket(grid, merges_time=tower.merges_time)
        self._admit(encode, expected, ticket.seqlen, permit)
        timings.admit_ms = (self.clock() - started_s) * 1e3
        pixels, timings.decode_ms, timings.resize_ms = await self.workers.run(
            permit.holder, self._load, opened, decoded_bytes=opened.decoded_bytes
        )
        with OutputReservation(self.store, self._engine, encode.namespace, expected) as output:
            queued_s = self.clock()
            job = output.submit(pixels, ticket, output.rows)
            del pixels  # only the engine refers to them from here on
            result = await asyncio.wrap_future(job)
            timings.queue_ms = (result.started_s - queued_s) * 1e3
            timings.tower_ms = result.tower_ms
            held = await self._store(encode, output, replace(expected, rows=result.rows))
        traces.add_stages(timings, started_s, queued_s, self.clock())
        return held

    async def _encode_clip(
        self,
        encode: InFlightEncode,
        content: EncodedFile | FrameArray,
        options: PreprocessOptions,
        permit: Permit,
    ) -> PinnedRows:
        tower = self.model.tower
        started_s = self.clock()
        opens = partial(self.model.preprocessor.open_clip, content, options)
        async with self.workers.open_clip(permit.holder, opens) as clip:
            plan = clip.plan
            for grid in set(plan.chunk_grids) or {plan.grid}:
                tower.check_grid(grid)
            seqlen = -(-plan.grid.num_patches // (len(plan.chunk_grids) or plan.grid.t))
            facts = ClipFacts(plan.timestamps_s, plan.chunk_grids)
            num_rows = sum(map(tower.num_rows, plan.chunk_grids or (plan.grid,)))
            expected = self._expected_item(encode, plan.grid, num_rows, facts)
            self._admit(encode, expected, seqlen, permit)
            encode.timings.admit_ms = (self.clock() - started_s) * 1e3
            with OutputReservation(self.store, self._engine, encode.namespace, expected) as output:
                rows = output.rows
                if rows is None:
                    make_rows = partial(host_rows, expected.rows.shape, self._device, self._dtype)
                    rows = await self.workers.run(permit.holder, make_rows)
                await self._clips.encode(encode, clip, output, rows, permit.holder)
                return await self._store(encode, output, replace(expected, rows=rows))

    def _admit(self, encode: InFlightEncode, expected: EncodedItem, seqlen: int, permit: Permit) -> None:
        """Admits all patches of the item, and gives ``expected`` to prefetches that wait for it. seqlen:
        patches of an attention sequence. Raises QueueFull."""
        permit.add_patches(expected.grid.num_patches, seqlen, is_prefetch=encode.is_prefetch)
        encode.expected.set_result(expected)

    def _check_size(self, grid: Grid, *, is_clip: bool) -> None:
        """Raises ImageTooLarge, ClipTooLarge."""
        limit = self._max_clip_patches if is_clip else self._max_patches_per_item
        num_patches = grid.num_patches
        if num_patches > limit:
            error = ClipTooLarge if is_clip else ImageTooLarge
            what, setting = ("clip", "max_clip_patches") if is_clip else ("item", "max_patches_per_item")
            raise error(
                f"the {what} has {num_patches} patches (grid {tuple(grid)}), at most {limit} are taken "
                f"({setting}): send a smaller one{', or lower fps or max_pixels' * is_clip}",
                num_patches=num_patches,
                max_patches=limit,
            )

    async def _open(self, item: Item, holder: Holder) -> OpenItem:
        """Opens the item. Small files are opened on a worker too: a header of 256 KiB can take 100 ms."""
        opens = self.model.preprocessor.open
        if isinstance(item.content, EncodedFile):
            return await self.workers.run(holder, opens, item)
        return opens(item)

    def _load(self, opened: OpenItem) -> LoadedPixels:
        """Runs on a worker: pixels in memory that the device can read. Pinning counts as resizing."""
        loaded = opened.load()
        started_s = self.clock()
        ready = pinned(loaded.item, self._device, self._dtype)
        if ready.grid != opened.grid:
            raise UndecodableImage(
                f"the file's header gives grid {tuple(opened.grid)}, its pixels give {tuple(ready.grid)}"
            )
        pinning_ms = 0.0 if ready is loaded.item else (self.clock() - started_s) * 1e3
        return LoadedPixels(ready, loaded.decode_ms, loaded.resize_ms + pinning_ms)

    def _expected_item(
        self, encode: InFlightEncode, grid: Grid, num_rows: int, clip: ClipFacts | None = None
    ) -> EncodedItem:
        """The item before it is encoded: a meta tensor has the shape and dtype of its rows. Raises
        ImageTooLarge, ClipTooLarge."""
        self._check_size(grid, is_clip=clip is not None)
        tower = self.model.tower
        rows = torch.empty(num_rows, tower.width, dtype=self._dtype, device="meta")
        return EncodedItem(encode.key, encode.content_digest, grid, rows, tower.num_deepstack_levels, clip)

    async def _store(
        self, encode: InFlightEncode, output: OutputReservation, item: EncodedItem
    ) -> PinnedRows:
        """Stores the complete rows, and returns them held for the caller. Where the store has no room, they
        stay in their own memory."""
        started_s = self.clock()
        if output.rows is not None:
            held = output.commit()
        else:
            held = await self.store.insert(encode.namespace, item)
        encode.timings.store_ms = (self.clock() - started_s) * 1e3
        return held

    def _result(
        self, held: PinnedRows, tier: CacheTier, timings: StageTimings, started_s: float
    ) -> EncodeResult:
        ready_s = self.clock()
        timings.total_ms = (ready_s - started_s) * 1e3
        self.metrics.observe_result(tier, held.item.spec.num_bytes, timings)
        return EncodeResult(held, tier, timings, ready_s)


def unknown(key: bytes) -> UnknownKey:
    text = f"key {key.hex()} is neither stored nor being encoded, and no content was sent"
    return UnknownKey(text, key=key.hex())


def holder_of(namespace: str) -> Holder:
    """The holder that work for a namespace counts as, where its caller is not known."""
    return (f"namespace {namespace}",)
