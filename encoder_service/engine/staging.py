"""Staging: a padded batch's metadata from host tensors to fixed device memory, in one transfer.

Owns where each field of a bucket's metadata lies, and the pinned double buffer in front of the device. All
buckets share one piece of device memory: each lays its fields out from the start of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

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


class Slot:
    """One of the buffers that batches take in turn: pinned host memory and, on a GPU, its device twin.

    copied: the transfer out of the host memory is done. consumed: so is the copy out of the device twin.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.views: dict[Layout, dict[str, torch.Tensor]] = {}
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if device.type == "cuda":
            self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.consumed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, padded: FusedInputs, layout: Layout) -> None:
        """The batch's metadata into the host memory."""
        views = self.views.get(layout)
        if views is None:
            views = self.views[layout] = layout.views(self.host)
        for name, view in views.items():
            view.copy_(getattr(padded, name))


class Staging:
    """Double-buffered transfer of metadata.

    The transfer runs on a stream of its own, so that it hides behind the forward pass of the batch before;
    what the forward pass reads is written only by a copy on the device, in the compute stream's order.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._slots = itertools.cycle([Slot(num_bytes, device) for _ in range(NUM_SLOTS)])
        self.copy_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self, padded: FusedInputs, layout: Layout, static: torch.Tensor) -> None:
        """``padded`` into the device memory ``static`` [bytes], uint8, in the current stream's order. The
        host does not wait, except for the transfer of the batch before the last."""
        slot = next(self._slots)
        size = layout.num_bytes
        if self.copy_stream is None:
            slot.write(padded, layout)
            static[:size].copy_(slot.host[:size])
            return
        slot.copied.synchronize()
        slot.write(padded, layout)
        compute = torch.cuda.current_stream(static.device)
        self.copy_stream.wait_event(slot.consumed)
        with torch.cuda.stream(self.copy_stream):
            slot.device[:size].copy_(slot.host[:size], non_blocking=True)
            slot.copied.record()
        compute.wait_event(slot.copied)
        static[:size].copy_(slot.device[:size], non_blocking=True)
        slot.consumed.record(compute)
