"""One image, or a tensor that its caller preprocessed, from its content to pixels that the device can take.

Owns the order: its size first, by a glance or on a worker, then room for its patches, then its pixels, which
a worker makes. What files and tensors mean is ``ingest``'s, where pixels go is ``tower_run``'s, clips are
``clip_run``'s. Used from the event loop only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from encoder_service.engine.patches import looked_through
from encoder_service.engine.resizing import Resizing
from encoder_service.engine.returns import Returns
from encoder_service.errors import ImageTooLarge, UndecodableImage, UnsupportedContent
from encoder_service.flights import Flight
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.preprocessor import Fit, Preprocessor
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
    """max_patches: of one item. clock: seconds. returns: from the workers to the loop. resizing: of images
    that the device resizes; None: the workers resize all."""

    preprocessor: Preprocessor
    tower: Tower
    load: DeviceLoad
    workers: Executor
    returns: Returns
    max_patches: int
    clock: Callable[[], float]
    resizing: Resizing | None = None

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
                fit = None if self.resizing is None else await self._fit(data, item.options)
                grid = preprocessor.glance_at_image(data, item.options) if fit is None else fit.grid
                if grid is None:
                    grid = await self.returns.run(self.workers, preprocessor.probe_image, data, item.options)
                self._admit(flight, grid, permit)
                load: LoadPixels = functools.partial(self._load_image, data, item.options, grid)
                if fit is not None and self.resizing is not None and self.resizing.takes(fit, permit):
                    load = functools.partial(self._load_packed, self.resizing, data, fit)
            case PixelValues() as pixels:
                grid = pixels.grid
                self.tower.check_grid(grid)
                self._admit(flight, grid, permit)
                load = functools.partial(self._check_pixels, pixels)
            case FrameArray() | DigestOnly():
                raise UnsupportedContent(f"{type(item.content).__name__} is no single picture")
        flight.timings.admit_ms = (self.clock() - started_s) * 1e3
        return grid, load

    async def _fit(self, data: bytes, options: PreprocessOptions) -> Fit | None:
        """What becomes of an image, by a glance or on a worker. Raises as ``probe_fit``."""
        fit = self.preprocessor.glance_at_fit(data, options)
        if fit is None:
            fit = await self.returns.run(self.workers, self.preprocessor.probe_fit, data, options)
        return fit

    def _load_image(self, data: bytes, options: PreprocessOptions, grid: Grid) -> LoadedPixels:
        """On a worker: frames where the device can read them; pinning counts as resizing."""
        frames, decode_ms, resize_ms = self.preprocessor.load_image(data, options)
        started_s = self.clock()
        ready = pinned(frames, *self._place)
        if ready is not frames:
            resize_ms += (self.clock() - started_s) * 1e3
        checked = _of_grid(looked_through(ready, self.tower, is_readable=True), grid)
        return LoadedPixels(checked, decode_ms, resize_ms)

    def _load_packed(self, resizing: Resizing, data: bytes, fit: Fit) -> LoadedPixels:
        """On a worker: what the device resizes."""
        frames, decode_ms, resize_ms = resizing.load(self.preprocessor, data, fit, self.tower)
        return LoadedPixels(_of_grid(frames, fit.grid), decode_ms, resize_ms)

    def _check_pixels(self, pixels: PixelValues) -> LoadedPixels:
        """On a worker: checked patches where the device can read them."""
        started_s = self.clock()
        patches = self.preprocessor.check_pixels(pixels)
        ready = looked_through(pinned(patches, *self._place), self.tower, is_readable=True)
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
        flight.ticket.namespace = flight.namespace
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
