"""CUDA graphs of the tower, one per bucket: captured before readiness, replayed for every batch that fits.

Owns the static buffers that graphs read, capture, the choice between replay and eager, and the counters that
prove which it was. Padding a batch is the tower's, the ladder of buckets the scheduler's. Not thread-safe:
capture first, then run from one thread.

Memory. All graphs read the same static buffers, each a prefix of them, so images and clips of any bucket
share one set. All graphs allocate from one pool: what a replay leaves there, its rows included, holds only
until the next replay of any bucket.

Streams. Everything that a graph reads is written in the compute stream, and so are its rows; on a GPU that
is the caller's current stream. A launch comes, on the device, after the one before it: by the stream's order,
or, where that was in another stream, by following it. ``launch`` hands the rows to a function that reads them
in the compute stream's order, and needs nothing more. Whoever reads rows in another stream records an event
there after the read and passes it to ``hold``.

On a CPU, or with ``capture=False``, the tower runs eagerly on the same padded, static inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from encoder_service.engine.copies import Copies, Memory, copies_of
from encoder_service.engine.pixels import Pixels, StaticBuffers, write_pixels
from encoder_service.engine.pool import borrowed_view, pool_bytes
from encoder_service.engine.rows import RowTarget
from encoder_service.engine.staging import SOURCES, Layout, Staging, UploadRows
from encoder_service.engine.streams import Event, Passage, Streams, streams_of
from encoder_service.errors import ConfigurationError, InternalError, NotReady
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers.fused_inputs import BatchShape, BucketShape, FusedInputs, ShapeRows
from encoder_service.types import Grid

WARM_UP_RUNS = 2


class BucketedTower(Protocol):
    """What a tower needs for its forward pass to be captured; ``towers.fused.FusedTower`` is one."""

    patch_dim: int
    merge_size: int

    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def prepare(self, grids: Sequence[Grid]) -> FusedInputs: ...
    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs: ...
    def shape_of(self, shapes: ShapeRows) -> BatchShape: ...
    def __call__(self, inputs: FusedInputs) -> torch.Tensor: ...


@dataclass(frozen=True)
class CaptureRecord:
    """One capture: its time with warm-up, and the size of the shared pool after it."""

    bucket: Bucket
    seconds: float
    pool_bytes: int


@dataclass
class GraphCounters:
    """replays: graph replays by bucket. padded_runs: eager runs on a bucket's padded shapes, where nothing
    is captured. eager_runs: batches that no bucket takes. real_patches, padded_patches: patches of batches
    and of the padding added to them, over replays and padded runs. replay_host_s: seconds that the host spent
    in replays, most of what a step costs it."""

    replays: Counter[Bucket] = field(default_factory=Counter)
    padded_runs: Counter[Bucket] = field(default_factory=Counter)
    eager_runs: int = 0
    real_patches: int = 0
    padded_patches: int = 0
    replay_host_s: float = 0.0


@dataclass(frozen=True)
class Captured:
    """A graph, and its rows [R of the bucket, W] with their memory: a view that does not own the pool's."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    memory: Memory


class GraphRunner:
    """Runs batches through captured graphs.

    clock: seconds, monotonic. capture: whether to capture at all; needs a CUDA device. streams, copies: in
    place of the device's own.
    """

    def __init__(
        self,
        tower: BucketedTower,
        ladder: BucketLadder,
        device: torch.device,
        *,
        capture: bool,
        clock: Callable[[], float],
        streams: Streams | None = None,
        copies: Copies | None = None,
    ) -> None:
        """Raises ConfigurationError for capture without a GPU or with attention that bakes lengths into its
        launches, and for buckets that hold no merge."""
        if capture and device.type != "cuda":
            raise ConfigurationError(f"graphs are captured on cuda devices only, not on {device}")
        attention = getattr(tower, "attention", None)
        if capture and getattr(attention, "static_lengths", False):
            raise ConfigurationError(
                f"attention {getattr(attention, 'name', '')!r} bakes sequence lengths into its launches: a "
                "graph would serve one batch only"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._tower = tower
        self._device = device
        self._capture = capture
        self._clock = clock
        self.ladder = ladder
        self.streams = streams or streams_of(device, clock)
        self.copies = copies or copies_of(device)
        self.counters = GraphCounters()
        self.captured_bytes = 0
        # What was chosen by measuring, as (what for, shape, name): for metrics.
        self.choices: Sequence[tuple[str, str, str]] = ()
        self._graphs: dict[Bucket, Captured] = {}
        self._holds: list[Event] = []
        # Ordinary tensors even when made in inference mode: they are written in and out of it.
        with torch.inference_mode(False), torch.no_grad():
            self._layouts = {bucket: Layout.of(self._filled(bucket)) for bucket in ladder.buckets}
            most_bytes = max(layout.num_bytes for layout in self._layouts.values())
            self._metadata = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
            self._pixels = torch.zeros(ladder.max_patches, tower.patch_dim, dtype=tower.dtype, device=device)
            self._staging = Staging(self._metadata, self.streams, self.copies)
            self._inputs = {bucket: self._static_inputs(bucket) for bucket in ladder.buckets}
            self._static = {bucket: self._static_buffers(bucket) for bucket in ladder.buckets}
        self.streams.compute.follow()

    @property
    def ready(self) -> bool:
        """Whether every bucket that is to be captured has been."""
        return not self._capture or len(self._graphs) == len(self.ladder)

    @property
    def captures(self) -> bool:
        """Whether batches that a bucket takes are replayed."""
        return self._capture

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return self.ladder.max_patches // self._tower.merge_size**2

    @property
    def pixel_bytes(self) -> int:
        """Bytes that the pixels of a batch in the largest bucket take at most, as uint8 or in the tower's
        dtype: the size of the buffer that graphs read."""
        return self._pixels.nbytes

    @property
    def max_items(self) -> int:
        """The most items that a bucket's table has room for."""
        return max(bucket.num_sequences for bucket in self.ladder.buckets)

    def static(self, bucket: Bucket) -> StaticBuffers:
        """What this bucket's graph reads, for what enqueues work between the metadata and the replay."""
        return self._static[bucket]

    def shape_of(self, shapes: ShapeRows) -> BatchShape:
        """A batch of which no more is known than rows of shapes, for ``choose`` and ``launch_staged``."""
        return self._tower.shape_of(shapes)

    def choose(self, batch: BatchShape) -> Bucket | None:
        """``can_use`` for a batch's shape."""
        return self.ladder.choose(batch.num_patches, batch.num_sequences, batch.max_seqlen, batch.num_frames)

    def can_use(self, inputs: FusedInputs) -> Bucket | None:
        """The bucket that this batch, unpadded, would run in; None: eager."""
        return self.ladder.choose(
            inputs.num_patches, len(inputs.seqlens), inputs.max_seqlen, inputs.num_frames
        )

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        """Host metadata of a packed batch, for ``run``. Raises GridMismatch."""
        return self._tower.prepare(grids)

    @torch.inference_mode()
    def run(self, inputs: FusedInputs, pixels: Pixels) -> torch.Tensor:
        """Rows [R, W] of an unpadded batch on the host, padding left out, in ``prepare``'s order.

        The rows hold until the next launch; see the module's text on streams. Host tensors among ``pixels``
        that are pinned must stay unchanged until the current stream has passed this call. Raises as
        ``launch`` does.
        """
        found: list[torch.Tensor] = []
        self.launch(inputs, pixels, found.append)
        return found[0]

    @torch.inference_mode()
    def launch(self, inputs: FusedInputs, pixels: Pixels, consume: Callable[[torch.Tensor], None]) -> None:
        """Hands a batch to the device: ``consume`` gets its rows [R, W] in the compute stream's order, and
        what it enqueues there comes before anything of the next launch.

        Raises NotReady before every bucket is captured, PixelTensorMismatch for another number of patches
        than ``inputs`` has, and whatever ``pixels`` and ``consume`` raise.
        """
        self.begin()
        bucket = self.can_use(inputs)
        compute = self.streams.compute
        if bucket is None:
            compute.run(lambda: consume(self._run_eager(inputs, pixels)))
        else:
            self._staging.load(self._tower.pad(inputs, bucket), self._layouts[bucket])
            compute.run(lambda: consume(self._run_bucket(bucket, inputs, pixels)))

    def stage(
        self, batch: BatchShape, bucket: Bucket, rows: UploadRows, first_byte: int, passage: Passage
    ) -> None:
        """Lays out the metadata of a batch that ``bucket`` takes and whose pixels are on the device, from
        ``first_byte`` on in the memory of their slots, where it is transferred from. After ``begin``. Then
        whoever calls this enqueues what fills the bucket's pixels, padding with zeros, from ``static``, calls
        ``forward``, and in any case records the passage's end."""
        self._staging.load_shape(batch, rows, first_byte, self._layouts[bucket], passage)

    def forward(self, batch: BatchShape, bucket: Bucket, target: RowTarget) -> None:
        """The forward pass of the batch that was staged, and its rows' way to ``target``."""
        captured, num_patches, num_rows = self._graphs.get(bucket), batch.num_patches, batch.num_rows
        if captured is not None:
            self._replay(captured, bucket, num_patches)
            target.write_memory(captured.memory, num_rows)
            return
        seqlens = batch.seqlens

        @torch.inference_mode()
        def run() -> None:
            target.write(self._run_padded(bucket, seqlens, num_patches)[:num_rows])

        self.streams.compute.run(run)

    def begin(self) -> None:
        """Before anything else of a launch: the static buffers and the pool are free for what follows, once
        the launch before, and every held read, is over. Raises NotReady."""
        if not self.ready:
            raise NotReady(f"{len(self._graphs)} of {len(self.ladder)} graphs are captured")
        self.streams.compute.follow()
        while self._holds:
            self.streams.compute.wait(self._holds.pop())

    def hold(self, event: Event) -> None:
        """The next launch waits, on the device, for ``event``, recorded after a read of rows in another
        stream; until then the caller keeps the rows."""
        self._holds.append(event)

    @torch.inference_mode()
    def capture_all(
        self, progress: Callable[[CaptureRecord, int], None] | None = None
    ) -> list[CaptureRecord]:
        """Captures every bucket, largest first, and returns what each took; nothing without ``capture``.
        ``progress`` is called after each with its record and the number still to do."""
        if not self._capture:
            return []
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        # One stream for all: pools are shared within a stream, and a library's workspace of that stream is
        # allocated by the first warm-up, outside the pool, and then used by every graph.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        records: list[CaptureRecord] = []
        for bucket in self.ladder.largest_first:
            started_s = self._clock()
            self._graphs[bucket] = captured = self._capture_one(bucket, stream, pool)
            seconds = self._clock() - started_s
            record = CaptureRecord(bucket, seconds, pool_bytes(captured.graph.pool(), self._device))
            records.append(record)
            if progress is not None:
                progress(record, len(self.ladder) - len(records))
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self.captured_bytes = max(0, free_before - free_after)
        return records

    def _capture_one(self, bucket: Bucket, stream: torch.cuda.Stream, pool: Any) -> Captured:
        """Warm-up and capture on the side stream, with a full batch in the static buffers: kernels that are
        chosen by measuring see what they will run."""
        filled = self._filled(bucket)
        self._staging.load(filled, self._layouts[bucket])
        self._pixels[: bucket.num_patches].normal_()
        inputs = replace(self._inputs[bucket], seqlens=filled.seqlens)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._tower(inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of other parts of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            rows = self._tower(inputs).contiguous()
        expected = (bucket.num_patches // self._tower.merge_size**2, self._tower.width)
        if tuple(rows.shape) != expected:
            raise InternalError(f"the tower gave {tuple(rows.shape)} rows in {bucket}, needs {expected}")
        current.wait_stream(stream)
        # Without the owner, later captures may use the rows' memory too: the pool holds one bucket's rows
        # at a time, not every bucket's.
        return Captured(graph, view := borrowed_view(rows), Memory(view))

    def _run_eager(self, inputs: FusedInputs, pixels: Pixels) -> torch.Tensor:
        """A batch that no bucket takes, in its own shapes."""
        pixel_values = torch.empty(
            inputs.num_patches, self._tower.patch_dim, dtype=self._tower.dtype, device=self._device
        )
        write_pixels(pixel_values, pixels)
        rows = self._tower(inputs.to(self._device, non_blocking=True).with_pixels(pixel_values))
        self.counters.eager_runs += 1
        return rows

    def _run_bucket(self, bucket: Bucket, inputs: FusedInputs, pixels: Pixels) -> torch.Tensor:
        """A batch whose padded metadata is in place. Padding pixels are zeros: what an earlier batch left
        there could be another caller's, or not finite."""
        write_pixels(self._pixels[: inputs.num_patches], pixels)
        self._pixels[inputs.num_patches : bucket.num_patches].zero_()
        captured = self._graphs.get(bucket)
        if captured is None:
            return self._run_padded(bucket, inputs.seqlens, inputs.num_patches)[: inputs.num_rows]
        self._replay(captured, bucket, inputs.num_patches)
        return captured.rows[: inputs.num_rows]

    def _run_padded(self, bucket: Bucket, seqlens: tuple[int, ...], num_patches: int) -> torch.Tensor:
        """Rows of the bucket, without a graph, of a batch whose padded inputs are in place."""
        rows = self._tower(replace(self._inputs[bucket], seqlens=seqlens))
        self.counters.padded_runs[bucket] += 1
        self._count(bucket, num_patches)
        return rows

    def _replay(self, captured: Captured, bucket: Bucket, num_patches: int) -> None:
        counters = self.counters
        started_s = self._clock()
        captured.graph.replay()
        counters.replay_host_s += self._clock() - started_s
        counters.replays[bucket] += 1
        self._count(bucket, num_patches)

    def _count(self, bucket: Bucket, num_patches: int) -> None:
        self.counters.real_patches += num_patches
        self.counters.padded_patches += bucket.num_patches - num_patches

    def _static_inputs(self, bucket: Bucket) -> FusedInputs:
        """The views of the static buffers that this bucket's graph reads."""
        views = self._layouts[bucket].views(self._metadata)
        return FusedInputs(
            table=views["table"],
            seqlens=(),
            max_seqlen=bucket.max_seqlen,
            num_slots=bucket.num_sequences,
            num_patches=bucket.num_patches,
            num_rows=bucket.num_patches // self._tower.merge_size**2,
            num_frames=bucket.num_frames,
            pixel_values=self._pixels[: bucket.num_patches],
        )

    def _static_buffers(self, bucket: Bucket) -> StaticBuffers:
        sources_I2 = self._layouts[bucket].views(self._metadata)[SOURCES]
        return StaticBuffers(self._inputs[bucket].items, sources_I2, self._pixels[: bucket.num_patches])

    def _filled(self, bucket: Bucket) -> FusedInputs:
        """Metadata of a batch that fills the bucket, padded, on the host."""
        return self._tower.pad(self._tower.prepare(filling_grids(bucket, self._tower.merge_size)), bucket)


def filling_grids(bucket: Bucket, merge_size: int) -> list[Grid]:
    """Stills that nearly fill the bucket: squares as large as its sequence bound, then a strip.

    Raises ConfigurationError when the bucket's size is no multiple of a merge, or its bound below one.
    """
    unit = merge_size**2
    if bucket.num_patches % unit or bucket.max_seqlen < unit:
        raise ConfigurationError(
            f"{bucket}: {bucket.num_patches} patches with sequences of at most {bucket.max_seqlen} hold no "
            f"whole merges of {unit}",
            num_patches=bucket.num_patches,
            max_seqlen=bucket.max_seqlen,
            unit=unit,
        )
    side = math.isqrt(bucket.max_seqlen) // merge_size * merge_size
    count = min(bucket.num_patches // side**2, bucket.num_sequences)
    grids = [Grid(1, side, side)] * count
    rest = min(bucket.num_patches - count * side**2, bucket.max_seqlen) // unit
    if rest and count < bucket.num_sequences:
        grids.append(Grid(1, merge_size, rest * merge_size))
    return grids
