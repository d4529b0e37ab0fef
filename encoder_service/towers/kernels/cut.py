"""Patches cut out of frames: the arithmetic that the launches of patches.py share.

Owns which bytes make up a patch and how a pixel is normalised. Which frame, row and column a patch has is the
launch's.

A lane takes two pixels side by side, six bytes, as three 16-bit words: a patch of an even size begins at an
even byte. So every pixel is read and normalised once, however many frames of its slot repeat it, and what a
lane writes lies together. All loads of a frame's patches come before their first store.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

Triple = tuple[float, float, float]


@functools.lru_cache(maxsize=64)
def normalisation(
    mean: Triple, std: Triple, rescale_factor: float, dtype: torch.dtype
) -> dict[str, float | bool]:
    """How the kernels normalise uint8 pixels into ``dtype``: their mean_*, scale_* and DIVIDES.

    Means and deviations are over the rescale factor, multiplied in float32, as the preprocessors do. scale_*
    are the deviations, or their reciprocals where for all 256 values the product rounds to what the quotient
    rounds to: it mostly does in 16 bits, and a division costs many times as much.
    """
    means, deviations = (
        torch.tensor(values, dtype=torch.float32, device="cpu") * (1.0 / rescale_factor)
        for values in (mean, std)
    )
    reciprocals = 1.0 / deviations
    centred = torch.arange(256, dtype=torch.float32, device="cpu")[:, None] - means
    divides = not torch.equal((centred * reciprocals).to(dtype), (centred / deviations).to(dtype))
    scales = deviations if divides else reciprocals
    named = {f"mean_{channel}": value for channel, value in enumerate(means.tolist())}
    named |= {f"scale_{channel}": value for channel, value in enumerate(scales.tolist())}
    return named | {"DIVIDES": divides}


@triton.jit
def store_channel(
    out_ptr,
    even,
    odd,
    mean,
    scale,
    in_patch,
    is_last,
    STEP: tl.constexpr,
    PLANE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """One channel of one frame, normalised with every step rounded to nearest as torch does; the last frame
    also into the places of those that are missing. out: the channel's first value of frame 0."""
    even = even.to(tl.float32) - mean
    odd = odd.to(tl.float32) - mean
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
    PATCH: tl.constexpr,
    TEMPORAL: tl.constexpr,
    PAIRS_TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """N patches of temporal slot ``slot``, at row and column [N], into the rows at out_row_ptr [N].

    frames_ptr points to 16-bit words, which both strides count. A frame that is missing from the slot, where
    num_frames ends, is its last one again."""
    pair = tl.arange(0, PAIRS_TILE)
    # A frame may have more words than int32 numbers, a patch has not.
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
            # Red and green, blue and red, green and blue: two pixels.
            first = tl.load(words_ptr, mask=is_pair, other=0).to(tl.int32)
            second = tl.load(words_ptr + 1, mask=is_pair, other=0).to(tl.int32)
            third = tl.load(words_ptr + 2, mask=is_pair, other=0).to(tl.int32)
            store_channel(
                out_ptr,
                first & 255,
                second >> 8 & 255,
                mean_0,
                scale_0,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
            )
            store_channel(
                out_ptr + TEMPORAL * PLANE,
                first >> 8 & 255,
                third & 255,
                mean_1,
                scale_1,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
            )
            store_channel(
                out_ptr + 2 * TEMPORAL * PLANE,
                second & 255,
                third >> 8 & 255,
                mean_2,
                scale_2,
                in_patch,
                is_last,
                step,
                PLANE,
                TEMPORAL,
                DIVIDES,
            )
