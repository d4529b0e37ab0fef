"""Staging: what a batch needs, on its way from host memory to the device.

Owns where each field of a bucket's metadata lies, the pinned double buffer in front of the device, and the
two device slots that pixels travel into. All buckets share one piece of device memory for metadata: each
lays its fields out from the start of it.

Pixels are transferred in the upload stream, so that they hide behind the forward pass of the batch before.
What a forward pass reads is written only in the compute stream: pixels from a slot whose transfer is over,
metadata, which is a few kilobytes, straight from the host. A slot is written again only after that.

Nothing here looks at items one by one: what a step has to know of them are the rows of one array, and what
it does to them are operations on its columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.engine.copies import BatchCopies, CopyList
from encoder_service.engine.streams import Streams
from encoder_service.towers.fused_inputs import SHAPE_COLUMNS, BatchShape, FusedInputs

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2
SOURCES = "sources"
# What a step has to know of an item: its shape, then the address and bytes of its pixels in host memory, how
# many frames they are, 0 for patches, and whether the device can read them there by itself.
UPLOAD_COLUMNS = (*SHAPE_COLUMNS, "address", "num_bytes", "num_frames", "is_pinned")
NUM_UPLOAD_COLUMNS = len(UPLOAD_COLUMNS)
ADDRESS, NUM_BYTES, NUM_FRAMES, IS_PINNED = range(len(SHAPE_COLUMNS), NUM_UPLOAD_COLUMNS)


@dataclass(frozen=True)
class Field:
    """One tensor's place: offset_bytes from the start of the memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Where one bucket's fields lie: what FusedInputs has, then ``sources``, where the batch's pixels lie.
    num_bytes: all of it. num_slots: the bucket's sequences. Compared by identity: it is a key on the way of
    every batch."""

    fields: tuple[Field, ...]
    num_bytes: int
    num_slots: int

    @classmethod
    def of(cls, padded: FusedInputs) -> Layout:
        """The layout of a batch padded to its bucket, pixels left out."""
        shapes = {
            name: (value.dtype, tuple(value.shape))
            for name, value in padded.tensors().items()
            if name != "pixel_values"
        }
        shapes[SOURCES] = (torch.int64, (padded.num_slots, 2))
        fields, end = [], 0
        for name, (dtype, shape) in shapes.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            fields.append(Field(name, dtype, shape, end, num_bytes))
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(fields), end, padded.num_slots)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as tensors over uint8 ``memory``."""
        return {
            field.name: memory[field.offset_bytes : field.offset_bytes + field.num_bytes]
            .view(field.dtype)
            .view(field.shape)
            for field in self.fields
        }


class Places(NamedTuple):
    """One layout's part of a metadata slot: the host's whole and its fields, and where it goes."""

    host: torch.Tensor
    static: torch.Tensor
    fields: Mapping[str, npt.NDArray[Any]]


class MetadataSlot:
    """One of the buffers that batches take in turn: host memory, pinned in front of a GPU. copied: the
    transfer out of it is done."""

    def __init__(self, static: torch.Tensor, streams: Streams) -> None:
        self._host = torch.zeros(len(static), dtype=torch.uint8, pin_memory=static.device.type == "cuda")
        self._static = static
        self._places: dict[Layout, Places] = {}
        self.copied = streams.make_blocking_event()

    def places(self, layout: Layout) -> Places:
        """Made once for each layout: slices and views cost more than what is written through them."""
        known = self._places.get(layout)
        if known is None:
            fields = {name: view.numpy() for name, view in layout.views(self._host).items()}
            size = layout.num_bytes
            known = self._places[layout] = Places(self._host[:size], self._static[:size], fields)
        return known


class Staging:
    """Double-buffered transfer of metadata into the device memory ``static`` [bytes], uint8, in the compute
    stream's order. The host does not wait, except for the transfer of the batch before the last."""

    def __init__(self, static: torch.Tensor, streams: Streams) -> None:
        self._slots = itertools.cycle([MetadataSlot(static, streams) for _ in range(NUM_SLOTS)])
        self._streams = streams

    def load(self, padded: FusedInputs, layout: Layout) -> None:
        """A batch that was padded; its sources are whatever was there."""
        slot, places = self._next(layout)
        for name, value in padded.tensors().items():
            if name in places.fields:
                places.fields[name][...] = value.numpy()
        self._send(slot, places)

    def load_shape(self, batch: BatchShape, sources: npt.NDArray[np.int64], layout: Layout) -> None:
        """A batch that is laid out where it is transferred from. sources: [I, 2], StagedPixels.sources."""
        slot, places = self._next(layout)
        batch.write(places.fields["table"], layout.num_slots)
        places.fields[SOURCES][: len(sources)] = sources
        self._send(slot, places)

    def _next(self, layout: Layout) -> tuple[MetadataSlot, Places]:
        slot = next(self._slots)
        slot.copied.synchronize()
        return slot, slot.places(layout)

    def _send(self, slot: MetadataSlot, places: Places) -> None:
        compute = self._streams.compute
        compute.run(lambda: places.static.copy_(places.host, non_blocking=True))
        compute.record(slot.copied)


class PixelSlot:
    """Device memory for one batch's pixels. copied: their transfer is done. consumed: so is every read.

    all_memory: uint8 of every slot; memory: this one's part, from first_byte on. held: what the transfer
    reads, kept here because the allocator of pinned memory is told of no transfer and would give a piece
    away as soon as it is dropped; whoever has waited for the batch empties the list, and the next batch in
    the slot, which waits for ``copied`` first, replaces it.
    """

    def __init__(self, all_memory: torch.Tensor, index: int, max_items: int, streams: Streams) -> None:
        num_bytes = len(all_memory) // NUM_SLOTS
        self.all_memory = all_memory
        self.first_byte = index * num_bytes
        self.memory = all_memory[self.first_byte : self.first_byte + num_bytes]
        self.address = self.memory.data_ptr()
        self.copies = CopyList(max_items)
        self.held: list[torch.Tensor] = []
        self.copied = streams.make_blocking_event()
        self.consumed = streams.make_event()
        # Memory comes in the compute stream's order: what had it before may yet write to it.
        streams.compute.record(self.consumed)

    def read(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        """What was transferred from ``like``, in its dtype and shape."""
        piece = self.memory[offset_bytes : offset_bytes + like.nbytes]
        return piece.view(like.dtype).view(like.shape)


class StagedPixels(NamedTuple):
    """Pixels on their way into a slot. offsets: int64 [I], the byte of the slot at which each item's begin.
    sources: int64 [I, 2], the same byte in the memory of all slots and how many frames lie there, 0 for
    patches. held: what is transferred, item by item."""

    slot: PixelSlot
    offsets: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    held: list[torch.Tensor]


class PixelStaging:
    """Double-buffered transfer of pixels: uint8 frames, or patches in the tower's dtype, as they lie in host
    memory. num_bytes, max_items: of one slot. copies: how a batch's pixels travel in one call; without it
    they go tensor by tensor."""

    def __init__(
        self,
        num_bytes: int,
        max_items: int,
        device: torch.device,
        streams: Streams,
        copies: BatchCopies | None,
    ) -> None:
        self.num_bytes = num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.max_items = max_items
        self.memory = torch.empty(NUM_SLOTS * num_bytes, dtype=torch.uint8, device=device)
        self._slots = itertools.cycle(
            [PixelSlot(self.memory, index, max_items, streams) for index in range(NUM_SLOTS)]
        )
        self._copies = copies
        self._streams = streams

    def upload(
        self, rows: npt.NDArray[np.int64], pixels: list[torch.Tensor], *, all_pinned: bool
    ) -> StagedPixels | None:
        """Starts the transfer of contiguous host tensors into one slot; None when they do not fit. rows:
        [I, UPLOAD_COLUMNS]. The host waits only for tensors that are not pinned, and for the transfer of the
        batch before the last."""
        sizes = rows[:, NUM_BYTES]
        aligned = (sizes + (ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES
        ends = aligned.cumsum()
        count = len(rows)
        if ends[-1] > self.num_bytes or count > self.max_items:
            return None
        slot, upload = next(self._slots), self._streams.upload
        slot.copied.synchronize()
        slot.held = pixels
        offsets = ends - aligned
        sources = np.empty((count, 2), np.int64)
        np.add(offsets, slot.first_byte, out=sources[:, 0])
        sources[:, 1] = rows[:, NUM_FRAMES]
        upload.wait(slot.consumed)
        batch_copies = self._copies
        if batch_copies is not None and all_pinned:
            copies = slot.copies
            np.add(offsets, slot.address, out=copies.destinations[:count])
            copies.sources[:count] = rows[:, ADDRESS]
            copies.sizes[:count] = sizes
            upload.run_raw(lambda stream: batch_copies.copy(copies, count, stream))
        else:
            upload.run(lambda: copy_each(slot, offsets.tolist(), pixels))
        upload.record(slot.copied)
        return StagedPixels(slot, offsets, sources, pixels)


def copy_each(slot: PixelSlot, offsets: Sequence[int], pixels: Sequence[torch.Tensor]) -> None:
    """Tensors into a slot, in the current stream."""
    places = [slot.memory[offset : offset + one.nbytes] for offset, one in zip(offsets, pixels, strict=True)]
    torch._foreach_copy_(places, [one.view(torch.uint8).view(-1) for one in pixels], non_blocking=True)
