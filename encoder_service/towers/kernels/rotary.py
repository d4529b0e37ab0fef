"""Two-axis rotary positions, applied in place to the packed projection of q, k and v, after a norm of q and k
if the family has one.

Owns the gather of each patch's angles from tables by coordinate, in the order of a family (see rope.py),
and the half-split rotation in float32. Only the projection itself is read from and written to memory.

Shape legend: P patches, H heads, d head_dim.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import check_vector
from encoder_service.towers.layers import Norm
from encoder_service.towers.rope import RotaryLayout

NUM_WARPS = 4


def rotate_qkv_(
    qkv: torch.Tensor,
    coords_P4: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    num_heads: int,
    norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Rotates q and k of qkv [P, 3 * H * d] in place and returns qkv; v is unchanged.

    Element i of a head rotates with element i + d/2 (rope.rotate). coords: int32 [P, 4]; the first two
    columns are row and column. cos, sin: float32 [max_side, d/4], by coordinate and frequency. Every
    coordinate must be below max_side, which the device does not check. layout: in "blocked" (Qwen), pair j <
    d/4 rotates by the row's frequency j, the other pairs by the column's frequency j - d/4. In "interleaved"
    (MoonViT), even j rotate by the column's and odd j by the row's frequency j // 2. norms: the RMSNorms
    of each head's q and k before the rotation, with the same epsilon; their result is rounded to qkv's dtype,
    as in the plain tower. Row strides of qkv and coords may exceed their widths.
    """
    num_patches, packed_width = qkv.shape
    head_dim = packed_width // (3 * num_heads)
    assert packed_width == 3 * num_heads * head_dim, f"qkv is {packed_width} wide, with {num_heads} heads"
    assert head_dim % 4 == 0, f"head_dim is {head_dim}, needs a multiple of 4"
    assert qkv.stride(1) == 1
    assert coords_P4.shape == (num_patches, 4), f"coords is {list(coords_P4.shape)}, needs {[num_patches, 4]}"
    assert coords_P4.stride(1) == 1
    for table in (cos, sin):
        assert table.shape[1] == head_dim // 4, f"a table is {table.shape[1]} wide, needs {head_dim // 4}"
        assert table.is_contiguous()
        assert table.dtype == torch.float32
    if num_patches == 0:
        return qkv
    q_norm, k_norm = norms or (None, None)
    for norm in (q_norm, k_norm):
        if norm is not None:
            check_vector("norm", norm.weight, head_dim)
            assert norm.bias is None
    assert q_norm is None or k_norm is None or q_norm.eps == k_norm.eps
    half = head_dim // 2
    _rotate_kernel[(num_patches,)](
        qkv,
        coords_P4,
        cos,
        sin,
        q_norm and q_norm.weight,
        k_norm and k_norm.weight,
        q_norm.eps if q_norm else 0.0,
        qkv.stride(0),
        coords_P4.stride(0),
        HEADS=2 * num_heads,
        HEADS_TILE=triton.next_power_of_2(2 * num_heads),
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        INTERLEAVED=layout == "interleaved",
        num_warps=NUM_WARPS,
    )
    return qkv


@triton.jit
def _head_weight(q_weight_ptr, k_weight_ptr, element, used, is_q):
    """Norm weights of these elements, float32 [heads, elements]."""
    of_q = tl.load(q_weight_ptr + element, mask=used, other=0.0).to(tl.float32)[None, :]
    of_k = tl.load(k_weight_ptr + element, mask=used, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q, of_q, of_k)


@triton.jit
def _rotate_kernel(
    qkv_ptr,
    coords_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    qkv_stride,
    coords_stride,
    HEADS: tl.constexpr,  # number of heads of q and k together, which are adjacent
    HEADS_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    row = tl.load(coords_ptr + patch * coords_stride)
    column = tl.load(coords_ptr + patch * coords_stride + 1)

    pair = tl.arange(0, HALF_TILE)
    if INTERLEAVED:
        position = tl.where(pair % 2 == 0, column, row)
        frequency = pair // 2
    else:
        of_row = pair < HALF // 2
        position = tl.where(of_row, row, column)
        frequency = tl.where(of_row, pair, pair - HALF // 2)
    angle = position * (HALF // 2) + frequency
    cos = tl.load(cos_ptr + angle, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pair < HALF, other=0.0)[None, :]

    head = tl.arange(0, HEADS_TILE)[:, None]
    first_ptr = qkv_ptr + patch * qkv_stride + head * (2 * HALF) + pair[None, :]
    used = (head < HEADS) & (pair[None, :] < HALF)
    first = tl.load(first_ptr, mask=used, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=used, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    if q_weight_ptr is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        # The heads of q come before those of k.
        is_q = head < HEADS // 2
        used_pair = pair < HALF
        for_first = _head_weight(q_weight_ptr, k_weight_ptr, pair, used_pair, is_q)
        for_second = _head_weight(q_weight_ptr, k_weight_ptr, HALF + pair, used_pair, is_q)
        first = (first * scale * for_first).to(dtype).to(tl.float32)
        second = (second * scale * for_second).to(dtype).to(tl.float32)
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=used)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(dtype), mask=used)
