"""One image, or a tensor that its caller preprocessed, from its content to pixels that the device can take.

Owns the order: its size first, on a worker, then room for its patches, then its pixels, which
a worker makes. What files and tensors mean is ``ingest``'s, where pixels go is ``tower_run``'s, clips are
``clip_run``'s. Used from the event loop only.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from encoder_service.errors import ImageTooLarge, UndecodableImage, UnsupportedContent
from encoder_service.flights import Flight
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.load import DeviceLoad
from encoder_service.scheduler.admission import Permit
from encoder_service.towers.tower import Tower
from encoder_service.types import (
    DigestOnly,
    EncodedFile,
    FrameArray,
    Grid,
    Item,
    LoadedPixels,
    LoadPixels,
    PixelValues,
)


@dataclass(frozen=True)
class IngestRun:
    """max_patches: of one item. clock: seconds."""

    preprocessor: Preprocessor
    tower: Tower
    load: DeviceLoad
    workers: Executor
    max_patches: int
    clock: Callable[[], float]

    @functools.cached_property
    def _place(self) -> tuple[torch.device, torch.dtype]:
        """Where the tower is, which looks for it in its parameters."""
        return self.tower.device, self.tower.dtype

    async def admitted(self, flight: Flight, item: Item, permit: Permit) -> tuple[Grid, LoadPixels]:
        """The item's grid, admitted by its patches before any is decoded, and what makes its pixels on a
        worker; fills in the flight's timings. Raises what the preprocessor does of a header, GridMismatch,
        ImageTooLarge, QueueFull, UnsupportedContent; what is returned raises what the preprocessor does of
        pixels."""
        preprocessor = self.preprocessor
        started_s = self.clock()
        match item.content:
            case EncodedFile():
                grid = await asyncio.get_running_loop().run_in_executor(
                    self.workers, preprocessor.probe_grid, item
                )
            case PixelValues():
                grid = preprocessor.probe_grid(item)
                self.tower.check_grid(grid)
            case FrameArray() | DigestOnly():
                raise UnsupportedContent(f"{type(item.content).__name__} is no single picture")
        self._admit(flight, grid, permit)
        flight.timings.admit_ms = (self.clock() - started_s) * 1e3
        return grid, functools.partial(self._load, item, grid)

    def _load(self, item: Item, grid: Grid) -> LoadedPixels:
        """On a worker: pixels where the device can read them; pinning counts as resizing."""
        loaded = self.preprocessor.load(item)
        started_s = self.clock()
        ready = pinned(loaded.item, *self._place)
        pinning_ms = 0.0 if ready is loaded.item else (self.clock() - started_s) * 1e3
        if ready.grid != grid:
            raise UndecodableImage(
                f"the file's header promises grid {tuple(grid)}, its pixels give {tuple(ready.grid)}"
            )
        return LoadedPixels(ready, loaded.decode_ms, loaded.resize_ms + pinning_ms)

    def _admit(self, flight: Flight, grid: Grid, permit: Permit) -> None:
        """Takes room for the item's patches and tells its grid. Raises ImageTooLarge, QueueFull."""
        num_patches = grid.num_patches
        if num_patches > self.max_patches:
            raise ImageTooLarge(
                f"the item has {num_patches} patches (grid {tuple(grid)}), at most "
                f"{self.max_patches} are taken",
                num_patches=num_patches,
                max_patches=self.max_patches,
            )
        permit.add_patches(num_patches)
        flight.ticket.num_patches = num_patches
        if self.tower.merges_time:
            flight.ticket.num_frames = grid.t
        else:
            flight.ticket.num_sequences = grid.t
        self.load.add(flight.ticket)
        flight.announced.set_result(grid)
