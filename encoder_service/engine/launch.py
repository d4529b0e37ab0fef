"""One batch on its way through the device: handed over without a wait, waited for by another thread.

Owns the order of a step. Pixels travel into a slot in the upload stream; the compute stream waits for them,
cuts patches into the buffer that graphs read, runs the forward pass, and copies the rows out of it; the
sink takes them from there in the download stream. Which items form the batch, and what happens when it
fails, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import StagedBatch, cutter_for, host_pixels
from encoder_service.engine.rows import HostRows, RowSink, RowTarget
from encoder_service.engine.staging import ALIGNMENT_BYTES, PixelStaging
from encoder_service.engine.streams import Event, streams_of
from encoder_service.ingest.preprocessor import Preprocessor
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
    def launch(self, items: Sequence[TowerItem]) -> Launched:
        """Hands a batch to the device and returns. Raises what is known to be wrong by then."""

    def probe(self) -> None:
        """Raises what the device failed with, if it has; does not wait."""

    def warm_up(self, grids: Sequence[Grid]) -> None:
        """Runs each grid as patches and as frames, so that no caller waits for a library's first use."""


class TowerLauncher:
    """Runs batches on the fast path, or on the plain tower where there is none.

    clock: seconds. sink: where rows go; host memory when left out. Not thread-safe: one thread launches,
    any thread waits and collects.
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
                self._pixels = PixelStaging(num_bytes, graphs.max_items, device, self._streams)
            self._sink = sink or HostRows(tower.width, tower.dtype, device, self._streams, max_rows)

    @torch.inference_mode()
    def launch(self, items: Sequence[TowerItem]) -> LaunchedBatch:
        tower, compute = self._tower, self._streams.compute
        sources = [host_pixels(item, tower) for item in items]
        target = self._sink.open([tower.num_rows(item.grid) for item in items])
        started, ended = self._streams.make_timed_event(), self._streams.make_timed_event()
        try:
            if self._graphs is not None:
                self._launch_fast(self._graphs, items, sources, target, started)
            else:
                compute.record(started)
                compute.run(lambda: target.write(self._run_plain(items, sources)))
            compute.record(ended)
            target.send(ended)
        except BaseException:
            target.abandon()
            raise
        # Pinned pixels live until the device has read them.
        return LaunchedBatch(target, started, ended, sources if self._device.type == "cuda" else [])

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

    def _launch_fast(
        self,
        graphs: GraphRunner,
        items: Sequence[TowerItem],
        sources: Sequence[torch.Tensor],
        target: RowTarget,
        started: Event,
    ) -> None:
        inputs = graphs.prepare([item.grid for item in items])
        assert self._pixels is not None
        bucket = graphs.can_use(inputs)
        staged = self._pixels.upload(sources) if bucket is not None else None
        if bucket is None or staged is None:  # eager, and in the compute stream from start to end
            self._streams.compute.record(started)
            graphs.launch(inputs, lambda out: self._write_unstaged(out, items, sources), target.write)
            return
        slot, offsets = staged

        def write(out: torch.Tensor) -> None:
            # Not before the metadata: a device that has nothing to do would count the host's work as its own.
            self._streams.compute.record(started)
            self._cutter.cut_staged(StagedBatch(items, slot, offsets, graphs.items(bucket)), out)
            first = 0
            for item, offset, source in zip(items, offsets, sources, strict=True):
                if isinstance(item, PatchItem):
                    rows = out[first : first + item.grid.num_patches]
                    rows.copy_(slot.read(offset, source), non_blocking=True)
                first += item.grid.num_patches

        self._streams.compute.wait(slot.copied)
        try:
            graphs.launch(inputs, write, target.write)
        finally:  # also when it failed half way: what was enqueued may read the slot
            self._streams.compute.record(slot.consumed)

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
    """A batch that the device was handed. sources: host memory that its transfers read."""

    def __init__(
        self, target: RowTarget, started: Event, ended: Event, sources: Sequence[torch.Tensor]
    ) -> None:
        self._target = target
        self._started = started
        self._ended = ended
        self._sources = sources

    def wait(self) -> float:
        self._target.wait()
        self._sources = ()
        return self._started.elapsed_time(self._ended) / 1e3

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
