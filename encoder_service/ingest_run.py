"""One image, or a tensor that its caller preprocessed, from its content to pixels that the device can take.

Owns the order: its size first, by a glance or on a worker, then room for its patches, then its pixels, which
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
    FrameItem,
    Grid,
    Item,
    LoadedPixels,
    LoadPixels,
    PixelValues,
    PreprocessOptions,
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
            case EncodedFile(data):
                grid = preprocessor.glance_at_image(data, item.options)
                if grid is None:
                    grid = await asyncio.get_running_loop().run_in_executor(
                        self.workers, preprocessor.probe_image, data, item.options
                    )
                self._admit(flight, grid, permit)
                load: LoadPixels = functools.partial(self._load_image, data, item.options, grid)
            case PixelValues() as pixels:
                grid = pixels.grid
                self.tower.check_grid(grid)
                self._admit(flight, grid, permit)
                load = functools.partial(self._check_pixels, pixels)
            case FrameArray() | DigestOnly():
                raise UnsupportedContent(f"{type(item.content).__name__} is no single picture")
        flight.timings.admit_ms = (self.clock() - started_s) * 1e3
        return grid, load

    def _load_image(self, data: bytes, options: PreprocessOptions, grid: Grid) -> LoadedPixels:
        """On a worker: frames where the device can read them; pinning counts as resizing."""
        frames, decode_ms, resize_ms = self.preprocessor.load_image(data, options)
        started_s = self.clock()
        ready = pinned(frames, *self._place)
        if ready is not frames:
            resize_ms += (self.clock() - started_s) * 1e3
        return LoadedPixels(_of_grid(ready, grid), decode_ms, resize_ms)

    def _check_pixels(self, pixels: PixelValues) -> LoadedPixels:
        """On a worker: checked patches where the device can read them."""
        started_s = self.clock()
        patches = self.preprocessor.check_pixels(pixels)
        ready = pinned(patches, *self._place)
        return LoadedPixels(ready, (self.clock() - started_s) * 1e3, 0.0)

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


def _of_grid(frames: FrameItem, grid: Grid) -> FrameItem:
    """Raises UndecodableImage where the pixels are not what the header promised."""
    if frames.grid != grid:
        raise UndecodableImage(
            f"the file's header promises grid {tuple(grid)}, its pixels give {tuple(frames.grid)}"
        )
    return frames
