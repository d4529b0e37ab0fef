"""Uploads pixels to the device, double-buffered, so that the upload overlaps with the batch before.

Owns two slots of device memory that the upload stream fills, and the events that keep a slot until its pixels
have been read. ``patches`` reads the pixels.

The transfers use torch's allocator of pinned memory, which keeps a tensor's memory until the copies that read
it have ended. Pixels that are not pinned are transferred too, but block the calling thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encoder_service.engine.streams import Event, Streams

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2


@dataclass(frozen=True)
class PixelSlot:
    """A part of the device memory, for one batch's pixels. first_byte: where it begins. sources_I2: int64
    [max_items, 2]. uploaded: recorded after the latest transfer into the slot. read: recorded in the compute
    stream after the latest read of the slot."""

    first_byte: int
    sources_I2: torch.Tensor
    uploaded: Event
    read: Event


@dataclass(frozen=True)
class UploadedPixels:
    """A batch's pixels in a slot. Valid in the compute stream until ``PixelStaging.release``.

    memory: uint8, the memory of all slots. sources_I2: int64 [max_items, 2]; per item, the offset in bytes of
    its pixels in ``memory``, and the number of its frames (0 for patches). pieces: each item's pixels as a
    view of the slot.
    """

    slot: PixelSlot
    memory: torch.Tensor
    pieces: list[torch.Tensor]

    @property
    def sources_I2(self) -> torch.Tensor:
        return self.slot.sources_I2


class PixelStaging:
    """The slots and their transfers. num_bytes, max_items: capacity of one slot."""

    def __init__(self, num_bytes: int, max_items: int, device: torch.device, streams: Streams) -> None:
        num_bytes = aligned(num_bytes) + max_items * ALIGNMENT_BYTES
        self._num_bytes, self._max_items = num_bytes, max_items
        self._streams = streams
        self._pins = device.type == "cuda"
        self._memory = torch.empty(NUM_SLOTS * num_bytes, dtype=torch.uint8, device=device)
        slots = []
        for first_byte in range(0, NUM_SLOTS * num_bytes, num_bytes):
            sources_I2 = torch.zeros(max_items, 2, dtype=torch.int64, device=device)
            slot = PixelSlot(first_byte, sources_I2, streams.make_event(), streams.make_event())
            # Waits for earlier work of the compute stream that may still write to the newly allocated memory.
            streams.compute.record(slot.read)
            slots.append(slot)
        self._slots = itertools.cycle(slots)

    def fits(self, pixels: Sequence[torch.Tensor]) -> bool:
        """Whether the batch fits into a slot."""
        return (
            len(pixels) <= self._max_items and sum(aligned(item.nbytes) for item in pixels) <= self._num_bytes
        )

    def upload(self, pixels: Sequence[torch.Tensor], num_frames: Sequence[int]) -> UploadedPixels:
        """Starts the transfer of a batch that fits, and makes the compute stream wait for it. pixels: one
        contiguous host tensor per item, which must not change until the batch has ended. num_frames: frames
        per item, 0 for patches."""
        slot, upload = next(self._slots), self._streams.upload
        memory = {dtype: self._memory.view(dtype) for dtype in {item.dtype for item in pixels}}
        pieces, sources, first_byte = [], [], slot.first_byte
        for item, frames in zip(pixels, num_frames, strict=True):
            # One call per item instead of three for a slice, its dtype and its shape.
            pieces.append(
                memory[item.dtype].as_strided(item.shape, item.stride(), first_byte // item.itemsize)
            )
            sources.append((first_byte, frames))
            first_byte += aligned(item.nbytes)
        host_I2 = torch.tensor(sources, dtype=torch.int64, pin_memory=self._pins)

        def transfer() -> None:
            torch._foreach_copy_(pieces, list(pixels), non_blocking=True)
            slot.sources_I2[: len(pixels)].copy_(host_I2, non_blocking=True)

        upload.wait(slot.read)
        upload.run(transfer)
        upload.record(slot.uploaded)
        self._streams.compute.wait(slot.uploaded)
        return UploadedPixels(slot, self._memory, pieces)

    def release(self, uploaded: UploadedPixels) -> None:
        """Frees the slot for the next batch after the work that is queued in the compute stream so far."""
        self._streams.compute.record(uploaded.slot.read)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
