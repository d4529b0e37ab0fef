"""Pixels in host memory that the device can read by itself.

Owns the last step of ingest on a worker thread: page-locked memory from torch's caching allocator, so that
the engine only starts transfers and never copies or waits. What is pinned at a time is what admission lets
in; blocks are rounded up to powers of two and kept for the next items.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from encoder_service.types import FrameItem, TowerItem

ItemT = TypeVar("ItemT", bound=TowerItem)


def pinned(item: ItemT, device: torch.device, dtype: torch.dtype) -> ItemT:
    """The item as the tower's device takes it: on a GPU pinned, patches in the tower's dtype, which is what
    they would be rounded to there, in half the bytes. On a CPU the item itself."""
    if device.type != "cuda":
        return item
    # The device must be this thread's current one: pinning makes a context on whatever is.
    with torch.cuda.device(device):
        if isinstance(item, FrameItem):
            frames = item.frames_THWC
            ready = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True)
            # By numpy: torch would start a team of threads for each worker that copies.
            np.copyto(ready.numpy(), frames.numpy())
            return replace(item, frames_THWC=ready)
        given = item.pixel_values
        patches = torch.empty(given.shape, dtype=dtype, pin_memory=True)
        return replace(item, pixel_values=patches.copy_(given))
