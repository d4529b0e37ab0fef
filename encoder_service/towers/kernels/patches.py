"""Normalised patches from uint8 frames, written into the buffer that the tower reads.

Owns the cut and the normalisation on the device, for a whole batch in one launch. The result equals the
preprocessors' ``patchify``, rounded to the output's dtype, bit for bit.

One program cuts merge^2 patches, which never span two items or frames. A lane reads two adjacent pixels (six
bytes) as three 16-bit words; this works because a patch of an even size begins at an even byte. Every pixel
is read and normalised once, even if several frames of its temporal patch repeat it, and a lane's values are
written together. All loads of a frame's patches come before their first store.

Shape legend: H height and W width in pixels, I items, P patches, N patches of one program, tp frames per
patch, B bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.expand import (
    FIRST_PATCH,
    FRAMES,
    HEIGHT,
    NUM_COLUMNS,
    WIDTH,
    find_item,
    merge_order_position,
    search_steps,
)
from encoder_service.towers.kernels.tiles import check_rows

NUM_WARPS = 4

Triple = tuple[float, float, float]


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
    in_steps: bool = False,
) -> torch.Tensor:
    """Writes a whole batch's patches of a family to out [P, 3 * tp * patch_size^2], in one launch, and
    returns out. Everything that differs between batches is in tensors, so the launch can be replayed in a
    graph.

    pixels: uint8 [B]. items: int32 [I, 5], FusedInputs.items. P may exceed the number of the items' patches;
    the rows after them become zeros. sources: int64 [I, 2]; those of padded slots are not read. The first
    number is the even byte offset at which an item's frames begin, consecutive, each [H, W, 3] without gaps;
    if it is negative, the item's rows are left unchanged. The second is the number of frames, more than tp *
    (t - 1) and at most tp * t. It is 0 if finished patches begin at the offset, in out's dtype, at a multiple
    of its size. The last frame is repeated to fill a temporal patch. Patches are in merge order, or frame by
    frame in raster order if ``merges_time``. mean, std: per channel, for values times rescale_factor.
    in_steps: see ``ingest.settings.SteppedNormalisation``. patch_size must be even.
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
    assert patch_size % 2 == 0, f"patch_size is {patch_size}, needs an even number"
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
            **normalisation(mean, std, rescale_factor, out.dtype, in_steps=in_steps),
            PATCH=patch_size,
            TEMPORAL=temporal_patch_size,
            PAIRS_TILE=triton.next_power_of_2(patch_size**2 // 2),
            num_warps=NUM_WARPS,
        )
    return out


@functools.lru_cache(maxsize=64)
def normalisation(
    mean: Triple, std: Triple, rescale_factor: float, dtype: torch.dtype, *, in_steps: bool = False
) -> dict[str, float | bool]:
    """The kernel's mean_*, scale_*, DIVIDES, levels and IN_STEPS for uint8 pixels that are normalised into
    ``dtype``.

    Means and standard deviations are divided by the rescale factor in float32, as in the preprocessors.
    scale_* are the deviations, or their reciprocals if multiplying rounds to the same result as dividing for
    all 256 values. In 16 bits it mostly does, and a division costs many times as much. IN_STEPS: pixels are
    divided by ``levels`` first; a normalisation in steps may do without if all 256 results are equal.
    """
    levels = 1.0 / rescale_factor
    pixels = torch.arange(256, dtype=torch.float32, device="cpu")[:, None]
    means, deviations = (torch.tensor(values, dtype=torch.float32, device="cpu") for values in (mean, std))
    scaled_means, scaled_deviations = means * levels, deviations * levels
    exact = (pixels - scaled_means) / scaled_deviations
    steps = False
    if in_steps:
        fused, exact = exact, (pixels / torch.tensor(levels) - means) / deviations
        steps = not torch.equal(fused.to(dtype), exact.to(dtype))
    if steps:
        pixels = pixels / torch.tensor(levels)
    else:
        means, deviations = scaled_means, scaled_deviations
    reciprocals = 1.0 / deviations
    divides = not torch.equal(((pixels - means) * reciprocals).to(dtype), exact.to(dtype))
    scales = deviations if divides else reciprocals
    named = {f"mean_{channel}": value for channel, value in enumerate(means.tolist())}
    named |= {f"scale_{channel}": value for channel, value in enumerate(scales.tolist())}
    return named | {"DIVIDES": divides, "levels": levels, "IN_STEPS": steps}


@triton.jit
def store_channel(
    out_ptr,
    even,
    odd,
    mean,
    scale,
    levels,
    in_patch,
    is_last,
    STEP: tl.constexpr,
    PLANE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    DIVIDES: tl.constexpr,
    IN_STEPS: tl.constexpr,
):
    """Normalises and stores one channel of one frame. Every step is rounded to nearest, as in torch. The last
    frame is also stored in place of missing frames. out: the address of the channel's first value of
    frame 0."""
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    if IN_STEPS:
        even = tl.div_rn(even, levels)
        odd = tl.div_rn(odd, levels)
    even -= mean
    odd -= mean
    if DIVIDES:
        even = tl.div_rn(even, scale)
        odd = tl.div_rn(odd, scale)
    else:
        even = even * scale
        odd = odd * scale
    value = tl.interleave(even, odd).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + STEP * PLANE, value, mask=in_patch)
    if is_last:
        for later in tl.static_range(STEP + 1, TEMPORAL):
            tl.store(out_ptr + later * PLANE, value, mask=in_patch)


@triton.jit
def cut_patches(
    frames_ptr,
    frame_stride,
    line_stride,
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
    levels,
    PATCH: tl.constexpr,
    TEMPORAL: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
    IN_STEPS: tl.constexpr,
):
    """Cuts N patches of temporal slot ``slot``, at row and column [N], into the rows at out_row_ptr [N].

    frames_ptr points to 16-bit words; both strides count words. A frame that is missing from the slot, after
    num_frames, repeats the last one."""
    pair = tl.arange(0, PAIRS_TILE)
    # The offset of a patch in a frame may exceed int32, an offset within a patch does not.
    corner = row.to(tl.int64) * PATCH * line_stride + column * (PATCH * 3 // 2)
    inside = pair // (PATCH // 2) * line_stride + pair % (PATCH // 2) * 3
    offset = corner[:, None] + inside[None, :]
    is_pair = (pair < PATCH * PATCH // 2)[None, :]
    value = tl.arange(0, 2 * PAIRS_TILE)
    in_patch = (value < PATCH * PATCH)[None, :]
    out_ptr = out_row_ptr[:, None] + value[None, :]
    PLANE: tl.constexpr = PATCH * PATCH
    for step in tl.static_range(TEMPORAL):
        frame = slot * TEMPORAL + step
        if frame < num_frames:
            is_last = frame == num_frames - 1
            words_ptr = frames_ptr + frame.to(tl.int64) * frame_stride + offset
            # The words of two pixels: red and green, blue and red, green and blue.
            first = tl.load(words_ptr, mask=is_pair, other=0).to(tl.int32)
            second = tl.load(words_ptr + 1, mask=is_pair, other=0).to(tl.int32)
            third = tl.load(words_ptr + 2, mask=is_pair, other=0).to(tl.int32)
            store_channel(
                out_ptr,
                first & 255,
                second >> 8 & 255,
                mean_0,
                scale_0,
                levels,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
                IN_STEPS,
            )
            store_channel(
                out_ptr + TEMPORAL * PLANE,
                first >> 8 & 255,
                third & 255,
                mean_1,
                scale_1,
                levels,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
                IN_STEPS,
            )
            store_channel(
                out_ptr + 2 * TEMPORAL * PLANE,
                second & 255,
                third >> 8 & 255,
                mean_2,
                scale_2,
                levels,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
                IN_STEPS,
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
    levels,
    OUT_STRIDE: tl.constexpr,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    MERGES_TIME: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
    IN_STEPS: tl.constexpr,
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
            source_row = (in_item + member).to(tl.int64) * (3 * TEMPORAL * PATCH * PATCH)
            source_row_ptr = (pixels_ptr + start).to(out_ptr.dtype) + source_row
            inside = (element < PATCH * PATCH)[None, :]
            for plane in tl.static_range(3 * TEMPORAL):
                at = plane * (PATCH * PATCH) + element[None, :]
                values = tl.load(source_row_ptr[:, None] + at, mask=inside)
                tl.store(out_row_ptr[:, None] + at, values, mask=inside)
        elif start >= 0:
            position = in_item % frame_size + member
            if MERGES_TIME:
                row = position // width
                column = position % width
            else:
                row, column = merge_order_position(position, width, MERGE)
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
                levels,
                PATCH,
                TEMPORAL,
                PAIRS_TILE,
                DIVIDES,
                IN_STEPS,
            )
    else:
        value = tl.arange(0, 2 * PAIRS_TILE)
        zeros = tl.zeros((MERGE * MERGE, 2 * PAIRS_TILE), dtype=out_ptr.dtype.element_ty)
        for plane in tl.static_range(3 * TEMPORAL):
            plane_ptr = out_row_ptr[:, None] + (plane * (PATCH * PATCH) + value[None, :])
            tl.store(plane_ptr, zeros, mask=(value < PATCH * PATCH)[None, :])
