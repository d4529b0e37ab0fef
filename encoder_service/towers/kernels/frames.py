"""MoonViT's end up to the projector's products: last addition to the residual, final norm, average over
frames, pre-norm.

Owns one pass from the last block's output to the projector's input. ``moonvit.merge_tables`` defines which
patches make up a row.

Shape legend: P patches, G merger inputs (R * merge^2), F frames averaged into one, E tower width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import (
    check_norm,
    check_rows,
    load_row,
    norm_row,
    row_warps,
    split_width,
    store_row,
)
from encoder_service.towers.layers import Norm


def merge_frames_norm(
    x_PE: torch.Tensor,
    delta_PE: torch.Tensor | None,
    index_GF: torch.Tensor,
    weight_GF: torch.Tensor,
    final_norm: Norm,
    pre_norm: Norm | None,
) -> torch.Tensor:
    """pre_norm of the weighted mean, over F frames, of final_norm(x[i] + delta[i]), or that mean without a
    pre_norm: new [G, E] in x's dtype.

    index: int32 or int64 [G, F], rows of x. weight: float32 [G, F]; zero in unused entries, whose index must
    still be valid. x and delta are not changed; their row strides may exceed E; delta may be None. The sum,
    the final norm and the mean are each rounded to x's dtype, as in MoonViTTower.
    """
    num_patches, width = x_PE.shape
    num_rows, num_frames = index_GF.shape
    check_rows("x", x_PE, (num_patches, width))
    if delta_PE is not None:
        check_rows("delta", delta_PE, (num_patches, width))
    check_rows("index", index_GF, (num_rows, num_frames))
    check_rows("weight", weight_GF, (num_rows, num_frames))
    check_norm(final_norm.weight, final_norm.bias, width)
    if pre_norm is not None:
        check_norm(pre_norm.weight, pre_norm.bias, width)
    merged_GE = torch.empty((num_rows, width), dtype=x_PE.dtype, device=x_PE.device)
    if num_rows == 0:
        return merged_GE
    main, tail = split_width(width)
    _merge_kernel[(num_rows,)](
        x_PE,
        delta_PE,
        index_GF,
        weight_GF,
        final_norm.weight,
        final_norm.bias,
        pre_norm.weight if pre_norm is not None else None,
        pre_norm.bias if pre_norm is not None else None,
        merged_GE,
        x_PE.stride(0),
        delta_PE.stride(0) if delta_PE is not None else 0,
        index_GF.stride(0),
        weight_GF.stride(0),
        final_norm.eps,
        pre_norm.eps if pre_norm is not None else 0.0,
        FRAMES=num_frames,
        WIDTH=width,
        MAIN=main,
        TAIL=tail,
        num_warps=row_warps(width),
    )
    return merged_GE


@triton.jit
def _merge_kernel(
    x_ptr,
    delta_ptr,
    index_ptr,
    frame_weight_ptr,
    final_weight_ptr,
    final_bias_ptr,
    pre_weight_ptr,
    pre_bias_ptr,
    merged_ptr,
    x_stride,
    delta_stride,
    index_stride,
    frame_weight_stride,
    final_eps,
    pre_eps,
    FRAMES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = x_ptr.dtype.element_ty
    main_mean = tl.zeros((MAIN,), dtype=tl.float32)
    tail_mean = tl.zeros((TAIL,), dtype=tl.float32)
    for frame in range(FRAMES):
        patch = tl.load(index_ptr + row * index_stride + frame).to(tl.int64)
        frame_weight = tl.load(frame_weight_ptr + row * frame_weight_stride + frame)
        main_part, tail_part = load_row(x_ptr + patch * x_stride, WIDTH, MAIN, TAIL)
        if delta_ptr is not None:
            main_delta, tail_delta = load_row(delta_ptr + patch * delta_stride, WIDTH, MAIN, TAIL)
            main_part = (main_part + main_delta).to(dtype).to(tl.float32)
            tail_part = (tail_part + tail_delta).to(dtype).to(tl.float32)
        main_part, tail_part = norm_row(
            main_part, tail_part, final_weight_ptr, final_bias_ptr, final_eps, WIDTH, MAIN, TAIL
        )
        main_mean += main_part.to(dtype).to(tl.float32) * frame_weight
        tail_mean += tail_part.to(dtype).to(tl.float32) * frame_weight
    if pre_weight_ptr is not None:
        main_mean, tail_mean = norm_row(
            main_mean.to(dtype).to(tl.float32),
            tail_mean.to(dtype).to(tl.float32),
            pre_weight_ptr,
            pre_bias_ptr,
            pre_eps,
            WIDTH,
            MAIN,
            TAIL,
        )
    store_row(merged_ptr + row * WIDTH, main_mean, tail_mean, WIDTH, MAIN, TAIL)
