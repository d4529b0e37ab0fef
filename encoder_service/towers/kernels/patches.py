"""Normalised patches from uint8 frames, written where the tower reads them.

Owns the cut and the normalisation on the device, bit for bit what the preprocessors' ``patchify`` gives
after rounding to the output's dtype. Sizes, padding and settings are the preprocessors'.

Shape legend: T frames, H height and W width in pixels, P patches, tp frames per patch, B bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import check_rows

NUM_WARPS = 4

Triple = tuple[float, float, float]


@functools.lru_cache(maxsize=64)
def scaled_statistics(values: Triple, rescale_factor: float) -> Triple:
    """Per-channel mean or std over the rescale factor, as float32 values: what uint8 pixels are compared
    with. Multiplied in float32, as the preprocessors do."""
    scaled = torch.tensor(values, dtype=torch.float32, device="cpu") * (1.0 / rescale_factor)
    first, second, third = scaled.tolist()
    return first, second, third


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

    frames: uint8 [T, H, W, 3], pixels side by side, frames and lines possibly apart; H and W are multiples
    of patch_size * merge_size. out: any float dtype, rows possibly apart, such as a slice of a static
    buffer. Order and values are QwenVLPreprocessor.patchify's: the last frame repeats to fill a temporal
    patch. mean, std: per channel, for values times rescale_factor.
    """
    num_frames, height, width, num_channels = frames_THWC.shape
    block = patch_size * merge_size
    assert frames_THWC.dtype == torch.uint8
    assert num_channels == 3
    assert frames_THWC.stride()[2:] == (3, 1), f"pixels lie apart: strides {frames_THWC.stride()}"
    assert height % block == 0, f"height is {height}, needs a multiple of {block}"
    assert width % block == 0, f"width is {width}, needs a multiple of {block}"
    num_slots = -(-num_frames // temporal_patch_size)
    num_patches = num_slots * (height // patch_size) * (width // patch_size)
    check_rows("out", out, (num_patches, 3 * temporal_patch_size * patch_size**2))
    if num_patches == 0:
        return out
    _patchify_kernel[(num_patches,)](
        frames_THWC,
        out,
        frames_THWC.stride(0),
        frames_THWC.stride(1),
        out.stride(0),
        num_frames,
        height // block,
        width // block,
        *scaled_statistics(mean, rescale_factor),
        *scaled_statistics(std, rescale_factor),
        PATCH=patch_size,
        MERGE=merge_size,
        TEMPORAL=temporal_patch_size,
        PIXELS_TILE=triton.next_power_of_2(patch_size**2),
        num_warps=NUM_WARPS,
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


def patchify_packed(
    pixels_B: torch.Tensor,
    start_PT: torch.Tensor,
    coords_P4: torch.Tensor,
    out: torch.Tensor,
    mean: Triple,
    std: Triple,
    rescale_factor: float,
    *,
    patch_size: int,
) -> torch.Tensor:
    """A whole batch's patches of either family into out [P, 3 * tp * patch_size^2], in one launch and in
    place; returns out. All that differs between batches is in tensors, so that it replays in a graph.

    pixels: uint8 [B], the frames one after the other, each [H, W, 3] without gaps. start: int64 [P, tp], the
    byte at which each frame of a patch begins; a row that begins with a negative number becomes zeros, and
    its coords have to be (0, 0, 1, 1) and pixels as long as one patch. coords: int32 [P, 4], row, column,
    height and width of each patch's frame, in patches.
    """
    num_patches, temporal = start_PT.shape
    assert pixels_B.dtype == torch.uint8
    assert pixels_B.is_contiguous()
    check_rows("start", start_PT, (num_patches, temporal))
    check_rows("coords", coords_P4, (num_patches, 4))
    check_rows("out", out, (num_patches, 3 * temporal * patch_size**2))
    if num_patches == 0:
        return out
    _patchify_packed_kernel[(num_patches,)](
        pixels_B,
        start_PT,
        coords_P4,
        out,
        start_PT.stride(0),
        coords_P4.stride(0),
        out.stride(0),
        *scaled_statistics(mean, rescale_factor),
        *scaled_statistics(std, rescale_factor),
        PATCH=patch_size,
        TEMPORAL=temporal,
        PIXELS_TILE=triton.next_power_of_2(patch_size**2),
        num_warps=NUM_WARPS,
    )
    return out


@triton.jit
def _channel(corner_ptr, line_stride, mean, std, PATCH: tl.constexpr, PIXELS_TILE: tl.constexpr):
    """One channel of one frame of a patch: (x - mean) / std, both rounded to nearest as torch does."""
    pixel = tl.arange(0, PIXELS_TILE)
    offset = (pixel // PATCH) * line_stride + (pixel % PATCH) * 3
    x = tl.load(corner_ptr + offset, mask=pixel < PATCH * PATCH, other=0).to(tl.float32)
    return tl.div_rn(x - mean, std)


@triton.jit
def _store_channel(out_ptr, value, PATCH: tl.constexpr, PIXELS_TILE: tl.constexpr):
    pixel = tl.arange(0, PIXELS_TILE)
    tl.store(out_ptr + pixel, value.to(out_ptr.dtype.element_ty), mask=pixel < PATCH * PATCH)


# Sizes of an image must not compile anything while the service runs.
@triton.jit(
    do_not_specialize=["frame_stride", "line_stride", "num_frames", "blocks_high", "blocks_wide"],
    do_not_specialize_on_alignment=["frames_ptr"],
)
def _patchify_kernel(
    frames_ptr,
    out_ptr,
    frame_stride,
    line_stride,
    out_stride,
    num_frames,
    blocks_high,
    blocks_wide,
    mean_0,
    mean_1,
    mean_2,
    std_0,
    std_1,
    std_2,
    PATCH: tl.constexpr,
    MERGE: tl.constexpr,
    TEMPORAL: tl.constexpr,
    PIXELS_TILE: tl.constexpr,
):
    patch = tl.program_id(0)
    in_block = patch % (MERGE * MERGE)
    block = patch // (MERGE * MERGE)
    row = block // blocks_wide % blocks_high * MERGE + in_block // MERGE
    column = block % blocks_wide * MERGE + in_block % MERGE
    slot = block // (blocks_wide * blocks_high)
    out_row_ptr = out_ptr + patch.to(tl.int64) * out_stride
    for step in tl.static_range(TEMPORAL):
        frame = tl.minimum(slot * TEMPORAL + step, num_frames - 1)
        corner = row * PATCH * line_stride + column * (PATCH * 3)
        corner_ptr = frames_ptr + frame.to(tl.int64) * frame_stride + corner
        for channel in tl.static_range(3):
            value = _channel(
                corner_ptr + channel,
                line_stride,
                mean_0 if channel == 0 else (mean_1 if channel == 1 else mean_2),
                std_0 if channel == 0 else (std_1 if channel == 1 else std_2),
                PATCH,
                PIXELS_TILE,
            )
            place = (channel * TEMPORAL + step) * (PATCH * PATCH)
            _store_channel(out_row_ptr + place, value, PATCH, PIXELS_TILE)


@triton.jit
def _patchify_packed_kernel(
    pixels_ptr,
    start_ptr,
    coords_ptr,
    out_ptr,
    start_stride,
    coords_stride,
    out_stride,
    mean_0,
    mean_1,
    mean_2,
    std_0,
    std_1,
    std_2,
    PATCH: tl.constexpr,
    TEMPORAL: tl.constexpr,
    PIXELS_TILE: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    row = tl.load(coords_ptr + patch * coords_stride)
    column = tl.load(coords_ptr + patch * coords_stride + 1)
    line_stride = tl.load(coords_ptr + patch * coords_stride + 3) * (PATCH * 3)
    used = tl.load(start_ptr + patch * start_stride) >= 0
    out_row_ptr = out_ptr + patch * out_stride
    for step in tl.static_range(TEMPORAL):
        start = tl.maximum(tl.load(start_ptr + patch * start_stride + step), 0)
        corner_ptr = pixels_ptr + start + row * PATCH * line_stride + column * (PATCH * 3)
        for channel in tl.static_range(3):
            value = _channel(
                corner_ptr + channel,
                line_stride,
                mean_0 if channel == 0 else (mean_1 if channel == 1 else mean_2),
                std_0 if channel == 0 else (std_1 if channel == 1 else std_2),
                PATCH,
                PIXELS_TILE,
            )
            value = tl.where(used, value, 0.0)
            place = (channel * TEMPORAL + step) * (PATCH * PATCH)
            _store_channel(out_row_ptr + place, value, PATCH, PIXELS_TILE)
