"""One batch on its way through the device: handed over without a wait, waited for by another thread.

Owns the order of a step. Pixels travel into a slot in the upload stream; the compute stream waits for them,
cuts patches into the buffer that graphs read, runs the forward pass, and copies the rows out of it; the
sink takes them from there in the download stream. Which items form the batch, and what happens when it
fails, is the engine's.

What a step costs the host does not grow with the batch, but for joining what was found out about each item
beforehand (``patches.Upload``) and for the driver's part of each copy. Where a graph is replayed there is no
tensor operation at all: copies go by address to the driver, sums are made in arrays that are there already.

Six points of a step are recorded or waited for: pixels have arrived (recorded, waited for by the compute
stream), the batch starts, it ends (recorded, waited for by the stream that takes rows away), rows have
arrived. One end serves all who wait for the batch: the pixels' slot, the metadata's, the rows' transfer; and
once some thread has waited for it, none of them asks the device any more (``Passage``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from encoder_service.engine.cuts import StagedCuts
from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import Upload, cutter_for, upload_of
from encoder_service.engine.resizing import ResizeStage, Resizing, resized
from encoder_service.engine.rows import Destination, HostRows, PlacedRows, RowSink, RowTarget
from encoder_service.engine.staging import ALIGNMENT_BYTES, IS_PACKED, IS_PINNED, PixelStaging
from encoder_service.engine.streams import Event, Passage, streams_of
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

    clock: seconds. sink: where rows go; when left out, where each item says, or host memory. resizing: of
    images that come packed for the device to resize. Not thread-safe: one thread launches, any thread waits
    and collects.
    """

    def __init__(
        self,
        tower: Tower,
        preprocessor: Preprocessor,
        graphs: GraphRunner | None,
        *,
        clock: Callable[[], float],
        sink: RowSink | None = None,
        resizing: Resizing | None = None,
    ) -> None:
        self._tower = tower
        self._resizing = resizing
        self._device = device = tower.device
        self._graphs = graphs
        self._cutter = cutter_for(preprocessor, device)
        self._pixels: PixelStaging | None = None
        self._cuts: StagedCuts | None = None
        self._index: int | None = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
        # Pairs of timed events, given back by the threads that wait: making them costs more than recording.
        self._events: deque[tuple[Event, Event]] = deque()
        # Ordinary tensors, as those of the graph runner are; pinned ones belong to the current device.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), current:
            copies = None
            if graphs is None:
                self._streams = streams_of(device, clock)
                max_rows = 0
            else:
                self._streams = graphs.streams
                copies, max_rows = graphs.copies, graphs.max_rows
                num_bytes = graphs.pixel_bytes + graphs.max_items * ALIGNMENT_BYTES
                resizes = None
                if resizing is not None:
                    resizes = ResizeStage(resizing.num_bytes, graphs.max_items, device, self._streams, copies)
                self._pixels = PixelStaging(
                    num_bytes, graphs.max_items, device, self._streams, copies, resizes
                )
                self._cuts = StagedCuts(graphs, self._cutter, self._pixels.memory)
            self._sink = sink or PlacedRows(
                HostRows(tower.width, tower.dtype, device, self._streams, max_rows, copies)
            )

    def launch(self, items: Sequence[TowerItem], destinations: Sequence[Destination] = ()) -> LaunchedBatch:
        if self._index is not None and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):  # the driver's calls go to the thread's current device
                return self.launch(items, destinations)
        tower, graphs, compute = self._tower, self._graphs, self._streams.compute
        uploads = [
            known if type(known := item.upload) is Upload and known.tower is tower else upload_of(item, tower)
            for item in items
        ]
        # Kept until the batch was waited for: the device reads pinned pixels in its own time, and torch's
        # allocator, which is told of no copy by address, would give the memory of a dropped one to the next.
        pixels = [one.pixels for one in uploads]
        target = self._sink.open([one.num_rows for one in uploads], destinations)
        try:
            passage = Passage(*self._take_events())
            try:
                if graphs is None:
                    self._launch_plain(items, uploads, target, passage)
                else:
                    self._launch_fast(graphs, items, uploads, pixels, target, passage)
            finally:  # also when it failed half way: what was enqueued may read slots
                compute.record(passage.ended)
            reading = target.send(passage.ended)
            if reading is not None and graphs is not None:
                graphs.hold(reading)
        except BaseException:
            target.abandon()
            raise
        return LaunchedBatch(target, passage, pixels, self._events)

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
            items: list[TowerItem] = [PatchItem(patches, grid), FrameItem(frames_THWC, grid)]
            if self._resizing is not None:
                items.append(self._resizing.blank(grid, tower))
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
        passage: Passage,
    ) -> None:
        staging, cuts, compute = self._pixels, self._cuts, self._streams.compute
        assert staging is not None
        assert cuts is not None
        graphs.begin()
        num_items = len(uploads)
        rows = staging.rows_of(b"".join([one.row for one in uploads]), num_items)
        batch = graphs.shape_of(rows)
        bucket = graphs.choose(batch)
        # A side beyond the tables', which only a longer sequence can have, is refused with the rest below.
        if bucket is None or batch.max_seqlen > MAX_SIDE or not staging.fits(batch.totals, num_items):
            # Eager or unstaged, and in the compute stream from start to end.
            inputs = graphs.prepare([item.grid for item in items])
            compute.record(passage.started)
            graphs.launch(inputs, lambda out: self._write_unstaged(out, items, uploads), target.write)
            return
        all_pinned = batch.totals[IS_PINNED] == num_items
        if batch.totals[IS_PACKED]:
            packed = [one.packed for one in uploads]
            slot = staging.send(rows, pixels, passage, all_pinned=all_pinned, packed=packed)
            pixels = [one.staged for one in uploads]
        else:
            slot = staging.send(rows, pixels, passage, all_pinned=all_pinned)
        graphs.stage(batch, bucket, rows, slot.first_byte, passage)
        # Not before the metadata: a device that has nothing to do would count the host's work as its own.
        compute.record(passage.started)
        cuts.write(bucket, items, slot, rows, pixels)
        graphs.forward(batch, bucket, target)

    @torch.inference_mode()
    def _launch_plain(
        self,
        items: Sequence[TowerItem],
        uploads: Sequence[Upload],
        target: RowTarget,
        passage: Passage,
    ) -> None:
        compute = self._streams.compute
        compute.record(passage.started)
        compute.run(lambda: target.write(self._run_plain(items, uploads)))

    def _write_unstaged(
        self, out: torch.Tensor, items: Sequence[TowerItem], uploads: Sequence[Upload]
    ) -> None:
        first = 0
        for item, upload in zip(items, uploads, strict=True):
            rows = out[first : first + item.grid.num_patches]
            if upload.packed is not None:
                self._cutter.cut(resized(upload.pixels, upload.packed, self._device), rows)
            elif isinstance(item, FrameItem):
                self._cutter.cut(upload.pixels.to(self._device, non_blocking=True), rows)
            else:
                rows.copy_(upload.pixels, non_blocking=True)
            first += item.grid.num_patches

    def _run_plain(self, items: Sequence[TowerItem], uploads: Sequence[Upload]) -> torch.Tensor:
        tower = self._tower
        grids = [item.grid for item in items]
        pixel_values = torch.empty(
            sum(grid.num_patches for grid in grids), tower.patch_dim, dtype=tower.dtype, device=self._device
        )
        self._write_unstaged(pixel_values, items, uploads)
        rows: torch.Tensor = tower(tower.prepare(grids).to(self._device).with_pixels(pixel_values))
        return rows


class LaunchedBatch:
    """A batch that the device was handed. passage: its events are given back to ``pool`` when it was waited
    for. held: host memory that its transfers read; shared with the slot that it travels into, and emptied for
    both."""

    __slots__ = ("_device_s", "_held", "_passage", "_pool", "_target")

    def __init__(
        self,
        target: RowTarget,
        passage: Passage,
        held: list[torch.Tensor],
        pool: deque[tuple[Event, Event]],
    ) -> None:
        self._target = target
        self._passage = passage
        self._held = held
        self._pool = pool
        self._device_s = 0.0

    def wait(self) -> float:
        self._target.wait()
        self._held.clear()
        passage = self._passage
        if not passage.over:
            self._device_s = passage.started.elapsed_time(passage.ended) / 1e3
            passage.over = True  # before the events can be taken again
            self._pool.append((passage.started, passage.ended))
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
