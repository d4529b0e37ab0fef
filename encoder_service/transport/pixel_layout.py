"""Where a pixel tensor lies in shared memory, and whether what its publisher says of it can be true.

Owns the arithmetic of offsets, shapes and strides, and the copy out of a file into memory of our own. The
copy reads (``preadv``) and never maps: a file that its publisher truncates under a mapping would kill this
process with SIGBUS, a read of it just ends early.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.errors import PixelTensorMismatch

MAX_RANK = 8
SCRATCH_BYTES = 1 << 20
"""Read at a time where elements lie apart."""
MAX_SPREAD = 16
"""The file range that a tensor is spread over, in tensors of its size; beyond it a small tensor would make
us read a large file."""


@dataclass(frozen=True, slots=True)
class PixelLayout:
    """A tensor inside a file. stride_bytes: empty for row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int = 0
    stride_bytes: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the tensor's own elements: what its copy takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, one for each dimension."""
        return self.stride_bytes or row_major(self.shape, self.dtype.itemsize)

    @property
    def span_bytes(self) -> int:
        """From its first element's first byte to its last element's last."""
        return span(self.shape, self.strides, self.dtype.itemsize)

    def check(self, max_bytes: int) -> None:
        """What can be said without the file. Raises PixelTensorMismatch."""
        shape, itemsize = self.shape, self.dtype.itemsize
        if not 1 <= len(shape) <= MAX_RANK:
            raise PixelTensorMismatch(
                f"pixel tensor has {len(shape)} dimensions, 1 to {MAX_RANK} are taken", found=len(shape)
            )
        if 0 in shape:
            raise PixelTensorMismatch(f"pixel tensor of shape {shape} is empty")
        if self.num_bytes > max_bytes:
            raise PixelTensorMismatch(
                f"pixel tensor of shape {shape} has {self.num_bytes} bytes, at most {max_bytes} are taken",
                found_bytes=self.num_bytes,
                max_bytes=max_bytes,
            )
        if self.stride_bytes:
            self._check_strides(itemsize)

    def _check_strides(self, itemsize: int) -> None:
        strides = self.stride_bytes
        if len(strides) != len(self.shape):
            raise PixelTensorMismatch(
                f"pixel tensor has {len(strides)} strides for {len(self.shape)} dimensions",
                found=len(strides),
                needed=len(self.shape),
            )
        reach = itemsize
        for stride, num in sorted(zip(strides, self.shape, strict=True)):
            if num == 1:
                continue  # never stepped
            if stride < 0 or stride % itemsize:
                raise PixelTensorMismatch(
                    f"a stride of {stride} bytes is no multiple of the {itemsize} of an element above zero",
                    stride_bytes=stride,
                    itemsize_bytes=itemsize,
                )
            if stride < reach:
                raise PixelTensorMismatch(
                    f"elements overlap: a stride of {stride} bytes steps into the {reach} of smaller strides",
                    stride_bytes=stride,
                    needed_bytes=reach,
                )
            reach += stride * (num - 1)
        if self.span_bytes > MAX_SPREAD * self.num_bytes + SCRATCH_BYTES:
            raise PixelTensorMismatch(
                f"{self.num_bytes} bytes of elements are spread over {self.span_bytes}, at most "
                f"{MAX_SPREAD} times as many are taken",
                found_bytes=self.span_bytes,
                max_bytes=MAX_SPREAD * self.num_bytes + SCRATCH_BYTES,
            )

    def check_fits(self, file_bytes: int) -> None:
        """Raises PixelTensorMismatch with the file's size and the one needed."""
        end = self.offset_bytes + self.span_bytes
        if end > file_bytes:
            raise PixelTensorMismatch(
                f"the segment has {file_bytes} bytes, a tensor of shape {self.shape} of {self.dtype} with "
                f"strides {self.strides} at offset {self.offset_bytes} needs {end}",
                found_bytes=file_bytes,
                needed_bytes=end,
            )


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a contiguous tensor."""
    strides: list[int] = []
    for num in reversed(shape):
        strides.append(itemsize)
        itemsize *= num
    return tuple(reversed(strides))


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    return sum((num - 1) * stride for num, stride in zip(shape, strides, strict=True)) + itemsize


def read_tensor(descriptor: int, layout: PixelLayout) -> torch.Tensor:
    """The tensor, contiguous, in memory of its own. layout: checked. Raises PixelTensorMismatch when the file
    ends before it, OSError."""
    tensor = torch.empty(layout.shape, dtype=layout.dtype)
    itemsize = layout.dtype.itemsize
    # Elements are only moved: an unsigned integer of their size stands for each, bfloat16 included.
    target = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{itemsize}").reshape(layout.shape)
    # In the file's order, so that each byte of it is read once and forwards.
    stepped = [axis for axis, num in enumerate(layout.shape) if num > 1]
    stepped.sort(key=lambda axis: -layout.strides[axis])
    steps = tuple(layout.strides[axis] for axis in stepped)
    fixed = [axis for axis, num in enumerate(layout.shape) if num == 1]
    target = target.transpose(*fixed, *stepped)[(0,) * len(fixed) + (...,)]
    _Copy(descriptor, itemsize).fill(target, steps, layout.offset_bytes)
    return tensor


class _Copy:
    """One file's elements into arrays."""

    def __init__(self, descriptor: int, itemsize: int) -> None:
        self._descriptor = descriptor
        self._itemsize = itemsize
        self._scratch: npt.NDArray[np.uint8] | None = None

    def fill(self, target: npt.NDArray[np.generic], strides: tuple[int, ...], offset: int) -> None:
        """strides: of the file, in bytes, falling."""
        itemsize = self._itemsize
        if target.flags.c_contiguous and strides == row_major(target.shape, itemsize):
            self._read(target.reshape(-1).view(np.uint8), offset)
            return
        num_bytes = span(target.shape, strides, itemsize)
        if num_bytes <= SCRATCH_BYTES:
            if self._scratch is None:
                self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
            read = self._scratch[:num_bytes]
            self._read(read, offset)
            # An ndarray made from a buffer refuses strides that lead out of it.
            target[...] = np.ndarray(target.shape, target.dtype, read.data, strides=strides)
            return
        num, stride = target.shape[0], strides[0]
        inner_bytes = num_bytes - (num - 1) * stride
        at_once = (SCRATCH_BYTES - inner_bytes) // stride + 1 if inner_bytes <= SCRATCH_BYTES else 1
        if at_once <= 1:
            for index in range(num):
                self.fill(target[index, ...], strides[1:], offset + index * stride)
            return
        for index in range(0, num, at_once):
            self.fill(target[index : index + at_once], strides, offset + index * stride)

    def _read(self, into: npt.NDArray[np.uint8], offset: int) -> None:
        view = into.data
        done = 0
        while done < len(view):
            num_read = os.preadv(self._descriptor, [view[done:]], offset + done)
            if num_read == 0:
                left = os.fstat(self._descriptor).st_size
                raise PixelTensorMismatch(
                    f"the segment was cut to {left} bytes while it was read, {offset + len(view)} are needed",
                    found_bytes=left,
                    needed_bytes=offset + len(view),
                )
            done += num_read
