"""One batch on the device: one thread launches it without waiting, another waits for it.

Owns the order of operations. Pixels are copied to the device in the upload stream. The compute stream waits
for them, cuts them into patches in the buffer that graphs read, runs the forward pass and copies the rows out
of the graph's memory. Rows for the host are copied in the download stream. The engine decides which items
form the batch and what happens when it fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import PlainCutter, cutter_for, host_pixels, num_frames
from encoder_service.engine.rows import BatchRows, RowCopier
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import Event, streams_of
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem


class Launched(Protocol):
    """A batch that has been launched."""

    def wait(self) -> float:
        """Blocks until the batch's rows have arrived. Returns the device's time for it in seconds, without
        transfers. Raises the device's failure."""

    def collect(self) -> Iterator[torch.Tensor]:
        """Each item's rows, [R, W]: its destination, or their own host tensor. Call once, after ``wait``."""


class Launcher(Protocol):
    def launch(
        self, items: Sequence[TowerItem], destinations: Sequence[torch.Tensor | None] = ()
    ) -> Launched:
        """Launches a batch and returns. destinations: memory for each item's rows, see ``rows``; empty for
        host memory. Raises errors that are known by then; when it raises, nothing of the batch is still
        running."""

    def probe(self) -> None:
        """Raises the device's failure if there is one. Does not wait."""

    def warm_up(self, grids: Sequence[Grid]) -> None:
        """Runs each grid as patches and as frames, so that no caller waits for a library's initialisation."""


class TowerLauncher:
    """Runs batches on the fast path, or on the plain tower where there is none.

    clock: seconds. Not thread-safe: one thread launches, with the tower's device as its current one. Any
    thread may wait and collect.
    """

    def __init__(
        self,
        tower: Tower,
        preprocessor: Preprocessor,
        graphs: GraphRunner | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._tower = tower
        # Read once: a tower searches its parameters for both.
        self._device, self._dtype = tower.device, tower.dtype
        self._graphs = graphs
        self._cutter = cutter_for(preprocessor, self._device)
        self._plain_cutter = PlainCutter(preprocessor)
        self._streams = streams_of(self._device, clock) if graphs is None else graphs.streams
        self._rows = RowCopier(tower.width, self._dtype, self._device, self._streams)
        self._staging: PixelStaging | None = None
        if graphs is not None:
            with torch.inference_mode(False):  # ordinary tensors, like those of the graph runner
                self._staging = PixelStaging(
                    graphs.pixel_bytes, graphs.max_items, self._device, self._streams
                )

    @torch.inference_mode()
    def launch(
        self, items: Sequence[TowerItem], destinations: Sequence[torch.Tensor | None] = ()
    ) -> LaunchedBatch:
        tower, streams = self._tower, self._streams
        pixels = [host_pixels(item, tower, self._dtype) for item in items]
        counts = [tower.num_rows(item.grid) for item in items]
        rows = self._rows.open(counts, destinations or [None] * len(items))
        started, ended = streams.make_event(), streams.make_event()
        try:
            if self._graphs is None:
                self._launch_plain(items, pixels, rows, started)
            else:
                self._launch_fast(self._graphs, items, pixels, rows, started)
            streams.compute.record(ended)
            rows.send(ended)
        except BaseException:
            self._wait_for_device()
            raise
        return LaunchedBatch(rows, started, ended, pixels)

    def probe(self) -> None:
        self._streams.compute.probe()

    def warm_up(self, grids: Sequence[Grid]) -> None:
        tower = self._tower
        for grid in grids:
            depth, height, width = (
                grid.t * tower.temporal_patch_size,
                grid.h * tower.patch_size,
                grid.w * tower.patch_size,
            )
            for item in (
                PatchItem(torch.zeros(grid.num_patches, tower.patch_dim), grid),
                FrameItem(torch.zeros(depth, height, width, 3, dtype=torch.uint8), grid),
            ):
                launched = self.launch([item])
                launched.wait()
                list(launched.collect())

    def _launch_fast(
        self,
        graphs: GraphRunner,
        items: Sequence[TowerItem],
        pixels: Sequence[torch.Tensor],
        rows: BatchRows,
        started: Event,
    ) -> None:
        compute, staging = self._streams.compute, self._staging
        assert staging is not None
        inputs = graphs.prepare([item.grid for item in items])
        uploaded = None
        if staging.fits(pixels):
            uploaded = staging.upload(pixels, [num_frames(item) for item in items])
        batch = graphs.stage(inputs)
        # Recorded after the metadata was staged, so that the host's work on it does not count as device time.
        compute.record(started)
        if uploaded is None:
            compute.run(lambda: self._cut_directly(items, pixels, batch.pixels))
        else:
            compute.run(lambda: self._cutter.cut(items, uploaded, batch.inputs.items, batch.pixels))
            staging.release(uploaded)
        compute.run(lambda: rows.write(graphs.forward(batch)))

    def _launch_plain(
        self,
        items: Sequence[TowerItem],
        pixels: Sequence[torch.Tensor],
        rows: BatchRows,
        started: Event,
    ) -> None:
        compute = self._streams.compute
        compute.record(started)
        compute.run(lambda: rows.write(self._run_plain(items, pixels)))

    def _run_plain(self, items: Sequence[TowerItem], pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        tower, grids = self._tower, [item.grid for item in items]
        num_patches = sum(grid.num_patches for grid in grids)
        patches = torch.empty(num_patches, tower.patch_dim, dtype=self._dtype, device=self._device)
        self._cut_directly(items, pixels, patches)
        rows: torch.Tensor = tower(tower.prepare(grids).to(self._device).with_pixels(patches))
        return rows

    def _cut_directly(
        self, items: Sequence[TowerItem], pixels: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Transfers pixels in the compute stream, without a staging slot, and cuts them: for the plain tower
        and for batches that no slot takes."""
        pieces = [item_pixels.to(self._device, non_blocking=True) for item_pixels in pixels]
        self._plain_cutter.cut_pieces(items, pieces, out)

    def _wait_for_device(self) -> None:
        """Waits after a batch failed half-way: its enqueued work reads pixels and writes destinations that
        will be reused."""
        for stream in self._streams.all:
            with contextlib.suppress(Exception):  # a failed device is noticed by the next probe
                event = self._streams.make_event()
                stream.record(event)
                event.synchronize()


class LaunchedBatch:
    """A batch that has been launched. pixels: the host memory that its transfers read, kept until they have
    ended."""

    def __init__(self, rows: BatchRows, started: Event, ended: Event, pixels: list[torch.Tensor]) -> None:
        self._rows = rows
        self._started, self._ended = started, ended
        self._pixels = pixels

    def wait(self) -> float:
        self._rows.wait()
        self._pixels.clear()
        return self._started.elapsed_time(self._ended) / 1e3

    def collect(self) -> Iterator[torch.Tensor]:
        return self._rows.collect()
