"""Staging: what a batch needs, on its way from host memory to the device.

Owns where each field of a bucket's metadata lies, the pinned buffers in front of the device, the two device
slots that pixels travel into, and the arrays in which a batch's items are added up. All buckets share one
piece of device memory for metadata: each lays its fields out from the start of it.

Pixels are transferred in the upload stream, so that they hide behind the forward pass of the batch before.
What a forward pass reads is written only in the compute stream: pixels from a slot whose transfer is over,
metadata, which is a few kilobytes, straight from the host. A slot is written again only after that.

Everything is copied by address. The metadata's buffers are pinned for good, so that torch's allocator of
pinned memory, which such copies are not reported to, has nothing to give away; pixels are kept until their
batch was waited for.

Nothing here looks at items one by one: what a step has to know of them are the rows of one array, and what
it does to them are operations on its columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.engine.copies import Copies, CopyList, Memory
from encoder_service.engine.streams import Passage, Streams
from encoder_service.towers.fused_inputs import (
    SHAPE_COLUMNS,
    BatchShape,
    FusedInputs,
    RowArrays,
    ShapeRows,
    TablePlaces,
)

if TYPE_CHECKING:
    from encoder_service.engine.resizing import Packed, ResizeStage

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2
# More than batches in flight: the host never waits for one whose metadata is still to be read.
NUM_METADATA_SLOTS = 4
SOURCES = "sources"
# What a step has to know of an item: its shape, then the address and bytes of its pixels in host memory, how
# many frames they are, 0 for patches, whether the device can read them there by itself, and whether they are
# an image that it resizes on the way: the bytes are those of the result then.
UPLOAD_COLUMNS = (*SHAPE_COLUMNS, "address", "num_bytes", "num_frames", "is_pinned", "is_packed")
NUM_UPLOAD_COLUMNS = len(UPLOAD_COLUMNS)
ADDRESS, NUM_BYTES, NUM_FRAMES, IS_PINNED, IS_PACKED = range(len(SHAPE_COLUMNS), NUM_UPLOAD_COLUMNS)
# Beside them, in a batch's arrays: bytes in the slot.
ALIGNED_BYTES = NUM_UPLOAD_COLUMNS


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


class UploadRows(ShapeRows):
    """UPLOAD_COLUMNS of each item of a batch, and where in a slot its pixels go."""

    __slots__ = ("_aligned", "_given", "_sizes", "num_frames", "offsets")

    def __init__(self, values: npt.NDArray[np.int64], sums: npt.NDArray[np.int64], num_items: int) -> None:
        super().__init__(values, sums, num_items)
        self._given = self.values[:NUM_UPLOAD_COLUMNS].T
        self._sizes = self.values[NUM_BYTES]
        self._aligned = self.values[ALIGNED_BYTES]
        self.num_frames = self.values[NUM_FRAMES]
        self.offsets = self.sums[ALIGNED_BYTES, :num_items]

    def fill(self, rows: npt.NDArray[np.int64]) -> None:
        """rows: [I, UPLOAD_COLUMNS]."""
        self._given[:] = rows
        np.add(self._sizes, ALIGNMENT_BYTES - 1, self._aligned)
        np.bitwise_and(self._aligned, -ALIGNMENT_BYTES, self._aligned)


class UploadArrays(RowArrays):
    """Memory for the upload rows of one batch after another, which the driver reads as a list of copies.
    Views for each number of items are made once."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, NUM_UPLOAD_COLUMNS + 1)
        self.capacity = capacity
        self.copies = CopyList(
            np.zeros(capacity, np.int64), self.values[ADDRESS, 1:], self.values[NUM_BYTES, 1:]
        )
        self._rows: dict[int, UploadRows] = {}

    def rows(self, num_items: int) -> UploadRows:
        known = self._rows.get(num_items)
        if known is None:
            known = self._rows[num_items] = UploadRows(self.values, self.sums, num_items)
        return known


class TransferPlaces:
    """Where a batch's metadata is written in pinned memory. offsets, frames: StagedPixels.sources."""

    __slots__ = ("frames", "offsets", "table")

    def __init__(self, table: TablePlaces, sources: npt.NDArray[np.int64]) -> None:
        self.table = table
        self.offsets, self.frames = sources[:, 0], sources[:, 1]


class Places:
    """One layout's part of a metadata slot."""

    def __init__(self, memory: torch.Tensor, layout: Layout) -> None:
        views = layout.views(memory)
        self.fields: dict[str, npt.NDArray[Any]] = {name: view.numpy() for name, view in views.items()}
        self._num_slots = layout.num_slots
        self._stills: dict[int, TransferPlaces] = {}

    def of(self, batch: BatchShape) -> TransferPlaces:
        """Made once for each number of items, where each is one sequence: slices cost more than what is
        written through them."""
        num_items = batch.num_items
        if batch.num_sequences != num_items:
            return self._make(num_items, batch.num_sequences)
        known = self._stills.get(num_items)
        if known is None:
            known = self._stills[num_items] = self._make(num_items, num_items)
        return known

    def _make(self, num_items: int, num_sequences: int) -> TransferPlaces:
        table = TablePlaces(self.fields["table"], self._num_slots, num_items, num_sequences)
        return TransferPlaces(table, self.fields[SOURCES][:num_items])


class MetadataSlot:
    """One of the buffers that batches take in turn: host memory, pinned in front of a GPU. user: the batch
    whose metadata it was last."""

    def __init__(self, num_bytes: int, device: torch.device, streams: Streams) -> None:
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.memory = Memory(self._host)
        self._places: dict[Layout, Places] = {}
        event = streams.make_blocking_event()
        # Of batches that bring no passage: the event is behind the transfer.
        self.own = Passage(event, event)
        self.user = self.own

    def places(self, layout: Layout) -> Places:
        known = self._places.get(layout)
        if known is None:
            known = self._places[layout] = Places(self._host, layout)
        return known


class Staging:
    """Transfer of metadata into the device memory ``static`` [bytes], uint8, in the compute stream's order.
    The host does not wait, except for the batch that had the slot NUM_METADATA_SLOTS before."""

    def __init__(self, static: torch.Tensor, streams: Streams, copies: Copies) -> None:
        slots = [MetadataSlot(len(static), static.device, streams) for _ in range(NUM_METADATA_SLOTS)]
        self._slots = itertools.cycle(slots)
        self._static = Memory(static)
        self._compute = streams.compute
        self._copies = copies

    def load(self, padded: FusedInputs, layout: Layout) -> None:
        """A batch that was padded; its sources are whatever was there."""
        slot = next(self._slots)
        slot.user.wait_on_host()
        slot.user = slot.own
        fields = slot.places(layout).fields
        for name, value in padded.tensors().items():
            if name in fields:
                fields[name][...] = value.numpy()
        self._compute.copy(self._copies, self._static, slot.memory, layout.num_bytes)
        self._compute.record(slot.own.ended)

    def load_shape(
        self, batch: BatchShape, rows: UploadRows, first_byte: int, layout: Layout, passage: Passage
    ) -> None:
        """A batch that is laid out where it is transferred from, and whose pixels lie from ``first_byte`` on
        in the memory of all slots. passage: its own, ended behind everything that follows."""
        slot = next(self._slots)
        slot.user.wait_on_host()
        slot.user = passage
        places = slot.places(layout).of(batch)
        batch.write(places.table)
        np.add(rows.offsets, first_byte, places.offsets)
        places.frames[:] = rows.num_frames
        self._compute.copy(self._copies, self._static, slot.memory, layout.num_bytes)


class PixelSlot:
    """Device memory for one batch's pixels. copied: their transfer is done. user: the batch that had the slot
    last, whose end is behind every read.

    all_memory: uint8 of every slot; memory: this one's part, from first_byte on. held: what the transfer
    reads, kept here because the allocator of pinned memory is told of no transfer and would give a piece
    away as soon as it is dropped; whoever has waited for the batch empties the list, and the next batch in
    the slot, which else waits for ``copied`` first, replaces it.
    """

    def __init__(self, all_memory: torch.Tensor, index: int, streams: Streams) -> None:
        num_bytes = len(all_memory) // NUM_SLOTS
        self.index = index
        self.all_memory = all_memory
        self.first_byte = index * num_bytes
        self.memory = all_memory[self.first_byte : self.first_byte + num_bytes]
        self.address = self.memory.data_ptr()
        self.held: list[torch.Tensor] = []
        self.copied = streams.make_blocking_event()
        event = streams.make_event()
        self.user = Passage(event, event)
        # Memory comes in the compute stream's order: what had it before may yet write to it.
        streams.compute.record(event)

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

    @classmethod
    def of(cls, slot: PixelSlot, rows: UploadRows, held: list[torch.Tensor]) -> StagedPixels:
        """In memory of its own, which the next batch does not change."""
        sources = np.stack((rows.offsets + slot.first_byte, rows.num_frames), 1)
        return cls(slot, rows.offsets.copy(), sources, held)


class PixelStaging:
    """Double-buffered transfer of pixels: uint8 frames, or patches in the tower's dtype, as they lie in host
    memory. num_bytes, max_items: of one slot. copies: how a batch's pixels travel in one call; where it takes
    no addresses, or without it, they go tensor by tensor. resizes: where images are resized on the way."""

    def __init__(
        self,
        num_bytes: int,
        max_items: int,
        device: torch.device,
        streams: Streams,
        copies: Copies | None,
        resizes: ResizeStage | None = None,
    ) -> None:
        self.num_bytes = num_bytes = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.memory = torch.empty(NUM_SLOTS * num_bytes, dtype=torch.uint8, device=device)
        self._slots = itertools.cycle([PixelSlot(self.memory, index, streams) for index in range(NUM_SLOTS)])
        self._arrays = UploadArrays(max_items)
        self._copies = copies
        self._streams = streams
        self._resizes = resizes

    def rows_of(self, joined: bytes | npt.NDArray[np.int64], num_items: int) -> UploadRows:
        """A batch's rows, good until the next call, to be added up. joined: int64 [I, UPLOAD_COLUMNS]."""
        arrays = self._arrays if num_items <= self._arrays.capacity else UploadArrays(num_items)
        rows = arrays.rows(num_items)
        rows.fill(np.frombuffer(joined, np.int64).reshape(num_items, NUM_UPLOAD_COLUMNS))
        return rows

    def fits(self, totals: Sequence[int], num_items: int) -> bool:
        """Whether a slot takes the batch. totals: of its rows."""
        return totals[ALIGNED_BYTES] <= self.num_bytes and num_items <= self._arrays.capacity

    def send(
        self,
        rows: UploadRows,
        pixels: list[torch.Tensor],
        passage: Passage,
        *,
        all_pinned: bool,
        packed: Sequence[Packed | None] = (),
    ) -> PixelSlot:
        """Starts the transfer of contiguous host tensors into one slot, and has the compute stream wait for
        it. rows: of a batch that fits, added up. packed: of each item, where some are resized on the way.
        passage: the batch's own, ended behind the last read of the slot, also when this raised. The host
        waits only for tensors that are not pinned, and for the transfer of the batch before the last where
        nobody has waited for that batch."""
        slot, upload = next(self._slots), self._streams.upload
        if not slot.user.over:
            slot.copied.synchronize()
            upload.wait(slot.user.ended)
        slot.user, slot.held = passage, pixels
        try:
            if packed:
                assert self._resizes is not None, "images are packed for a device that resizes none"
                offsets = rows.offsets.tolist()
                self._resizes.send(slot, offsets, pixels, packed, all_pinned=all_pinned)
            elif self._copies is not None and self._copies.by_address and all_pinned:
                pieces = self._arrays.copies
                np.add(rows.offsets, slot.address, pieces.destinations[: len(pixels)])
                upload.copy_many(self._copies, pieces, len(pixels))
            else:
                offsets = rows.offsets.tolist()
                upload.run(lambda: copy_each(slot, offsets, pixels))
        finally:
            upload.record(slot.copied)
            self._streams.compute.wait(slot.copied)
        return slot

    def upload(
        self, rows: npt.NDArray[np.int64], pixels: list[torch.Tensor], *, all_pinned: bool
    ) -> StagedPixels | None:
        """``send`` of a batch of which only this is known, for whoever waits for what reads the slot before
        the call after the next; None when it does not fit."""
        found = self.rows_of(np.ascontiguousarray(rows), len(rows))
        if not self.fits(found.add_up(), len(rows)):
            return None
        event = self._streams.make_event()
        slot = self.send(found, pixels, Passage(event, event), all_pinned=all_pinned)
        self._streams.compute.record(event)
        return StagedPixels.of(slot, found, pixels)


def copy_each(slot: PixelSlot, offsets: Sequence[int], pixels: Sequence[torch.Tensor]) -> None:
    """Tensors into a slot, in the current stream."""
    places = [slot.memory[offset : offset + one.nbytes] for offset, one in zip(offsets, pixels, strict=True)]
    torch._foreach_copy_(places, [one.view(torch.uint8).view(-1) for one in pixels], non_blocking=True)
