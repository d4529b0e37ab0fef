"""Pixels on their way to the device, double-buffered so that they travel behind the batch before.

Owns the two slots of device memory that pixels are transferred into, in the upload stream, and the events
that keep a slot until its pixels have been read. Leaves what happens to the pixels there to ``patches``.

The transfers are torch's own: its allocator of pinned memory keeps a tensor's memory until the copies that
read it are over. Pixels that are not pinned arrive as well, at the cost of the calling thread's time.
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
    """Device memory for one batch's pixels: this part of the staging's, from first_byte on. sources_I2: int64
    [max_items, 2]. uploaded: behind the latest transfer into the slot. read: behind the latest read of it, in
    the compute stream."""

    first_byte: int
    sources_I2: torch.Tensor
    uploaded: Event
    read: Event


@dataclass(frozen=True)
class UploadedPixels:
    """A batch's pixels in a slot; valid in the compute stream until ``PixelStaging.release``.

    memory: uint8, that of all slots. sources_I2: int64 [max_items, 2], for each item the byte of ``memory``
    at which its pixels begin and the number of its frames, 0 for patches. pieces: each item's pixels, views
    of the slot.
    """

    slot: PixelSlot
    memory: torch.Tensor
    pieces: list[torch.Tensor]

    @property
    def sources_I2(self) -> torch.Tensor:
        return self.slot.sources_I2


class PixelStaging:
    """num_bytes, max_items: of one slot."""

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
            # Memory is allocated in the compute stream's order: earlier work may still write there.
            streams.compute.record(slot.read)
            slots.append(slot)
        self._slots = itertools.cycle(slots)

    def fits(self, pixels: Sequence[torch.Tensor]) -> bool:
        """Whether a slot takes the batch."""
        return (
            len(pixels) <= self._max_items and sum(aligned(one.nbytes) for one in pixels) <= self._num_bytes
        )

    def upload(self, pixels: Sequence[torch.Tensor], num_frames: Sequence[int]) -> UploadedPixels:
        """Starts the transfer of a batch that fits and has the compute stream wait for it. pixels: contiguous
        host tensors, one for each item, unchanged until the batch has ended. num_frames: of each item, 0 for
        patches."""
        slot, upload = next(self._slots), self._streams.upload
        memory = {dtype: self._memory.view(dtype) for dtype in {one.dtype for one in pixels}}
        pieces, sources, first_byte = [], [], slot.first_byte
        for one, frames in zip(pixels, num_frames, strict=True):
            # One call an item; a slice, its dtype and its shape would take three.
            pieces.append(memory[one.dtype].as_strided(one.shape, one.stride(), first_byte // one.itemsize))
            sources.append((first_byte, frames))
            first_byte += aligned(one.nbytes)
        given_I2 = torch.tensor(sources, dtype=torch.int64, pin_memory=self._pins)

        def transfer() -> None:
            torch._foreach_copy_(pieces, list(pixels), non_blocking=True)
            slot.sources_I2[: len(pixels)].copy_(given_I2, non_blocking=True)

        upload.wait(slot.read)
        upload.run(transfer)
        upload.record(slot.uploaded)
        self._streams.compute.wait(slot.uploaded)
        return UploadedPixels(slot, self._memory, pieces)

    def release(self, uploaded: UploadedPixels) -> None:
        """The next batch may have the slot once what the compute stream was handed so far is over."""
        self._streams.compute.record(uploaded.slot.read)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
