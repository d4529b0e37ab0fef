"""The one exact resize on a GPU: torch's antialiased bicubic of uint8 images on the CPU, bit for bit.

Owns the tables of both axes, the form in which a picture and its tables travel together, and the two launches
that resize and pad all pictures of a batch. Arithmetic and order are those of torch's CPU kernel
(``UpSampleKernel.cpp`` and ``UpSampleKernelAVXAntialias.h``, after Pillow's ``Resample.c``): weights are made
in float64, normalised, and rounded to 16 bits with as many fractional bits as the largest of an axis leaves
room for; columns first, then rows, uint8 between the two; each sum is of 32-bit integers and rounded once. An
axis whose size stays is not touched there; here its weights are single ones, which change nothing. What size
an image gets is ingest's business.

A packed picture is one piece of memory, so that its way to the device is one copy and nothing about it has
to be looked up there: a header of int32, both axes' tables, pixels. Between its passes it needs as much
memory as its rows take once their columns are resized.

Shape legend: H W of the image, N elements along an axis before, M after it, K taps, I pictures, B bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.expand import find_item, search_steps
from encoder_service.towers.kernels.tiles import check_rows

CHANNELS = 3
# Of the cubic convolution: Pillow's and torch's value with antialiasing.
CUBIC_A = -0.5
CUBIC_SUPPORT = 2.0
MAX_PRECISION = 22
MAX_WEIGHT = 1 << 15
# One, in the weights of an axis whose size stays.
KEPT_PRECISION = 14
BLOCK = 1024
NUM_WARPS = 4
# Tables of an axis are remembered, of at most ten bytes for each element after and eight for each before.
KEPT_TABLES = 128
ALIGNMENT_BYTES = 16

# The header's entries: sizes before, after, and after padding; fractional bits and taps of the columns' and
# rows' weights; at which bytes of the picture the columns' tables begin, the rows' and the pixels.
HEADER = (
    "rows", "columns", "new_rows", "new_columns", "height", "width", "column_bits", "row_bits",
    "column_taps", "row_taps", "column_firsts", "column_weights", "row_firsts", "row_weights", "pixels",
)  # fmt: skip
HEADER_BYTES = 64
ROWS = tl.constexpr(0)
COLUMNS = tl.constexpr(1)
NEW_ROWS = tl.constexpr(2)
NEW_COLUMNS = tl.constexpr(3)
HEIGHT = tl.constexpr(4)
WIDTH = tl.constexpr(5)
COLUMN_BITS = tl.constexpr(6)
ROW_BITS = tl.constexpr(7)
COLUMN_TAPS = tl.constexpr(8)
ROW_TAPS = tl.constexpr(9)
COLUMN_FIRSTS = tl.constexpr(10)
COLUMN_WEIGHTS = tl.constexpr(11)
ROW_FIRSTS = tl.constexpr(12)
ROW_WEIGHTS = tl.constexpr(13)
PIXELS = tl.constexpr(14)

# A launch's table: the first tile of each picture in either pass, the bytes at which the picture and its
# memory between the passes begin in the one memory, and its result in the other.
PLACES = ("first_column_tile", "first_row_tile", "source", "between", "result")
NUM_PLACES = len(PLACES)
FIRST_COLUMN_TILE = tl.constexpr(0)
FIRST_ROW_TILE = tl.constexpr(1)
SOURCE = tl.constexpr(2)
BETWEEN = tl.constexpr(3)
RESULT = tl.constexpr(4)


class AxisTables(NamedTuple):
    """How the M elements after an axis' pass come of its N before: from which first one on, by which weights,
    over 2**precision. first_M: int32; weights_MK: int16, zero where there is nothing to weigh."""

    first_M: npt.NDArray[np.int32]
    weights_MK: npt.NDArray[np.int16]
    precision: int


def num_taps(num_before: int, num_after: int) -> int:
    """K of an axis."""
    if num_before == num_after:
        return 1
    return math.ceil(CUBIC_SUPPORT * max(num_before / num_after, 1.0)) * 2 + 1


def cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The filter at ``x``, in torch's order of operations."""
    x = np.abs(x)
    near = ((CUBIC_A + 2.0) * x - (CUBIC_A + 3.0)) * x * x + 1.0
    far = ((CUBIC_A * x - 5.0 * CUBIC_A) * x + 8.0 * CUBIC_A) * x - 4.0 * CUBIC_A
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@functools.lru_cache(maxsize=KEPT_TABLES)
def axis_tables(num_before: int, num_after: int) -> AxisTables:
    """The tables of an axis from ``num_before`` to ``num_after`` elements, each at least 1. By numpy, which
    starts no threads of its own for each worker."""
    assert num_before >= 1, f"an axis has {num_before} elements, needs 1"
    assert num_after >= 1, f"an axis gets {num_after} elements, needs 1"
    if num_before == num_after:
        ones = np.full((num_after, 1), 1 << KEPT_PRECISION, np.int16)
        return AxisTables(np.arange(num_after, dtype=np.int32), ones, KEPT_PRECISION)
    scale = num_before / num_after
    support = CUBIC_SUPPORT * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    most_taps = num_taps(num_before, num_after)
    centre = scale * (np.arange(num_after, dtype=np.float64) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)  # towards zero, as a cast does
    end = np.minimum((centre + support + 0.5).astype(np.int64), num_before)
    count = np.clip(end - first, 0, most_taps)
    tap = np.arange(most_taps)
    weights = cubic(((tap + first[:, None]) - centre[:, None] + 0.5) * inverse)
    weights = np.where(tap < count[:, None], weights, 0.0)
    total = np.zeros(num_after)
    for column in weights.T:  # one after another, as the sum there is made
        total = total + column
    weights = weights / np.where(total != 0.0, total, 1.0)[:, None]
    largest, precision = float(weights.max()), 0
    while precision < MAX_PRECISION and int(0.5 + largest * (1 << (precision + 1))) < MAX_WEIGHT:
        precision += 1
    scaled = weights * (1 << precision)
    rounded = np.trunc(np.where(scaled < 0.0, scaled - 0.5, scaled + 0.5)).astype(np.int16)
    return AxisTables(first.astype(np.int32), rounded, precision)


class Packing(NamedTuple):
    """Sizes of one picture's resize, [rows, columns] to [new_rows, new_columns], black to the right and below
    up to [height, width], and what follows from them without a look at its pixels."""

    rows: int
    columns: int
    new_rows: int
    new_columns: int
    height: int
    width: int

    @property
    def starts(self) -> tuple[int, ...]:
        """At which bytes the columns' and the rows' first elements and weights begin, the pixels, and what
        lies behind them."""
        starts, end = [], HEADER_BYTES
        for before, after in ((self.columns, self.new_columns), (self.rows, self.new_rows)):
            for element_bytes in (4, 2 * num_taps(before, after)):
                starts.append(end)
                end += aligned(after * element_bytes)
        return (*starts, end, end + self.rows * self.columns * CHANNELS)

    @property
    def num_bytes(self) -> int:
        """Of the packed picture."""
        return self.starts[-1]

    @property
    def between_bytes(self) -> int:
        """Of its memory between the passes."""
        return self.rows * self.new_columns * CHANNELS

    @property
    def result_bytes(self) -> int:
        return self.height * self.width * CHANNELS

    @property
    def num_tiles(self) -> tuple[int, int]:
        """Programs of the columns' pass and of the rows'."""
        return triton.cdiv(self.between_bytes, BLOCK), triton.cdiv(self.result_bytes, BLOCK)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pixels_of(memory_B: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Where a packed picture's pixels go: uint8 [H, W, 3], contiguous, a view."""
    *_, start, end = packing.starts
    return memory_B[start:end].view(packing.rows, packing.columns, CHANNELS)


def write_tables(memory_B: torch.Tensor, packing: Packing) -> None:
    """Everything of a packed picture but its pixels into host memory uint8 [B], aligned to 16 bytes."""
    assert memory_B.numel() == packing.num_bytes, (
        f"a picture of {packing.num_bytes} bytes, packed, got {memory_B.numel()}"
    )
    by_column = axis_tables(packing.columns, packing.new_columns)
    by_row = axis_tables(packing.rows, packing.new_rows)
    *starts, _ = packing.starts
    header = (
        *packing,
        *(tables.precision for tables in (by_column, by_row)),
        *(tables.weights_MK.shape[1] for tables in (by_column, by_row)),
        *starts,
    )
    assert len(header) == len(HEADER)
    memory = memory_B.numpy()
    memory[: 4 * len(HEADER)].view(np.int32)[:] = header
    tables = (by_column.first_M, by_column.weights_MK, by_row.first_M, by_row.weights_MK)
    for start, table in zip(starts, tables, strict=False):
        content = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        memory[start : start + len(content)] = content


def resize_packed(
    memory_B: torch.Tensor, results_B: torch.Tensor, places_I5: torch.Tensor, num_tiles: tuple[int, int]
) -> None:
    """Resizes and pads pictures, all in two launches: packed ones in ``memory`` into ``results``, each uint8
    [H, W, 3] without gaps; both uint8 on the device. places: int64 [I, 5], PLACES of each picture, its bytes
    aligned to 16 and its first tiles those of all before it. num_tiles: of all pictures together, in either
    pass."""
    num_pictures = places_I5.shape[0]
    check_rows("places", places_I5, (num_pictures, NUM_PLACES))
    assert (memory_B.dtype, results_B.dtype, places_I5.dtype) == (torch.uint8, torch.uint8, torch.int64)
    assert memory_B.is_contiguous()
    assert results_B.is_contiguous()
    assert places_I5.is_contiguous()
    assert num_pictures > 0
    steps = search_steps(num_pictures)
    shape = {"BLOCK": BLOCK, "NUM_PLACES": NUM_PLACES, "num_warps": NUM_WARPS}
    _resize_columns_kernel[(num_tiles[0],)](memory_B, places_I5, num_pictures, steps, **shape)
    _resize_rows_kernel[(num_tiles[1],)](memory_B, results_B, places_I5, num_pictures, steps, **shape)


def resize_alone(packed_B: torch.Tensor, packing: Packing, device: torch.device) -> torch.Tensor:
    """One packed picture, on the host or the device, resized and padded in the device's memory: uint8
    [height, width, 3]. In the current stream; a pinned one has to stay until that has passed."""
    start = aligned(packing.num_bytes)
    memory = torch.empty(start + packing.between_bytes, dtype=torch.uint8, device=device)
    memory[: packing.num_bytes].copy_(packed_B, non_blocking=True)
    result = torch.empty((packing.height, packing.width, CHANNELS), dtype=torch.uint8, device=device)
    places_I5 = torch.zeros((1, NUM_PLACES), dtype=torch.int64, device=device)
    places_I5[:, PLACES.index("between")] = start
    resize_packed(memory, result.view(-1), places_I5, packing.num_tiles)
    return result


def pack(image_HWC: torch.Tensor, packing: Packing) -> torch.Tensor:
    """uint8 [H, W, 3] on the host with its tables, in memory of its own."""
    memory_B = torch.empty(packing.num_bytes, dtype=torch.uint8)
    write_tables(memory_B, packing)
    pixels_of(memory_B, packing).copy_(image_HWC)
    return memory_B


@triton.jit
def _weighed(
    before_ptr, step, first, num_before, num_taps, weights_ptr, bits, is_inside, BLOCK: tl.constexpr
):
    """Levels of elements that come of those from ``first`` on, ``step`` bytes apart."""
    total = tl.full((BLOCK,), 1, tl.int32) << (bits - 1)
    for tap in range(num_taps):
        is_tap = is_inside & (first + tap < num_before)
        pixel = tl.load(before_ptr + tap * step, mask=is_tap, other=0).to(tl.int32)
        total += pixel * tl.load(weights_ptr + tap, mask=is_tap, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(total >> bits, 0), 255)


# Sizes of a picture must not compile anything while the service runs, nor its place in a batch.
@triton.jit(do_not_specialize=["num_pictures", "num_steps"], do_not_specialize_on_alignment=["places_ptr"])
def _resize_columns_kernel(
    memory_ptr, places_ptr, num_pictures, num_steps, BLOCK: tl.constexpr, NUM_PLACES: tl.constexpr
):
    tile = tl.program_id(0)
    picture = find_item(places_ptr, tile, num_pictures, num_steps, FIRST_COLUMN_TILE, NUM_PLACES)
    place_ptr = places_ptr + picture * NUM_PLACES
    source_ptr = memory_ptr + tl.load(place_ptr + SOURCE)
    header_ptr = source_ptr.to(tl.pointer_type(tl.int32))
    columns = tl.load(header_ptr + COLUMNS)
    line = tl.load(header_ptr + NEW_COLUMNS) * 3
    tile_in_picture = (tile - tl.load(place_ptr + FIRST_COLUMN_TILE)).to(tl.int32)
    at = tile_in_picture * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < tl.load(header_ptr + ROWS) * line
    row = at // line
    column = at % line // 3
    firsts_ptr = (source_ptr + tl.load(header_ptr + COLUMN_FIRSTS)).to(tl.pointer_type(tl.int32))
    weights_ptr = (source_ptr + tl.load(header_ptr + COLUMN_WEIGHTS)).to(tl.pointer_type(tl.int16))
    taps = tl.load(header_ptr + COLUMN_TAPS)
    first = tl.load(firsts_ptr + column, mask=is_inside, other=0)
    pixels_ptr = source_ptr + tl.load(header_ptr + PIXELS)
    level = _weighed(
        pixels_ptr + (row * columns + first) * 3 + at % 3,
        3,
        first,
        columns,
        taps,
        weights_ptr + column * taps,
        tl.load(header_ptr + COLUMN_BITS),
        is_inside,
        BLOCK,
    )
    tl.store(memory_ptr + tl.load(place_ptr + BETWEEN) + at, level.to(tl.uint8), mask=is_inside)


@triton.jit(do_not_specialize=["num_pictures", "num_steps"], do_not_specialize_on_alignment=["places_ptr"])
def _resize_rows_kernel(
    memory_ptr,
    results_ptr,
    places_ptr,
    num_pictures,
    num_steps,
    BLOCK: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):
    tile = tl.program_id(0)
    picture = find_item(places_ptr, tile, num_pictures, num_steps, FIRST_ROW_TILE, NUM_PLACES)
    place_ptr = places_ptr + picture * NUM_PLACES
    source_ptr = memory_ptr + tl.load(place_ptr + SOURCE)
    header_ptr = source_ptr.to(tl.pointer_type(tl.int32))
    line = tl.load(header_ptr + NEW_COLUMNS) * 3
    padded_line = tl.load(header_ptr + WIDTH) * 3
    tile_in_picture = (tile - tl.load(place_ptr + FIRST_ROW_TILE)).to(tl.int32)
    at = tile_in_picture * BLOCK + tl.arange(0, BLOCK)
    row = at // padded_line
    in_line = at % padded_line
    is_image = (row < tl.load(header_ptr + NEW_ROWS)) & (in_line < line)
    firsts_ptr = (source_ptr + tl.load(header_ptr + ROW_FIRSTS)).to(tl.pointer_type(tl.int32))
    weights_ptr = (source_ptr + tl.load(header_ptr + ROW_WEIGHTS)).to(tl.pointer_type(tl.int16))
    taps = tl.load(header_ptr + ROW_TAPS)
    first = tl.load(firsts_ptr + row, mask=is_image, other=0)
    level = _weighed(
        memory_ptr + tl.load(place_ptr + BETWEEN) + first * line + in_line,
        line,
        first,
        tl.load(header_ptr + ROWS),
        taps,
        weights_ptr + row * taps,
        tl.load(header_ptr + ROW_BITS),
        is_image,
        BLOCK,
    )
    # Padding is black: none of its taps is taken, and half a level rounds to 0.
    is_inside = at < tl.load(header_ptr + HEIGHT) * padded_line
    tl.store(results_ptr + tl.load(place_ptr + RESULT) + at, level.to(tl.uint8), mask=is_inside)
