"""The one exact resize on a GPU: torch's antialiased bicubic of uint8 images on the CPU, bit for bit.

Owns the tables of both axes and the pass along one. Arithmetic and order are those of torch's CPU kernel
(``UpSampleKernel.cpp`` and ``UpSampleKernelAVXAntialias.h``, after Pillow's ``Resample.c``): weights are made
in float64, normalised, and rounded to 16 bits with as many fractional bits as the largest of an axis leaves
room for; columns first, then rows, uint8 between the two; each sum is of 32-bit integers and rounded once. An
axis whose size stays is not touched. What size an image gets is ingest's business.

Shape legend: H W of the image, N elements along an axis before, M after it, K taps.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHANNELS = 3
# Of the cubic convolution: Pillow's and torch's value with antialiasing.
CUBIC_A = -0.5
CUBIC_SUPPORT = 2.0
MAX_PRECISION = 22
MAX_WEIGHT = 1 << 15
BLOCK = 1024
KEPT_TABLES = 256


class AxisTables(NamedTuple):
    """How the M elements after an axis' pass come of its N before: of which first one, of how many, by which
    weights, over 2**precision. first_M, count_M: int32; weights_MK: int16, zero beyond the count."""

    first_M: torch.Tensor
    count_M: torch.Tensor
    weights_MK: torch.Tensor
    precision: int


def cubic(x: torch.Tensor) -> torch.Tensor:
    """The filter at float64 ``x``, in torch's order of operations."""
    x = x.abs()
    near = ((CUBIC_A + 2.0) * x - (CUBIC_A + 3.0)) * x * x + 1.0
    far = ((CUBIC_A * x - 5.0 * CUBIC_A) * x + 8.0 * CUBIC_A) * x - 4.0 * CUBIC_A
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


@functools.lru_cache(maxsize=KEPT_TABLES)
def axis_tables(num_before: int, num_after: int, device: torch.device) -> AxisTables:
    """The tables of an axis from ``num_before`` to ``num_after`` elements, each at least 1, on the device."""
    assert num_before >= 1, f"an axis has {num_before} elements, needs 1"
    assert num_after >= 1, f"an axis gets {num_after} elements, needs 1"
    scale = num_before / num_after
    support = CUBIC_SUPPORT * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    num_taps = math.ceil(support) * 2 + 1
    centre = scale * (torch.arange(num_after, dtype=torch.float64) + 0.5)
    first = (centre - support + 0.5).long().clamp(min=0)  # towards zero, as a cast does
    count = ((centre + support + 0.5).long().clamp(max=num_before) - first).clamp(0, num_taps)
    tap = torch.arange(num_taps)
    weights = cubic(((tap + first[:, None]) - centre[:, None] + 0.5) * inverse)
    weights = torch.where(tap < count[:, None], weights, 0.0)
    total = torch.zeros(num_after, dtype=torch.float64)
    for column in weights.unbind(1):  # one after another, as the sum there is made
        total = total + column
    weights = torch.where(total[:, None] != 0.0, weights / total[:, None], weights)
    largest, precision = float(weights.max()), 0
    while precision < MAX_PRECISION and int(0.5 + largest * (1 << (precision + 1))) < MAX_WEIGHT:
        precision += 1
    scaled = weights * (1 << precision)
    rounded = torch.where(scaled < 0.0, scaled - 0.5, scaled + 0.5).trunc().to(torch.int16)
    return AxisTables(
        first.int().to(device), count.int().to(device), rounded.contiguous().to(device), precision
    )


def resize_bicubic_uint8(image_HWC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 [H, W, 3], contiguous, on a GPU, to uint8 [height, width, 3]: what ``ingest.frames`` makes of it
    on the CPU. The image itself where its size stays."""
    assert image_HWC.dtype is torch.uint8, f"an image is uint8, found {image_HWC.dtype}"
    assert image_HWC.ndim == 3, f"an image has 3 dimensions, found {image_HWC.ndim}"
    assert image_HWC.shape[2] == CHANNELS, f"an image has {CHANNELS} channels, found {image_HWC.shape[2]}"
    assert image_HWC.is_contiguous(), "an image is contiguous"
    rows, columns, _ = image_HWC.shape
    resized = image_HWC
    if columns != width:
        wider = resized.new_empty((rows, width, CHANNELS))
        _pass(resized, wider, axis_tables(columns, width, resized.device), outer=rows, inner=CHANNELS)
        resized = wider
    if rows != height:
        higher = resized.new_empty((height, width, CHANNELS))
        _pass(resized, higher, axis_tables(rows, height, resized.device), outer=1, inner=width * CHANNELS)
        resized = higher
    return resized


def _pass(before: torch.Tensor, after: torch.Tensor, tables: AxisTables, *, outer: int, inner: int) -> None:
    """Along the middle axis of [outer, N, inner]."""
    num_after, num_taps = tables.weights_MK.shape
    num_out = num_after * inner
    _axis_kernel[(triton.cdiv(num_out, BLOCK), outer)](
        before,
        after,
        tables.first_M,
        tables.count_M,
        tables.weights_MK,
        before.numel() // outer,
        num_out,
        inner,
        num_taps,
        tables.precision,
        BLOCK=BLOCK,
    )


@triton.jit
def _axis_kernel(
    before_ptr,
    after_ptr,
    first_ptr,
    count_ptr,
    weights_ptr,
    num_in,
    num_out,
    inner,
    num_taps,
    precision,
    BLOCK: tl.constexpr,
):
    outer = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num_out
    element = place // inner
    first = tl.load(first_ptr + element, mask=is_inside, other=0)
    count = tl.load(count_ptr + element, mask=is_inside, other=0)
    source = before_ptr + outer * num_in + first * inner + place % inner
    weights = weights_ptr + element * num_taps
    total = tl.full((BLOCK,), 1, tl.int32) << (precision - 1)
    for tap in range(num_taps):
        is_tap = tap < count
        pixel = tl.load(source + tap * inner, mask=is_tap, other=0).to(tl.int32)
        weight = tl.load(weights + tap, mask=is_tap, other=0).to(tl.int32)
        total += pixel * weight
    level = tl.minimum(tl.maximum(total >> precision, 0), 255)
    tl.store(after_ptr + outer * num_out + place, level.to(tl.uint8), mask=is_inside)
