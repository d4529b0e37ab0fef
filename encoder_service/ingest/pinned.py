"""Pixels, and rows without a slot, in pinned host memory, which a GPU copies asynchronously.

Owns the last step of ingest on a worker thread. Torch's caching allocator provides the memory. It rounds
blocks up to powers of two and keeps them for later items. Admission limits how much is pinned at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from encoder_service.types import FrameItem, TowerItem

ItemT = TypeVar("ItemT", bound=TowerItem)


def pinned(item: ItemT, device: torch.device, dtype: torch.dtype) -> ItemT:
    """Copies the item to pinned memory if the tower is on a GPU; returns the item itself on a CPU. Patches
    are converted to the tower's dtype, to which the device would round them anyway."""
    if device.type != "cuda":
        return item
    # Pinning creates a context on the thread's current device.
    with torch.cuda.device(device):
        if isinstance(item, FrameItem):
            frames = item.frames_THWC
            ready = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True)
            # Uses numpy, because torch would start a team of threads for each worker that copies.
            np.copyto(ready.numpy(), frames.numpy())
            return replace(item, frames_THWC=ready)
        given = item.pixel_values
        patches = torch.empty(given.shape, dtype=dtype, pin_memory=True)
        return replace(item, pixel_values=patches.copy_(given))


def host_rows(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Memory for rows that have no slot, pinned if the tower is on a GPU. Pinning a gigabyte takes a
    second."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    with torch.cuda.device(device):
        return torch.empty(shape, dtype=dtype, pin_memory=True)
