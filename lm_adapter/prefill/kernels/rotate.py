"""M-RoPE on q and k, in place, in one launch.

Owns gathering each pair's angle by its axis, the half-split rotation, and the launch configuration. A program
processes all heads of one token, or a part of them: it reads the angles once for all its heads and does not
touch elements that are not rotated. Arithmetic is float32. ``rotary`` checks the arguments.

Shape legend: T tokens, H heads, d head_dim, F rotary_dim / 2.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Upper limits, in tokens, of short and medium steps. Short steps are bound by memory latency, so each token
# gets several programs with many warps. Long steps have enough programs with one per token.
SHORT_STEP = 128
MEDIUM_STEP = 4096


class RotationTiles(NamedTuple):
    """blocks: programs per token. q_heads, k_heads: heads that each program processes."""

    blocks: int
    q_heads: int
    k_heads: int
    num_warps: int


def rotation_tiles(num_tokens: int, num_q_heads: int, num_k_heads: int, half: int) -> RotationTiles:
    """The fastest tiles on an H200 for the head counts of Qwen's language models. Steps are short, medium or
    long; each kind has one compiled kernel."""
    q_heads, k_heads = (triton.next_power_of_2(max(1, heads)) for heads in (num_q_heads, num_k_heads))
    heads = max(q_heads, k_heads)
    pairs = heads * triton.next_power_of_2(half)
    if num_tokens <= SHORT_STEP:
        blocks, pairs_per_warp = 4 if pairs > 1024 else 2, 128
    elif num_tokens <= MEDIUM_STEP:
        blocks, pairs_per_warp = max(1, pairs // 1024), 512
    else:
        blocks, pairs_per_warp = 1, 512
    blocks = min(blocks, heads)
    num_warps = min(8, max(1, pairs // blocks // pairs_per_warp))
    return RotationTiles(blocks, max(1, q_heads // blocks), max(1, k_heads // blocks), num_warps)


def rotate_qk_(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    positions_3T: torch.Tensor,
    cos_sin: torch.Tensor,
    sections: tuple[int, int, int],
    interleaved: bool,
) -> None:
    """Rotates q and k in place. Arguments as for ``rotary.apply_mrope``. cos_sin: float32 [P, 2F],
    contiguous."""
    num_tokens, num_q_heads, _ = q_THd.shape
    num_k_heads = k_THd.shape[1]
    half = sum(sections)
    assert q_THd.stride(2) == k_THd.stride(2) == 1, "elements of a head are not contiguous"
    assert cos_sin.is_contiguous()
    if num_tokens == 0:
        return
    tiles = rotation_tiles(num_tokens, num_q_heads, num_k_heads, half)
    _rotate_kernel[(num_tokens, tiles.blocks)](
        q_THd,
        k_THd,
        positions_3T,
        cos_sin,
        q_THd.stride(0),
        q_THd.stride(1),
        k_THd.stride(0),
        k_THd.stride(1),
        positions_3T.stride(0),
        positions_3T.stride(1),
        Q_HEADS=num_q_heads,
        Q_TILE=tiles.q_heads,
        K_HEADS=num_k_heads,
        K_TILE=tiles.k_heads,
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        T_SECTION=sections[0],
        H_SECTION=sections[1],
        W_SECTION=sections[2],
        INTERLEAVED=interleaved,
        num_warps=tiles.num_warps,
    )


@triton.jit
def _load_heads(
    x_ptr,
    head_stride,
    block,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Loads both halves [H, F] of a block of one token's heads, in their own dtype."""
    head = block * TILE + tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    used = (head < HEADS) & (pair < HALF)
    first_ptr = x_ptr + head * head_stride + pair
    return tl.load(first_ptr, mask=used, other=0.0), tl.load(first_ptr + HALF, mask=used, other=0.0)


@triton.jit
def _store_rotated(
    x_ptr,
    head_stride,
    block,
    first,
    second,
    cos,
    sin,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Rotates both halves by the angles [1, F], which all heads share, and stores them."""
    head = block * TILE + tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    used = (head < HEADS) & (pair < HALF)
    first_ptr = x_ptr + head * head_stride + pair
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=used)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(dtype), mask=used)


# axis_stride equals the step's number of tokens. Not specialising on it avoids compiling for each length.
@triton.jit(do_not_specialize=["axis_stride"])
def _rotate_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    axis_stride,
    position_stride,
    Q_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    T_SECTION: tl.constexpr,
    H_SECTION: tl.constexpr,
    W_SECTION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_ptr += token * q_token_stride
    k_ptr += token * k_token_stride
    # Load the heads before the angles, which depend on the positions: latency dominates with few tokens.
    q_first, q_second = _load_heads(q_ptr, q_head_stride, block, Q_HEADS, Q_TILE, HALF, HALF_TILE)
    k_first, k_second = _load_heads(k_ptr, k_head_stride, block, K_HEADS, K_TILE, HALF, HALF_TILE)

    position_ptr = positions_ptr + token * position_stride
    at_t = tl.load(position_ptr).to(tl.int64)
    at_h = tl.load(position_ptr + axis_stride).to(tl.int64)
    at_w = tl.load(position_ptr + 2 * axis_stride).to(tl.int64)

    pair = tl.arange(0, HALF_TILE)
    if INTERLEAVED:
        by_h = (pair % 3 == 1) & (pair < 3 * H_SECTION)
        by_w = (pair % 3 == 2) & (pair < 3 * W_SECTION)
    else:
        by_h = (pair >= T_SECTION) & (pair < T_SECTION + H_SECTION)
        by_w = pair >= T_SECTION + H_SECTION
    position = tl.where(by_h, at_h, tl.where(by_w, at_w, at_t))
    angle_ptr = cos_sin_ptr + position * (2 * HALF) + pair
    cos = tl.load(angle_ptr, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0)[None, :]

    _store_rotated(q_ptr, q_head_stride, block, q_first, q_second, cos, sin, Q_HEADS, Q_TILE, HALF, HALF_TILE)
    _store_rotated(k_ptr, k_head_stride, block, k_first, k_second, cos, sin, K_HEADS, K_TILE, HALF, HALF_TILE)
