"""One row of a matrix, held by one program in two register tiles, and a norm over them.

Owns the split of a row whose width is not a power of two, and arithmetic that several kernels share.

A row of ``width`` elements is split into a main tile, the largest power of two below the width, and a masked
tail tile: 1024 + 128 for 1152, 4096 + 256 for 4304, 4096 + 512 for 4608. At these widths, a single tile of
the next power of two would leave almost half of the lanes idle.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of the main tile per warp: eight per lane, one 16-byte access for a two-byte type.
ELEMENTS_PER_WARP = 256
MAX_WARPS = 8


def split_width(width: int) -> tuple[int, int]:
    """Elements of the main and of the tail tile of a row. width: at least 2."""
    main: int = triton.next_power_of_2(width) // 2
    tail: int = triton.next_power_of_2(width - main)
    return main, tail


def row_warps(width: int) -> int:
    """Number of warps of a program that holds one row."""
    main, _ = split_width(width)
    return min(MAX_WARPS, max(1, main // ELEMENTS_PER_WARP))


def check_rows(name: str, x: torch.Tensor, shape: tuple[int, int]) -> None:
    """Asserts that x is a matrix of ``shape`` with contiguous rows. The row stride may exceed the width."""
    assert tuple(x.shape) == shape, f"{name} has shape {list(x.shape)}, needs {list(shape)}"
    assert x.stride(1) == 1, f"{name}'s rows have stride {x.stride(1)}, need 1"


def check_vector(name: str, x: torch.Tensor, size: int) -> None:
    """Asserts that x is a contiguous vector of ``size`` elements."""
    assert tuple(x.shape) == (size,), f"{name} has shape {list(x.shape)}, needs [{size}]"
    assert x.is_contiguous(), f"{name} is not contiguous"


def check_norm(weight: torch.Tensor, bias: torch.Tensor | None, width: int) -> None:
    """Asserts that the vectors of a norm fit rows of ``width``."""
    check_vector("a norm's weight", weight, width)
    if bias is not None:
        check_vector("a norm's bias", bias, width)


@triton.jit
def load_row(row_ptr, WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Loads the main and the tail tile in float32, with zeros after the end of the row."""
    tail = MAIN + tl.arange(0, TAIL)
    main_part = tl.load(row_ptr + tl.arange(0, MAIN)).to(tl.float32)
    tail_part = tl.load(row_ptr + tail, mask=tail < WIDTH, other=0.0).to(tl.float32)
    return main_part, tail_part


@triton.jit
def store_row(row_ptr, main_part, tail_part, WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Stores both tiles in the row's dtype."""
    tail = MAIN + tl.arange(0, TAIL)
    tl.store(row_ptr + tl.arange(0, MAIN), main_part.to(row_ptr.dtype.element_ty))
    tl.store(row_ptr + tail, tail_part.to(row_ptr.dtype.element_ty), mask=tail < WIDTH)


@triton.jit
def norm_row(
    main_part,
    tail_part,
    weight_ptr,
    bias_ptr,
    eps,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """LayerNorm of a row in two tiles, variance from the centred values; RMSNorm without a bias. Zeros after
    the row's end."""
    # Loaded before the sums, because the compiler moves no load across their barriers.
    main_weight, tail_weight = load_row(weight_ptr, WIDTH, MAIN, TAIL)
    if bias_ptr is not None:
        main_bias, tail_bias = load_row(bias_ptr, WIDTH, MAIN, TAIL)
        in_row = MAIN + tl.arange(0, TAIL) < WIDTH
        mean = (tl.sum(main_part, 0) + tl.sum(tail_part, 0)) / WIDTH
        main_part = main_part - mean
        tail_part = tl.where(in_row, tail_part - mean, 0.0)
    square = (tl.sum(main_part * main_part, 0) + tl.sum(tail_part * tail_part, 0)) / WIDTH
    scale = tl.rsqrt(square + eps)
    main_part = main_part * scale * main_weight
    tail_part = tail_part * scale * tail_weight
    if bias_ptr is not None:
        main_part += main_bias
        tail_part += tail_bias
    return main_part, tail_part
