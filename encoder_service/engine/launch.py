"""One batch on its way through the device: handed over without a wait, waited for by another thread.

Owns the order of a step. Pixels travel into a slot in the upload stream; the compute stream waits for them,
cuts patches into the buffer that graphs read, runs the forward pass, and copies the rows out of it; the
sink takes them from there in the download stream. Which items form the batch, and what happens when it
fails, is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.patches import cutter_for, host_pixels, write_patches
from encoder_service.engine.rows import HostRows, RowSink, RowTarget
from encoder_service.engine.staging import ALIGNMENT_BYTES, PixelStaging
from encoder_service.engine.streams import Event, streams_of
from encoder_service.errors import PixelTensorMismatch
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.towers.tower import Tower
from encoder_service.types import TowerItem

# Room for the gaps between the items of a pixel slot.
MAX_STAGED_ITEMS = 1024


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
        self._cut = cutter_for(preprocessor, device)
        self._pixels: PixelStaging | None = None
        # Ordinary tensors, as those of the graph runner are.
        with torch.inference_mode(False), torch.no_grad():
            if graphs is None:
                self._streams = streams_of(device, clock)
                max_rows = 0
            else:
                self._streams = graphs.streams
                max_rows = graphs.max_rows
                gaps = MAX_STAGED_ITEMS * ALIGNMENT_BYTES
                self._pixels = PixelStaging(graphs.pixel_bytes + gaps, device, self._streams)
            self._sink = sink or HostRows(tower.width, tower.dtype, device, self._streams, max_rows)

    @torch.inference_mode()
    def launch(self, items: Sequence[TowerItem]) -> LaunchedBatch:
        tower, compute = self._tower, self._streams.compute
        sources = [host_pixels(item, tower.dtype) for item in items]
        check_sources(items, sources, tower.patch_dim)
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
        staged = self._pixels.upload(sources)
        if staged is None:  # larger than any bucket: eager, and in the compute stream from start to end
            self._streams.compute.record(started)
            graphs.launch(inputs, lambda out: self._write_unstaged(out, items, sources), target.write)
            return
        slot, offsets = staged

        def write(out: torch.Tensor) -> None:
            pixels = [slot.read(offset, source) for offset, source in zip(offsets, sources, strict=True)]
            write_patches(out, items, pixels, self._cut)

        self._streams.compute.wait(slot.copied)
        self._streams.compute.record(started)
        try:
            graphs.launch(inputs, write, target.write)
        finally:  # also when it failed half way: what was enqueued may read the slot
            self._streams.compute.record(slot.consumed)

    def _write_unstaged(
        self, out: torch.Tensor, items: Sequence[TowerItem], sources: Sequence[torch.Tensor]
    ) -> None:
        pixels = [source.to(self._device, non_blocking=True) for source in sources]
        write_patches(out, items, pixels, self._cut)

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


def check_sources(items: Sequence[TowerItem], sources: Sequence[torch.Tensor], patch_dim: int) -> None:
    """Raises PixelTensorMismatch for patches that are not [P, patch_dim]; frames fail where they are cut."""
    for item, source in zip(items, sources, strict=True):
        needed = (item.grid.num_patches, patch_dim)
        if source.is_floating_point() and source.shape != needed:
            raise PixelTensorMismatch(
                f"pixels have shape {tuple(source.shape)}, grid {tuple(item.grid)} needs {needed}",
                found=list(source.shape),
                needed=list(needed),
            )


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
