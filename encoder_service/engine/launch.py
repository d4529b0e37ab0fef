"""One batch on its way through the device: handed over without a wait, waited for by another thread.

Owns the order of a step. Pixels travel into a slot in the upload stream; the compute stream waits for them,
cuts patches into the buffer that graphs read, runs the forward pass, and copies the rows out of it; the
sink takes them from there in the download stream. Which items form the batch, and what happens when it
fails, is the engine's.

What a step costs the host does not grow with the batch, but for joining what was found out about each item
beforehand (``patches.Upload``) and for the driver's part of each copy: the number of tensor operations is
the same for one item and for sixty-four.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch

from encoder_service.engine.copies import batch_copies_of
from encoder_service.engine.cuts import StagedCuts
from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import Upload, cutter_for, upload_of
from encoder_service.engine.rows import Destination, HostRows, PlacedRows, RowSink, RowTarget
from encoder_service.engine.staging import (
    ALIGNMENT_BYTES,
    IS_PINNED,
    NUM_UPLOAD_COLUMNS,
    PixelStaging,
)
from encoder_service.engine.streams import Event, streams_of
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.towers.fused_inputs import MAX_SIDE
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem


class Launched(Protocol):
    """A batch that the device has been handed."""

    def wait(self) -> float:
        """Blocks until its rows have arrived; the seconds that the device spent on it, transfers not
        included. Raises what the device failed with."""

    def collect(self) -> Iterator[torch.Tensor]:
        """Each item's rows in turn, [R, W], owning their storage. After ``wait``, once, to its end."""


class Launcher(Protocol):
    def launch(self, items: Sequence[TowerItem], destinations: Sequence[Destination] = ()) -> Launched:
        """Hands a batch to the device and returns. destinations: where each item's rows go, see ``rows``.
        Raises what is known to be wrong by then."""

    def probe(self) -> None:
        """Raises what the device failed with, if it has; does not wait."""

    def warm_up(self, grids: Sequence[Grid]) -> None:
        """Runs each grid as patches and as frames, so that no caller waits for a library's first use."""


class TowerLauncher:
    """Runs batches on the fast path, or on the plain tower where there is none.

    clock: seconds. sink: where rows go; when left out, where each item says, or host memory. Not thread-safe:
    one thread launches, any thread waits and collects.
    """

    def __init__(
        self,
        tower: Tower,
        preprocessor: Preprocessor,
        graphs: GraphRunner | None,
        *,
        clock: Callable[[], float],
        sink: RowSink | None = None,
    ) -> None:
        self._tower = tower
        self._device = device = tower.device
        self._graphs = graphs
        self._cutter = cutter_for(preprocessor, device)
        self._pixels: PixelStaging | None = None
        self._cuts: StagedCuts | None = None
        # Pairs of timed events, given back by the threads that wait: making them costs more than recording.
        self._events: deque[tuple[Event, Event]] = deque()
        # Ordinary tensors, as those of the graph runner are; pinned ones belong to the current device.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), current:
            if graphs is None:
                self._streams = streams_of(device, clock)
                max_rows = 0
            else:
                self._streams = graphs.streams
                max_rows = graphs.max_rows
                num_bytes = graphs.pixel_bytes + graphs.max_items * ALIGNMENT_BYTES
                self._pixels = PixelStaging(
                    num_bytes, graphs.max_items, device, self._streams, batch_copies_of(device)
                )
                self._cuts = StagedCuts(graphs, self._cutter, self._pixels.memory)
            self._sink = sink or PlacedRows(
                HostRows(tower.width, tower.dtype, device, self._streams, max_rows)
            )

    @torch.inference_mode()
    def launch(self, items: Sequence[TowerItem], destinations: Sequence[Destination] = ()) -> LaunchedBatch:
        tower, compute = self._tower, self._streams.compute
        uploads = [upload_of(item, tower) for item in items]
        target = self._sink.open([one.num_rows for one in uploads], destinations)
        started, ended = events = self._take_events()
        # Kept until the batch was waited for: the device reads pinned pixels in its own time, and torch's
        # allocator, which a batched copy does not tell, would give the memory of a dropped one to the next.
        pixels = [one.pixels for one in uploads]
        try:
            if self._graphs is not None:
                self._launch_fast(self._graphs, items, uploads, pixels, target, started)
            else:
                compute.record(started)
                compute.run(lambda: target.write(self._run_plain(items, pixels)))
            compute.record(ended)
            target.send(ended)
        except BaseException:
            target.abandon()
            raise
        return LaunchedBatch(target, events, pixels, self._events)

    def probe(self) -> None:
        self._streams.compute.probe()

    def warm_up(self, grids: Sequence[Grid]) -> None:
        tower = self._tower
        for grid in grids:
            shape = (
                grid.t * tower.temporal_patch_size,
                grid.h * tower.patch_size,
                grid.w * tower.patch_size,
                3,
            )
            frames_THWC = torch.zeros(shape, dtype=torch.uint8)
            patches = torch.zeros(grid.num_patches, tower.patch_dim)
            items: tuple[TowerItem, ...] = (PatchItem(patches, grid), FrameItem(frames_THWC, grid))
            for item in items:
                launched = self.launch([item])
                launched.wait()
                list(launched.collect())
        if grids:  # how frames are cut in a batch that no bucket takes
            out = torch.empty(grids[-1].num_patches, tower.patch_dim, dtype=tower.dtype, device=self._device)
            self._cutter.cut(frames_THWC.to(self._device), out)

    def _take_events(self) -> tuple[Event, Event]:
        try:
            return self._events.popleft()
        except IndexError:
            return self._streams.make_timed_event(), self._streams.make_timed_event()

    def _launch_fast(
        self,
        graphs: GraphRunner,
        items: Sequence[TowerItem],
        uploads: Sequence[Upload],
        pixels: list[torch.Tensor],
        target: RowTarget,
        started: Event,
    ) -> None:
        assert self._pixels is not None
        assert self._cuts is not None
        compute, cuts = self._streams.compute, self._cuts
        rows = np.frombuffer(b"".join([one.row for one in uploads]), np.int64)
        rows = rows.reshape(-1, NUM_UPLOAD_COLUMNS)
        batch = graphs.shape_of(rows)
        bucket = graphs.choose(batch)
        staged = None
        # A side beyond the tables', which only a longer sequence can have, is refused with the rest below.
        if bucket is not None and batch.max_seqlen <= MAX_SIDE:
            staged = self._pixels.upload(rows, pixels, all_pinned=batch.sums[IS_PINNED] == len(items))
        if bucket is None or staged is None:  # eager or unstaged, and in the compute stream from start to end
            inputs = graphs.prepare([item.grid for item in items])
            compute.record(started)
            graphs.launch(inputs, lambda out: self._write_unstaged(out, items, pixels), target.write)
            return

        def write() -> None:
            # Not before the metadata: a device that has nothing to do would count the host's work as its own.
            compute.record(started)
            cuts.write(bucket, items, staged)

        compute.wait(staged.slot.copied)
        try:
            graphs.launch_staged(batch, bucket, staged.sources, write, target.write)
        finally:  # also when it failed half way: what was enqueued may read the slot
            compute.record(staged.slot.consumed)

    def _write_unstaged(
        self, out: torch.Tensor, items: Sequence[TowerItem], sources: Sequence[torch.Tensor]
    ) -> None:
        first = 0
        for item, source in zip(items, sources, strict=True):
            rows = out[first : first + item.grid.num_patches]
            if isinstance(item, FrameItem):
                self._cutter.cut(source.to(self._device, non_blocking=True), rows)
            else:
                rows.copy_(source, non_blocking=True)
            first += item.grid.num_patches

    def _run_plain(self, items: Sequence[TowerItem], sources: Sequence[torch.Tensor]) -> torch.Tensor:
        tower = self._tower
        grids = [item.grid for item in items]
        pixel_values = torch.empty(
            sum(grid.num_patches for grid in grids), tower.patch_dim, dtype=tower.dtype, device=self._device
        )
        self._write_unstaged(pixel_values, items, sources)
        rows: torch.Tensor = tower(tower.prepare(grids).to(self._device).with_pixels(pixel_values))
        return rows


class LaunchedBatch:
    """A batch that the device was handed. events: around it, given back to ``pool`` when it was waited for.
    held: host memory that its transfers read; shared with the slot that it travels into, and emptied for
    both."""

    def __init__(
        self,
        target: RowTarget,
        events: tuple[Event, Event],
        held: list[torch.Tensor],
        pool: deque[tuple[Event, Event]],
    ) -> None:
        self._target = target
        self._events: tuple[Event, Event] | None = events
        self._held = held
        self._pool = pool
        self._device_s = 0.0

    def wait(self) -> float:
        self._target.wait()
        self._held.clear()
        if self._events is not None:
            events, self._events = self._events, None
            started, ended = events
            self._device_s = started.elapsed_time(ended) / 1e3
            self._pool.append(events)
        return self._device_s

    def collect(self) -> Iterator[torch.Tensor]:
        return self._target.collect()


def host_seconds(
    launcher: Launcher, items: Sequence[TowerItem], clock: Callable[[], float], repeats: int
) -> list[float]:
    """Seconds that the host spends on handing over one batch, for each of ``repeats`` launches in a row,
    each waited for before the next: what a bench of the step's own cost reports."""
    seconds = []
    for _ in range(repeats):
        started_s = clock()
        launched = launcher.launch(items)
        seconds.append(clock() - started_s)
        launched.wait()
        for _ in launched.collect():
            pass
    return seconds
