"""M-RoPE over q and k in one launch, in place.

Owns the gather of each pair's angle by its axis, the half-split rotation, and the launch's shape. One program
holds one token: its angles are read once for all heads, and elements that do not turn are never touched.
Arithmetic is float32. Checks are ``rotary``'s.

Shape legend: T tokens, H heads, d head_dim, F rotary_dim / 2.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAIRS_PER_WARP = 512


def rotation_warps(num_heads: int, half: int) -> int:
    """Warps of a program that holds a token's q: 16 pairs a lane, two 16-byte accesses for each half."""
    pairs: int = triton.next_power_of_2(num_heads) * triton.next_power_of_2(half)
    return min(8, max(1, pairs // PAIRS_PER_WARP))


def rotate_qk_(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    positions_3T: torch.Tensor,
    cos_sin: torch.Tensor,
    sections: tuple[int, int, int],
    interleaved: bool,
) -> None:
    """Rotates both in place. Arguments as of ``rotary.apply_mrope``; cos_sin: float32 [P, 2F], contiguous."""
    num_tokens, num_q_heads, _ = q_THd.shape
    num_k_heads = k_THd.shape[1]
    half = sum(sections)
    assert q_THd.stride(2) == k_THd.stride(2) == 1, "elements of a head lie apart"
    assert cos_sin.is_contiguous()
    if num_tokens == 0:
        return
    _rotate_kernel[(num_tokens,)](
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
        Q_TILE=triton.next_power_of_2(max(1, num_q_heads)),
        K_HEADS=num_k_heads,
        K_TILE=triton.next_power_of_2(max(1, num_k_heads)),
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        T_SECTION=sections[0],
        H_SECTION=sections[1],
        W_SECTION=sections[2],
        INTERLEAVED=interleaved,
        num_warps=rotation_warps(max(num_q_heads, num_k_heads), half),
    )


@triton.jit
def _load_heads(
    x_ptr,
    head_stride,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Both halves [H, F] of all heads of one token, in their own dtype."""
    head = tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    used = (head < HEADS) & (pair < HALF)
    first_ptr = x_ptr + head * head_stride + pair
    return tl.load(first_ptr, mask=used, other=0.0), tl.load(first_ptr + HALF, mask=used, other=0.0)


@triton.jit
def _store_turned(
    x_ptr,
    head_stride,
    first,
    second,
    cos,
    sin,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Both halves turned by the angles [1, F] that all heads share."""
    head = tl.arange(0, TILE)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    used = (head < HEADS) & (pair < HALF)
    first_ptr = x_ptr + head * head_stride + pair
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=used)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(dtype), mask=used)


# axis_stride is a step's number of tokens: one compiled kernel for any, so that no step waits for a compiler.
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
    q_ptr += token * q_token_stride
    k_ptr += token * k_token_stride
    # Ahead of the angles, which wait for the positions: with few tokens latency is all there is.
    q_first, q_second = _load_heads(q_ptr, q_head_stride, Q_HEADS, Q_TILE, HALF, HALF_TILE)
    k_first, k_second = _load_heads(k_ptr, k_head_stride, K_HEADS, K_TILE, HALF, HALF_TILE)

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

    _store_turned(q_ptr, q_head_stride, q_first, q_second, cos, sin, Q_HEADS, Q_TILE, HALF, HALF_TILE)
    _store_turned(k_ptr, k_head_stride, k_first, k_second, cos, sin, K_HEADS, K_TILE, HALF, HALF_TILE)
