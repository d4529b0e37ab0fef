"""The admin page's playground: encodes one image and explains the result.

Owns what the page shows of an item. The image is encoded like any other item, with the same limits, at the
priority of a prefetch. It has a namespace of its own, so that the page reveals nothing about what others have
cached. Worker threads make the pictures and colours, whose sizes are bounded.
"""

from __future__ import annotations

import base64
import io
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from encoder_service.errors import NotReady, QueueFull
from encoder_service.pipeline import EncodeResult, Pipeline, holder_of
from encoder_service.types import EncodedFile, FrameItem, Grid, Item, Modality, PreprocessOptions

NAMESPACE = "admin/playground"
TIMEOUT_S = 30.0
# Images at a time. Each is decoded a second time for the picture.
MAX_AT_ONCE = 2
MAX_PREVIEW_SIDE = 1024
# The colours are fitted to this many rows; the others are projected.
MAX_FITTED_ROWS = 512
MAX_COLOURED_ROWS = 65_536


class Playground:
    """Raises NotReady before ``attach``. max_bytes: limit of a file's size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pipeline: Pipeline | None = None
        self._num_running = 0

    def attach(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def explain(self, data: bytes) -> dict[str, Any]:
        """The grid, rows, timings, the picture that the tower sees and the rows as colours, ready for JSON.
        Raises as ``Pipeline.encode``; QueueFull when MAX_AT_ONCE images are in progress."""
        pipeline = self._pipeline
        if pipeline is None:
            raise NotReady("the model is not loaded yet")
        if self._num_running == MAX_AT_ONCE:
            raise QueueFull(
                f"the playground encodes {MAX_AT_ONCE} images, at most {MAX_AT_ONCE} are taken at a time",
                retry_after_ms=1000,
            )
        self._num_running += 1
        try:
            return await self._explain(pipeline, data)
        finally:
            self._num_running -= 1

    async def _explain(self, pipeline: Pipeline, data: bytes) -> dict[str, Any]:
        item = Item(Modality.IMAGE, EncodedFile(data))
        deadline_s = pipeline.clock() + TIMEOUT_S
        delivered = await pipeline.encode(item, namespace=NAMESPACE, deadline_s=deadline_s, is_prefetch=True)
        permit = None
        try:
            permit = pipeline.admission.acquire(len(data))
            delivered = await pipeline.ensure_tier(delivered, NAMESPACE, "host")
            run = partial(pipeline.workers.run, holder_of(NAMESPACE))
            colours = await run(self._colours, pipeline, delivered)
            picture = await run(preview, pipeline, data)
        finally:
            delivered.release()
            if permit is not None:
                permit.release()
        return {**described(pipeline, delivered), "picture": picture, "colours": colours}

    def _colours(self, pipeline: Pipeline, delivered: EncodeResult) -> dict[str, Any] | None:
        """The rows as an RGB picture, or None for too many rows. Runs on a worker thread."""
        grid, merge = delivered.encoded.grid, pipeline.model.tower.merge_size
        height, width = grid.h // merge, grid.w // merge
        rows = delivered.encoded.rows
        if len(rows) != height * width or len(rows) > MAX_COLOURED_ROWS:
            return None
        colours = rows_as_colours(rows[:, : pipeline.model.tower.out_width])
        return {"width": width, "height": height, "rgb": base64.b64encode(colours.tobytes()).decode()}


def described(pipeline: Pipeline, delivered: EncodeResult) -> dict[str, Any]:
    """The figures of one item."""
    tower, encoded = pipeline.model.tower, delivered.encoded
    grid: Grid = encoded.grid
    return {
        "key": encoded.key.hex(),
        "content_digest": encoded.content_digest.hex(),
        "grid_thw": list(grid),
        "patch_size": tower.patch_size,
        "merge_size": tower.merge_size,
        "target_width": grid.w * tower.patch_size,
        "target_height": grid.h * tower.patch_size,
        "num_patches": grid.num_patches,
        "num_rows": encoded.spec.num_rows,
        "width": encoded.spec.width,
        "num_deepstack_levels": encoded.num_deepstack_levels,
        "dtype": str(encoded.spec.dtype).removeprefix("torch."),
        "rows_bytes": encoded.spec.num_bytes,
        "tier": delivered.tier.value,
        "timings": {name: round(value, 3) for name, value in vars(delivered.timings).items()},
    }


def preview(pipeline: Pipeline, data: bytes) -> str:
    """The pixels that the tower sees (rotated, resized and padded) as a data URL of a JPEG of at most
    MAX_PREVIEW_SIDE pixels a side. Runs on a worker thread."""
    frames, _, _ = pipeline.model.preprocessor.open_image(data, PreprocessOptions()).load()
    assert isinstance(frames, FrameItem)
    image = Image.fromarray(frames.frames_THWC[0].cpu().numpy())
    image.thumbnail((MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def rows_as_colours(rows_RD: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The first three principal components of rows [R, D] as red, green and blue: uint8 [R, 3].

    Each component is scaled from its first to its 99th percentile. Rows that do not differ become grey. The
    components come from the Gram matrix of at most MAX_FITTED_ROWS rows, so that the work is linear in R * D.
    """
    rows: npt.NDArray[np.float32] = rows_RD.detach().float().cpu().numpy()
    rows = np.nan_to_num(rows)
    centred = rows - rows.mean(axis=0)
    step = -(-len(rows) // MAX_FITTED_ROWS)
    sample = centred[::step]
    values, vectors = np.linalg.eigh(sample @ sample.T)
    out = np.full((len(rows), 3), 127, dtype=np.uint8)
    for channel in range(min(3, len(values))):
        value = values[-1 - channel]
        if value <= 1e-6 * max(float(values[-1]), 1e-12) or values[-1] <= 1e-9 * len(rows):
            continue
        component = centred @ (sample.T @ vectors[:, -1 - channel])
        # The sign of a component is arbitrary. Fixing it gives the same picture each time.
        component *= 1.0 if component[np.abs(component).argmax()] >= 0 else -1.0
        low, high = np.percentile(component, (1, 99))
        if high > low:
            out[:, channel] = np.clip((component - low) / (high - low) * 255, 0, 255).astype(np.uint8)
    return out
