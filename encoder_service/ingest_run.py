"""One image, or a tensor that its caller preprocessed, from its content to pixels that the device can take.

Owns the order: its size first, by a glance or on a worker, then room for its patches, then its pixels, on a
worker. What files and tensors mean is ``ingest``'s, clips are ``clip_run``'s. Used from the event loop only.
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
    PatchItem,
    PixelValues,
    PreprocessOptions,
    TowerItem,
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

    async def pixels(self, flight: Flight, item: Item, permit: Permit) -> TowerItem:
        """The item's pixels, admitted by their patches before any is decoded; fills in the flight's timings.
        Raises what the preprocessor does, GridMismatch, ImageTooLarge, QueueFull, UnsupportedContent."""
        preprocessor = self.preprocessor
        started_s = self.clock()
        match item.content:
            case EncodedFile(data):
                fit = None if self.resizing is None else await self._fit(data, item.options)
                grid = preprocessor.glance_at_image(data, item.options) if fit is None else fit.grid
                if grid is None:
                    grid = await self.returns.run(self.workers, preprocessor.probe_image, data, item.options)
                self._admit(flight, grid, permit)
                flight.timings.admit_ms = (self.clock() - started_s) * 1e3
                load = functools.partial(self._load_image, data, item.options)
                if fit is not None and self.resizing is not None and self.resizing.takes(fit, permit):
                    load = functools.partial(self.resizing.load, preprocessor, data, fit, self.tower)
                frames, decode_ms, resize_ms = await self.returns.run(self.workers, load)
                flight.timings.decode_ms = decode_ms
                flight.timings.resize_ms = resize_ms
                if frames.grid != grid:
                    raise UndecodableImage(
                        f"the file's header promises grid {tuple(grid)}, its pixels give {tuple(frames.grid)}"
                    )
                return frames
            case PixelValues():
                self.tower.check_grid(item.content.grid)
                self._admit(flight, item.content.grid, permit)
                flight.timings.admit_ms = (self.clock() - started_s) * 1e3
                checked_s = self.clock()
                patches = await self.returns.run(self.workers, self._check_pixels, item.content)
                flight.timings.decode_ms = (self.clock() - checked_s) * 1e3
                return patches
            case FrameArray() | DigestOnly():
                raise UnsupportedContent(f"{type(item.content).__name__} is no single picture")

    async def _fit(self, data: bytes, options: PreprocessOptions) -> Fit | None:
        """What becomes of an image, by a glance or on a worker. Raises as ``probe_fit``."""
        fit = self.preprocessor.glance_at_fit(data, options)
        if fit is None:
            fit = await self.returns.run(self.workers, self.preprocessor.probe_fit, data, options)
        return fit

    def _load_image(self, data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
        """On a worker: frames where the device can read them; pinning counts as resizing."""
        frames, decode_ms, resize_ms = self.preprocessor.load_image(data, options)
        started_s = self.clock()
        ready = pinned(frames, *self._place)
        if ready is not frames:
            resize_ms += (self.clock() - started_s) * 1e3
        return looked_through(ready, self.tower), decode_ms, resize_ms

    def _check_pixels(self, pixels: PixelValues) -> PatchItem:
        """On a worker: checked patches where the device can read them."""
        patches = self.preprocessor.check_pixels(pixels)
        return looked_through(pinned(patches, *self._place), self.tower)

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
