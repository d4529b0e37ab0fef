"""CUDA graphs of the tower, one per bucket: captured before readiness, replayed for every batch that fits.

Owns the static buffers that graphs read, the capture, the choice between replay and eager execution, and the
counters of each. The tower pads a batch, the scheduler owns the ladder of buckets. Not thread-safe: capture
first, then launch from one thread.

Memory. All graphs read the same static buffers, each a prefix of them, so images and clips of any bucket
share one set. All graphs allocate from one pool. What a replay leaves there, including its rows, is valid
only until the next replay of any bucket.

Streams. The compute stream runs everything that writes a graph's inputs, the replay, and everything that
reads its rows, so that launches are ordered.

On a CPU, or with ``capture=False``, the tower runs eagerly on the same padded, static inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from encoder_service.engine.streams import Streams, streams_of
from encoder_service.errors import ConfigurationError, InternalError, NotReady
from encoder_service.ops.progress import Progress
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Calibration, Launch
from encoder_service.towers.fused_inputs import BucketShape, FusedInputs
from encoder_service.types import Grid


class BucketedTower(Protocol):
    """A tower whose forward pass can be captured, for example ``towers.fused.FusedTower``."""

    patch_dim: int
    merge_size: int

    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def prepare(self, grids: Sequence[Grid]) -> FusedInputs: ...
    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs: ...
    def __call__(self, inputs: FusedInputs) -> torch.Tensor: ...


@dataclass
class GraphCounters:
    """replays: graph replays by bucket. padded_runs: eager runs on a bucket's padded shapes, where nothing is
    captured. eager_runs: batches that no bucket takes. padded_patches: of padding, over replays and padded
    runs."""

    replays: Counter[Bucket] = field(default_factory=Counter)
    padded_runs: Counter[Bucket] = field(default_factory=Counter)
    eager_runs: int = 0
    padded_patches: int = 0


@dataclass(frozen=True)
class Captured:
    """A graph and its rows [R of the bucket, W], a view that does not own the pool's memory."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor


@dataclass(frozen=True)
class StagedInputs:
    """A batch whose metadata is on the device. bucket: None for an eager run. inputs: what the forward pass
    reads, padded to the bucket. num_patches, num_rows: of the batch without padding."""

    bucket: Bucket | None
    inputs: FusedInputs
    num_patches: int
    num_rows: int

    @property
    def pixels(self) -> torch.Tensor:
        """[P, patch_dim]: the buffer for the batch's patches."""
        assert self.inputs.pixel_values is not None
        return self.inputs.pixel_values[: self.num_patches]


class GraphRunner:
    """Runs batches through captured graphs.

    clock: seconds, monotonic. capture: whether to capture graphs; needs a CUDA device. choices: what was
    chosen by measuring, as (step, shape, name), for metrics. streams: replaces the device's default ones.
    """

    def __init__(
        self,
        tower: BucketedTower,
        ladder: BucketLadder,
        device: torch.device,
        *,
        capture: bool,
        clock: Callable[[], float],
        choices: Sequence[tuple[str, str, str]] = (),
        streams: Streams | None = None,
    ) -> None:
        """Raises ConfigurationError for capture without a GPU, for capture with attention that bakes lengths
        into its launches, and for buckets that do not hold a whole merge."""
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
        self.tower = tower
        self._device = device
        self._capture = capture
        self._ladder = ladder
        self.choices = choices
        self.streams = streams or streams_of(device, clock)
        self.counters = GraphCounters()
        self.captured_bytes = 0
        self._graphs: dict[Bucket, Captured] = {}
        # Made outside inference mode, because the tensors are written both inside and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            table_size = max(len(self._filled(bucket).table) for bucket in ladder.buckets)
            self._table = torch.zeros(table_size, dtype=torch.int32, device=device)
            self._pixels = torch.zeros(ladder.max_patches, tower.patch_dim, dtype=tower.dtype, device=device)

    @property
    def ladder(self) -> BucketLadder:
        return self._ladder

    @property
    def ready(self) -> bool:
        """Whether every bucket is captured, or none has to be."""
        return not self._capture or len(self._graphs) == len(self._ladder)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the largest bucket's patches in the tower's dtype."""
        return self._pixels.nbytes

    @property
    def max_items(self) -> int:
        """The largest number of items that a bucket takes."""
        return max(bucket.num_sequences for bucket in self._ladder.buckets)

    def use(self, calibration: Calibration) -> None:
        """From now on chooses buckets by a measured cost model."""
        self._ladder = self._ladder.calibrated(calibration)

    def reset_counters(self) -> None:
        self.counters = GraphCounters()

    def can_use(self, inputs: FusedInputs) -> Bucket | None:
        """The bucket for this unpadded batch; None for an eager run."""
        return self._ladder.choose(Launch.of(inputs.seqlens, inputs.num_frames))

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        """Metadata of a batch, on the host. Raises GridMismatch."""
        return self.tower.prepare(grids)

    def stage(self, inputs: FusedInputs) -> StagedInputs:
        """Copies the metadata of an unpadded batch to the device in the compute stream. The caller then
        writes the batch's ``pixels`` and calls ``forward``, both in that stream. Valid until the next
        ``stage``. Raises NotReady before every bucket is captured."""
        if not self.ready:
            raise NotReady(f"{len(self._graphs)} of {len(self._ladder)} graphs are captured")
        bucket = self.can_use(inputs)
        if bucket is None:
            shape = (inputs.num_patches, self.tower.patch_dim)
            pixels = torch.empty(shape, dtype=self.tower.dtype, device=self._device)
            on_device = inputs.to(self._device, non_blocking=True).with_pixels(pixels)
            return StagedInputs(None, on_device, inputs.num_patches, inputs.num_rows)
        padded = self.tower.pad(inputs, bucket)
        self._load(padded)
        # Clears padding rows: data of an earlier batch may belong to another caller or may not be finite.
        padding = self._pixels[inputs.num_patches : bucket.num_patches]
        self.streams.compute.run(padding.zero_)
        return StagedInputs(bucket, self._static(padded), inputs.num_patches, inputs.num_rows)

    @torch.inference_mode()
    def forward(self, batch: StagedInputs) -> torch.Tensor:
        """Rows [R, W] of the batch that was staged last, without padding, valid until the next forward pass.
        Must be called in the compute stream."""
        bucket, counters = batch.bucket, self.counters
        if bucket is None:
            rows = self.tower(batch.inputs)
            counters.eager_runs += 1
            return rows
        captured = self._graphs.get(bucket)
        if captured is None:
            rows = self.tower(batch.inputs)
            counters.padded_runs[bucket] += 1
        else:
            captured.graph.replay()
            rows = captured.rows
            counters.replays[bucket] += 1
        counters.padded_patches += bucket.num_patches - batch.num_patches
        return rows[: batch.num_rows]

    @torch.inference_mode()
    def run(self, inputs: FusedInputs, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows [R, W] of an unpadded batch in the order of ``prepare``, valid until the next batch. pixels:
        one tensor [P, patch_dim] per item, on any device. Raises as ``stage``."""
        batch, rows = self.stage(inputs), list[torch.Tensor]()

        def step() -> None:
            parts = batch.pixels.split([len(patches) for patches in pixels])  # type: ignore[no-untyped-call]
            for part, patches in zip(parts, pixels, strict=True):
                part.copy_(patches, non_blocking=True)
            rows.append(self.forward(batch))

        self.streams.compute.run(step)
        return rows[0]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Captures every bucket, largest first; does nothing without ``capture``. Logs its progress."""
        if not self._capture:
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(self._device)
        # One stream for all captures: pools are shared within a stream. The first warm-up allocates a
        # library's workspace for that stream outside the pool, and every graph then uses it.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        progress = Progress("capturing graphs", len(self._ladder))
        for bucket in self._ladder.largest_first:
            self._graphs[bucket] = self._capture_one(bucket, stream, pool)
            progress.step()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self.captured_bytes = max(0, free_before - free_after)

    def _capture_one(self, bucket: Bucket, stream: torch.cuda.Stream, pool: Any) -> Captured:
        """Warm-up and capture on the side stream. The static buffers hold a full batch, so that kernels that
        are chosen by measuring see realistic inputs."""
        filled = self._filled(bucket)
        self._load(filled)
        inputs = self._static(filled)
        assert inputs.pixel_values is not None
        self.streams.compute.run(inputs.pixel_values.normal_)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(stream):
            # Compiles the kernels of these shapes, which a capture may not do.
            self.tower(inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads of the process may allocate during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            rows = self.tower(inputs).contiguous()
        stream.synchronize()
        expected = (bucket.num_patches // self.tower.merge_size**2, self.tower.width)
        if tuple(rows.shape) != expected:
            raise InternalError(f"the tower gave {tuple(rows.shape)} rows in {bucket}, needs {expected}")
        # Dropping the owning tensor lets later captures reuse the memory of these rows: the pool then holds
        # the rows of one bucket at a time.
        return Captured(graph, unowned_view(rows))

    def _load(self, padded: FusedInputs) -> None:
        """Copies the table of a padded batch into the static one, through newly pinned memory. Torch's
        allocator reuses that memory once the copy has ended."""
        table = padded.table.pin_memory() if self._device.type == "cuda" else padded.table
        static = self._table[: len(table)]
        self.streams.compute.run(lambda: static.copy_(table, non_blocking=True))

    def _static(self, padded: FusedInputs) -> FusedInputs:
        """A padded batch in the views of the static buffers that its bucket's graph reads."""
        table, pixels = self._table[: len(padded.table)], self._pixels[: padded.num_patches]
        return replace(padded, table=table, pixel_values=pixels)

    def _filled(self, bucket: Bucket) -> FusedInputs:
        """Metadata of a padded batch that fills the bucket, on the host."""
        return self.tower.pad(self.tower.prepare(filling_grids(bucket, self.tower.merge_size)), bucket)


class DeviceMemory:
    """Device memory by address, as a CUDA array interface for ``torch.as_tensor``."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def unowned_view(rows: torch.Tensor) -> torch.Tensor:
    """The same device memory, shape and dtype as contiguous ``rows``, without keeping the memory alive."""
    view = torch.as_tensor(DeviceMemory(rows.data_ptr(), rows.nbytes))
    assert view.data_ptr() == rows.data_ptr()
    return view.view(rows.dtype).view(rows.shape)


def filling_grids(bucket: Bucket, merge_size: int) -> list[Grid]:
    """Grids of images that nearly fill the bucket: squares as large as its sequence bound, then a strip.

    Raises ConfigurationError if the bucket's size is no multiple of a merge, or its bound is below one merge.
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
