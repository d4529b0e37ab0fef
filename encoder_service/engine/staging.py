"""Staging: what a batch needs, on its way from host memory to the device.

Owns where each field of a bucket's metadata lies, the pinned double buffer in front of the device, and the
two device slots that pixels travel into. All buckets share one piece of device memory for metadata: each
lays its fields out from the start of it.

Pixels are transferred in the upload stream, so that they hide behind the forward pass of the batch before.
What a forward pass reads is written only in the compute stream: pixels from a slot whose transfer is over,
metadata, which is a few kilobytes, straight from the host. A slot is written again only after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encoder_service.engine.streams import Streams
from encoder_service.towers.fused_inputs import FusedInputs

ALIGNMENT_BYTES = 256
NUM_SLOTS = 2


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
    """Where one bucket's fields lie. num_bytes: all of it. Compared by identity: it is a key on the way of
    every batch."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, padded: FusedInputs) -> Layout:
        """The layout of a batch padded to its bucket, pixels left out."""
        fields, end = [], 0
        for name, value in padded.tensors().items():
            if name == "pixel_values":
                continue
            fields.append(Field(name, value.dtype, tuple(value.shape), end, value.nbytes))
            end += -(-value.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(fields), end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as tensors over uint8 ``memory``."""
        return {
            field.name: memory[field.offset_bytes : field.offset_bytes + field.num_bytes]
            .view(field.dtype)
            .view(field.shape)
            for field in self.fields
        }


class MetadataSlot:
    """One of the buffers that batches take in turn: host memory, pinned in front of a GPU. copied: the
    transfer out of it is done."""

    def __init__(self, num_bytes: int, device: torch.device, streams: Streams) -> None:
        self.views: dict[Layout, dict[str, torch.Tensor]] = {}
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.copied = streams.make_blocking_event()

    def write(self, padded: FusedInputs, layout: Layout) -> None:
        """The batch's metadata into the host memory."""
        views = self.views.get(layout)
        if views is None:
            views = self.views[layout] = layout.views(self.host)
        for name, view in views.items():
            view.copy_(getattr(padded, name))


class Staging:
    """Double-buffered transfer of metadata."""

    def __init__(self, num_bytes: int, device: torch.device, streams: Streams) -> None:
        self._slots = itertools.cycle([MetadataSlot(num_bytes, device, streams) for _ in range(NUM_SLOTS)])
        self._streams = streams

    def load(self, padded: FusedInputs, layout: Layout, static: torch.Tensor) -> None:
        """``padded`` into the device memory ``static`` [bytes], uint8, in the compute stream's order. The
        host does not wait, except for the transfer of the batch before the last."""
        slot, streams, size = next(self._slots), self._streams, layout.num_bytes
        slot.copied.synchronize()
        slot.write(padded, layout)
        streams.compute.run(lambda: static[:size].copy_(slot.host[:size], non_blocking=True))
        streams.compute.record(slot.copied)


class PixelSlot:
    """Device memory for one batch's pixels, and the table that says where they lie. copied: their transfer is
    done. consumed: so is every read.

    memory: uint8 [B]. sources: int64 [I, 2], for each item the byte at which its frames begin and how many
    they are, or -1 for patches.
    """

    def __init__(self, num_bytes: int, max_items: int, device: torch.device, streams: Streams) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.sources = torch.zeros(max_items, 2, dtype=torch.int64, device=device)
        self.host_sources = torch.zeros(max_items, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.copied = streams.make_blocking_event()
        self.consumed = streams.make_event()
        # Memory comes in the compute stream's order: zeros, or what had it before, may yet be written to it.
        streams.compute.record(self.consumed)

    def read(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        """What was transferred from ``like``, in its dtype and shape."""
        piece = self.memory[offset_bytes : offset_bytes + like.nbytes]
        return piece.view(like.dtype).view(like.shape)


class PixelStaging:
    """Double-buffered transfer of pixels: uint8 frames, or patches in the tower's dtype, as they lie in host
    memory. num_bytes, max_items: of one slot."""

    def __init__(self, num_bytes: int, max_items: int, device: torch.device, streams: Streams) -> None:
        self.num_bytes = num_bytes
        self.max_items = max_items
        self._slots = itertools.cycle(
            [PixelSlot(num_bytes, max_items, device, streams) for _ in range(NUM_SLOTS)]
        )
        self._streams = streams

    def upload(self, sources: Sequence[torch.Tensor]) -> tuple[PixelSlot, list[int]] | None:
        """Starts the transfer of contiguous host tensors into one slot; the slot and the byte at which each
        begins, or None when they do not fit. uint8 tensors are frames. The host waits only for tensors that
        are not pinned, and for the transfer of the batch before the last; pinned ones have to live until
        the slot's ``copied`` has passed."""
        sizes = [-(-source.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for source in sources]
        *offsets, total = itertools.accumulate(sizes, initial=0)
        if total > self.num_bytes or len(sources) > self.max_items:
            return None
        slot, count = next(self._slots), len(sources)
        slot.copied.synchronize()
        slot.host_sources.numpy()[:count] = [
            (offset, len(source)) if source.dtype == torch.uint8 else (-1, 0)
            for offset, source in zip(offsets, sources, strict=True)
        ]

        def copy() -> None:
            places = [
                slot.memory[offset : offset + source.nbytes]
                for offset, source in zip(offsets, sources, strict=True)
            ]
            given = [source.view(torch.uint8).view(-1) for source in sources]
            # One call for the whole batch: each copy of its own costs the host as much again.
            torch._foreach_copy_(
                [*places, slot.sources[:count]], [*given, slot.host_sources[:count]], non_blocking=True
            )

        self._streams.upload.wait(slot.consumed)
        self._streams.upload.run(copy)
        self._streams.upload.record(slot.copied)
        return slot, offsets
