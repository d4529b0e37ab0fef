"""Normalised patches from uint8 frames, written where the tower reads them.

Owns the cut and the normalisation on the device, bit for bit what the preprocessors' ``patchify`` gives
after rounding to the output's dtype. Sizes, padding and settings are the preprocessors'.

One program cuts a merge's worth of patches, which never spans two items or frames; how is cut.py's.

Shape legend: T frames, H height and W width in pixels, I items, P patches, tp frames per patch, B bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.cut import Triple, cut_patches, normalisation
from encoder_service.towers.kernels.expand import (
    FIRST_PATCH,
    FRAMES,
    HEIGHT,
    NUM_COLUMNS,
    WIDTH,
    find_item,
    place_in_merge_order,
    search_steps,
)
from encoder_service.towers.kernels.tiles import check_rows

NUM_WARPS = 4


def patchify_qwen(
    frames_THWC: torch.Tensor,
    out: torch.Tensor,
    mean: Triple,
    std: Triple,
    rescale_factor: float,
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
) -> torch.Tensor:
    """One item's patches into out [P, 3 * tp * patch_size^2], in place; returns out.

    frames: uint8 [T, H, W, 3], pixels side by side, frames and lines possibly apart by an even number of
    bytes; H and W are multiples of patch_size * merge_size, patch_size is even. out: any float dtype, rows
    possibly apart, such as a slice of a static buffer. Order and values are QwenVLPreprocessor.patchify's:
    the last frame repeats to fill a temporal patch. mean, std: per channel, for values times rescale_factor.
    """
    num_frames, height, width, num_channels = frames_THWC.shape
    block = patch_size * merge_size
    frame_stride, line_stride = frames_THWC.stride()[:2]
    assert frames_THWC.dtype == torch.uint8
    assert num_channels == 3
    assert frames_THWC.stride()[2:] == (3, 1), f"pixels lie apart: strides {frames_THWC.stride()}"
    assert frame_stride % 2 == line_stride % 2 == frames_THWC.data_ptr() % 2 == 0, "frames begin at odd bytes"
    assert height % block == 0, f"height is {height}, needs a multiple of {block}"
    assert width % block == 0, f"width is {width}, needs a multiple of {block}"
    num_slots = -(-num_frames // temporal_patch_size)
    num_patches = num_slots * (height // patch_size) * (width // patch_size)
    check_rows("out", out, (num_patches, 3 * temporal_patch_size * patch_size**2))
    if num_patches:
        _patchify_kernel[(num_patches // merge_size**2,)](
            frames_THWC,
            out,
            frame_stride // 2,
            line_stride // 2,
            num_frames,
            height // patch_size,
            width // patch_size,
            OUT_STRIDE=out.stride(0),
            MERGE=merge_size,
            **normalisation(mean, std, rescale_factor, out.dtype),
            **patch_shape(patch_size, temporal_patch_size),
        )
    return out


def patchify_moonvit(
    frames_THWC: torch.Tensor,
    out: torch.Tensor,
    mean: Triple,
    std: Triple,
    rescale_factor: float,
    *,
    patch_size: int,
) -> torch.Tensor:
    """One item's patches into out [P, 3 * patch_size^2], in place; returns out. Arguments are
    ``patchify_qwen``'s; order and values are MoonViTPreprocessor.patchify's: frame by frame, row by row."""
    return patchify_qwen(
        frames_THWC,
        out,
        mean,
        std,
        rescale_factor,
        patch_size=patch_size,
        merge_size=1,
        temporal_patch_size=1,
    )


def patchify_items(
    pixels_B: torch.Tensor,
    items_I5: torch.Tensor,
    sources_I2: torch.Tensor,
    out: torch.Tensor,
    mean: Triple,
    std: Triple,
    rescale_factor: float,
    *,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    merges_time: bool,
) -> torch.Tensor:
    """A whole batch's patches of either family into out [P, 3 * tp * patch_size^2], in one launch and in
    place; returns out. All that differs between batches is in tensors, so that it replays in a graph.

    pixels: uint8 [B]. items: int32 [I, 5], FusedInputs.items; P may be more than the items', and rows past
    them become zeros. sources: int64 [I, 2], the even byte at which an item's frames begin, one after the
    other, each [H, W, 3] without gaps, and how many there are, more than tp * (t - 1) and at most tp * t; or
    0 where the item's patches lie there, as they are to be and in out's dtype, at a multiple of its size.
    The rows of an item whose byte is negative are left as they are. What padded slots say is not read.
    Patches stand in merge order, or frame by frame in raster order where ``merges_time``.
    """
    num_patches, num_items = out.shape[0], items_I5.shape[0]
    group = merge_size**2
    check_rows("items", items_I5, (num_items, NUM_COLUMNS))
    check_rows("sources", sources_I2, (num_items, 2))
    check_rows("out", out, (num_patches, 3 * temporal_patch_size * patch_size**2))
    assert (pixels_B.dtype, items_I5.dtype, sources_I2.dtype) == (torch.uint8, torch.int32, torch.int64)
    assert pixels_B.is_contiguous()
    assert pixels_B.data_ptr() % 2 == 0, "pixels begin at an odd byte"
    assert items_I5.is_contiguous()
    assert sources_I2.is_contiguous()
    assert num_items > 0
    assert num_patches % group == 0, f"{num_patches} patches are no multiple of {group}"
    if num_patches:
        _patchify_items_kernel[(num_patches // group,)](
            pixels_B,
            items_I5,
            sources_I2,
            out,
            num_items,
            search_steps(num_items),
            OUT_STRIDE=out.stride(0),
            MERGE=merge_size,
            MERGES_TIME=merges_time,
            COLUMNS=NUM_COLUMNS,
            **normalisation(mean, std, rescale_factor, out.dtype),
            **patch_shape(patch_size, temporal_patch_size),
        )
    return out


def patch_shape(patch_size: int, temporal_patch_size: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    assert patch_size % 2 == 0, f"patch_size is {patch_size}, needs an even number"
    return {
        "PATCH": patch_size,
        "TEMPORAL": temporal_patch_size,
        "PAIRS_TILE": triton.next_power_of_2(patch_size**2 // 2),
        "num_warps": NUM_WARPS,
    }


# Sizes of an image must not compile anything while the service runs.
@triton.jit(
    do_not_specialize=["frame_stride", "line_stride", "num_frames", "rows", "columns"],
    do_not_specialize_on_alignment=["frames_ptr"],
)
def _patchify_kernel(
    frames_ptr,
    out_ptr,
    frame_stride,
    line_stride,
    num_frames,
    rows,
    columns,
    mean_0,
    mean_1,
    mean_2,
    scale_0,
    scale_1,
    scale_2,
    OUT_STRIDE: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    group = tl.program_id(0)
    groups = rows * columns // (MERGE * MERGE)
    member = tl.arange(0, MERGE * MERGE)
    row, column = place_in_merge_order(group % groups * (MERGE * MERGE) + member, columns, MERGE)
    patch = (group * (MERGE * MERGE) + member).to(tl.int64)
    cut_patches(
        frames_ptr.to(tl.pointer_type(tl.int16)),
        frame_stride,
        line_stride,
        num_frames,
        group // groups,
        row,
        column,
        out_ptr + patch * OUT_STRIDE,
        mean_0,
        mean_1,
        mean_2,
        scale_0,
        scale_1,
        scale_2,
        PATCH,
        TEMPORAL,
        PAIRS_TILE,
        DIVIDES,
    )


@triton.jit(do_not_specialize=["num_items", "num_steps"])
def _patchify_items_kernel(
    pixels_ptr,
    items_ptr,
    sources_ptr,
    out_ptr,
    num_items,
    num_steps,
    mean_0,
    mean_1,
    mean_2,
    scale_0,
    scale_1,
    scale_2,
    OUT_STRIDE: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    MERGES_TIME: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    first = tl.program_id(0) * (MERGE * MERGE)
    item = find_item(items_ptr, first, num_items, num_steps, FIRST_PATCH, COLUMNS)
    item_ptr = items_ptr + item * COLUMNS
    width = tl.load(item_ptr + WIDTH)
    frame_size = tl.load(item_ptr + HEIGHT) * width
    in_item = first - tl.load(item_ptr + FIRST_PATCH)
    slot = in_item // frame_size
    member = tl.arange(0, MERGE * MERGE)
    out_row_ptr = out_ptr + (first + member).to(tl.int64) * OUT_STRIDE
    if slot < tl.load(item_ptr + FRAMES):
        start = tl.load(sources_ptr + item * 2)
        num_frames = tl.load(sources_ptr + item * 2 + 1).to(tl.int32)
        if (start >= 0) & (num_frames == 0):
            element = tl.arange(0, 2 * PAIRS_TILE)
            given_row = (in_item + member).to(tl.int64) * (3 * TEMPORAL * PATCH * PATCH)
            given_row_ptr = (pixels_ptr + start).to(out_ptr.dtype) + given_row
            inside = (element < PATCH * PATCH)[None, :]
            for plane in tl.static_range(3 * TEMPORAL):
                at = plane * (PATCH * PATCH) + element[None, :]
                given = tl.load(given_row_ptr[:, None] + at, mask=inside)
                tl.store(out_row_ptr[:, None] + at, given, mask=inside)
        elif start >= 0:
            place = in_item % frame_size + member
            if MERGES_TIME:
                row = place // width
                column = place % width
            else:
                row, column = place_in_merge_order(place, width, MERGE)
            cut_patches(
                (pixels_ptr + start).to(tl.pointer_type(tl.int16)),
                frame_size.to(tl.int64) * (PATCH * PATCH * 3 // 2),
                width * (PATCH * 3 // 2),
                num_frames,
                slot,
                row,
                column,
                out_row_ptr,
                mean_0,
                mean_1,
                mean_2,
                scale_0,
                scale_1,
                scale_2,
                PATCH,
                TEMPORAL,
                PAIRS_TILE,
                DIVIDES,
            )
    else:
        value = tl.arange(0, 2 * PAIRS_TILE)
        zeros = tl.zeros((MERGE * MERGE, 2 * PAIRS_TILE), dtype=out_ptr.dtype.element_ty)
        for plane in tl.static_range(3 * TEMPORAL):
            plane_ptr = out_row_ptr[:, None] + (plane * (PATCH * PATCH) + value[None, :])
            tl.store(plane_ptr, zeros, mask=(value < PATCH * PATCH)[None, :])
