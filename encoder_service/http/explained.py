"""The answer for the admin page's playground: pictures instead of rows.

Owns what the page shows of an item: its figures, the pixels that the tower sees, and its rows as colours.
Worker threads make the pictures, whose sizes are bounded.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from encoder_service.http.answers import JSON_TYPE, Answer, AnsweredCall, described
from encoder_service.http.requests import RequestedItem
from encoder_service.pipeline import EncodeResult, Pipeline, holder_of
from encoder_service.types import EncodedFile, FrameItem, Item, Modality

NAMESPACE = "admin/playground"
MAX_PREVIEW_SIDE = 1024
# The colours are fitted to this many rows; the others are projected.
MAX_FITTED_ROWS = 512
MAX_COLOURED_ROWS = 65_536


async def explained(call: AnsweredCall, accept: str) -> Answer:  # noqa: ARG001 - always JSON
    """The fields of ``AnsweredItem`` without rows, and for an item that has them those of ``_explain``."""
    pipeline, items = call.pipeline, described(call)
    for entry, item, outcome in zip(items, call.items, call.outcomes, strict=True):
        if isinstance(outcome, EncodeResult):
            run = pipeline.workers.run
            entry |= await run(holder_of(NAMESPACE), _explain, pipeline, item, outcome)
    text = json.dumps({"items": items}).encode()
    return Answer(JSON_TYPE, len(text), iter((text,)))


def _explain(pipeline: Pipeline, item: RequestedItem, result: EncodeResult) -> dict[str, Any]:
    """The figures and pictures of one item. Runs on a worker thread."""
    tower, encoded = pipeline.model.tower, result.encoded
    return {
        "patch_size": tower.patch_size,
        "merge_size": tower.merge_size,
        "target_width": encoded.grid.w * tower.patch_size,
        "target_height": encoded.grid.h * tower.patch_size,
        "num_patches": encoded.grid.num_patches,
        "rows_bytes": encoded.spec.num_bytes,
        "picture": preview(pipeline, item.inline()) if item.is_inline else "",
        "colours": _colours(pipeline, result),
    }


def _colours(pipeline: Pipeline, result: EncodeResult) -> dict[str, Any] | None:
    """The rows as an RGB picture, or None for too many rows."""
    tower, encoded = pipeline.model.tower, result.encoded
    height, width = encoded.grid.h // tower.merge_size, encoded.grid.w // tower.merge_size
    if len(encoded.rows) != height * width or len(encoded.rows) > MAX_COLOURED_ROWS:
        return None
    colours = rows_as_colours(encoded.rows[:, : tower.out_width])
    return {"width": width, "height": height, "rgb": base64.b64encode(colours.tobytes()).decode()}


def preview(pipeline: Pipeline, item: Item) -> str:
    """The pixels that the tower sees (rotated, resized and padded) as a data URL of a JPEG of at most
    MAX_PREVIEW_SIDE pixels a side; empty for what is no image file. Runs on a worker thread."""
    if item.modality is not Modality.IMAGE or not isinstance(item.content, EncodedFile):
        return ""
    frames, _, _ = pipeline.model.preprocessor.open_image(item.content.data, item.options).load()
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
