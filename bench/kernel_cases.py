"""What bench/kernels.py times: each kernel's inputs, the bytes it has to move, and its float32 reference.

Owns the sizes of the towers and one case per kernel. Timing is kernels.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers import kernels
from encoder_service.towers.fused_inputs import FusedInputBuilder
from encoder_service.towers.layers import interpolate_positions
from encoder_service.towers.positions import (
    cubic_taps,
    grid_taps,
    linear_taps,
    merge_order,
    raster_coordinates,
)
from encoder_service.towers.rope import blocked_tables, inverse_frequencies, rotate
from encoder_service.types import Grid

WIDTH, HEADS, HEAD_DIM, MLP_WIDTH = 1152, 16, 72, 4304
EPS = 1e-6
NUM_SLOTS = 64
STATISTICS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


@dataclass(frozen=True)
class Case:
    """run: one launch on given inputs, which it may overwrite; reference: the same on float32 copies; inputs:
    fresh ones; num_bytes: read and written at least."""

    name: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    run: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    num_bytes: int


def cases(num_patches: int, device: torch.device) -> Iterator[Case]:
    """Every kernel at one number of patches, in a frame of 4-patch blocks as square as 4 columns allow."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    height, width = num_patches // side(num_patches), side(num_patches)
    rows, columns = raster_coordinates(height, width)
    sizes = torch.tensor([height, width]).expand(num_patches, 2)
    coords = torch.cat([rows[:, None], columns[:, None], sizes], 1).int().to(device)
    weight, bias = randn(WIDTH), randn(WIDTH)
    plane = num_patches * WIDTH * 2

    def pair() -> tuple[torch.Tensor, ...]:
        return randn(num_patches, WIDTH), randn(num_patches, WIDTH)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (WIDTH,), weight.float(), bias.float(), EPS)

    def added(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return (x + delta).bfloat16().float()

    def unscaled(pair_: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair_[0].float() * pair_[1]

    yield Case(
        "layer_norm",
        lambda: pair()[:1],
        lambda x: kernels.layer_norm(x, weight, bias, EPS),
        normed,
        2 * plane,
    )
    yield Case(
        "add_norm",
        pair,
        lambda x, delta: kernels.add_norm(x, delta, weight, bias, EPS),
        lambda x, delta: normed(added(x, delta)),
        4 * plane,
    )
    yield Case(
        "add_norm_quantize",
        pair,
        lambda x, delta: unscaled_later(kernels.add_norm_quantize(x, delta, weight, bias, EPS), unscaled),
        lambda x, delta: normed(added(x, delta)),
        7 * plane // 2,
    )
    yield Case(
        "quantize_rows",
        lambda: pair()[:1],
        lambda x: unscaled_later(kernels.quantize_rows(x), unscaled),
        lambda x: x,
        3 * plane // 2,
    )

    angles = torch.arange(max(height, width))[:, None] * inverse_frequencies(HEAD_DIM, 10_000.0)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    full_cos, full_sin = (t.to(device) for t in blocked_tables(rows, columns, HEAD_DIM, 10_000.0))

    def rotated(qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(num_patches, 3 * HEADS, HEAD_DIM)
        qk = rotate(heads[:, : 2 * HEADS], full_cos, full_sin)
        return torch.cat([qk, heads[:, 2 * HEADS :]], 1).flatten(1)

    yield Case(
        "rotate_qkv_",
        lambda: (randn(num_patches, 3 * WIDTH),),
        lambda qkv: kernels.rotate_qkv_(qkv, coords, cos, sin, "blocked", HEADS),
        rotated,
        4 * plane,
    )

    for mode, table_side, taps in (("linear", 48, linear_taps), ("cubic", 64, cubic_taps)):
        table = randn(table_side**2, WIDTH)
        index, tap_weight = grid_taps(taps(height, table_side), taps(width, table_side), table_side)
        positions = interpolate_positions(table, index.to(device), tap_weight.to(device))

        def embed(x: torch.Tensor, mode: Any = mode, table: torch.Tensor = table) -> torch.Tensor:
            table_side = {"linear": 48, "cubic": 64}[mode]
            sides: dict[str, Any] = {"table_height": table_side, "table_width": table_side}
            return kernels.embed_norm(x, table, coords, weight, bias, EPS, mode=mode, **sides)

        yield Case(
            f"embed_norm {mode}",
            lambda: pair()[:1],
            embed,
            lambda x, positions=positions: normed(added(x, positions)),
            3 * plane + table.nbytes,
        )

    for form in ("none", "tanh"):
        yield Case(
            f"gelu_ {form}",
            lambda: (randn(num_patches, MLP_WIDTH),),
            lambda x, form=form: kernels.gelu_(x, form),
            lambda x, form=form: torch.nn.functional.gelu(x, approximate=form),
            2 * num_patches * MLP_WIDTH * 2,
        )
    yield Case(
        "gelu_quantize tanh",
        lambda: (randn(num_patches, MLP_WIDTH),),
        lambda x: unscaled_later(kernels.gelu_quantize(x, "tanh"), unscaled),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        3 * num_patches * MLP_WIDTH,
    )

    norm = kernels.Norm(weight, bias, EPS)
    merge_index = merge_order(height, width, 2)[:, None].int().to(device)
    merge_weight = torch.ones(num_patches, 1, device=device)
    yield Case(
        "merge_frames_norm",
        pair,
        lambda x, delta: kernels.merge_frames_norm(x, delta, merge_index, merge_weight, norm, norm),
        lambda x, delta: normed(normed(added(x, delta)).bfloat16().float())[merge_index[:, 0].long()],
        3 * plane,
    )
    yield from patch_cases(height, width, device)
    yield from expand_cases(height, width, device)


def patch_cases(height: int, width: int, device: torch.device) -> Iterator[Case]:
    """Patches of one frame of height by width patches."""
    num_patches = height * width

    def still(patch: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        shape = (1, height * patch, width * patch, 3)
        return lambda: (torch.randint(256, shape, dtype=torch.uint8, device=device),)

    def qwen(frames: torch.Tensor) -> torch.Tensor:
        out = torch.empty(num_patches, 1536, dtype=torch.bfloat16, device=device)
        sizes: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
        return kernels.patchify_qwen(frames, out, *STATISTICS, **sizes)

    def qwen_plain(frames: torch.Tensor) -> torch.Tensor:
        x = (frames.float() - 127.5) / 127.5
        blocks = x.view(height // 2, 2, 16, width // 2, 2, 16, 3).permute(0, 3, 1, 4, 6, 2, 5)
        return blocks.reshape(num_patches, 3, 1, 256).repeat(1, 1, 2, 1).flatten(1)

    def moonvit(frames: torch.Tensor) -> torch.Tensor:
        out = torch.empty(num_patches, 588, dtype=torch.bfloat16, device=device)
        return kernels.patchify_moonvit(frames, out, *STATISTICS, patch_size=14)

    def moonvit_plain(frames: torch.Tensor) -> torch.Tensor:
        x = (frames.float() - 127.5) / 127.5
        return x.view(height, 14, width, 14, 3).permute(0, 2, 4, 1, 3).reshape(num_patches, 588)

    yield Case("patchify_qwen", still(16), qwen, qwen_plain, num_patches * (768 + 3072))
    yield Case("patchify_moonvit", still(14), moonvit, moonvit_plain, num_patches * (588 + 1176))

    # The same frame as the first item of a bucket's slots.
    sources = torch.tensor([[0, 1]] + [[-1, 0]] * (NUM_SLOTS - 1), device=device)

    def batch(merges_time: bool, patch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        items = item_table(height, width, device, merges_time=merges_time)
        temporal = 1 if merges_time else 2
        sizes: dict[str, Any] = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": temporal}

        def run(frames: torch.Tensor) -> torch.Tensor:
            out = torch.empty(num_patches, 3 * temporal * patch**2, dtype=torch.bfloat16, device=device)
            pixels = frames.flatten()
            return kernels.patchify_items(
                pixels, items, sources, out, *STATISTICS, **sizes, merges_time=merges_time
            )

        return run

    yield Case("patchify_items qwen", still(16), batch(False, 16), qwen_plain, num_patches * (768 + 3072))
    yield Case(
        "patchify_items moonvit", still(14), batch(True, 14), moonvit_plain, num_patches * (588 + 1176)
    )


def expand_cases(height: int, width: int, device: torch.device) -> Iterator[Case]:
    """Coordinates of one frame of height by width patches, and with MoonViT's merge over four frames."""
    num_patches = height * width
    rows, columns = raster_coordinates(height, width)
    order = merge_order(height, width, 2)
    sizes = torch.tensor([height, width]).expand(num_patches, 2)
    for merges_time, place in ((False, order), (True, torch.arange(num_patches))):
        coords = torch.cat([rows[place, None], columns[place, None], sizes], 1).float().to(device)
        items = item_table(height, width, device, merges_time=merges_time)
        arguments: dict[str, Any] = {"merge_size": 2, "merges_time": merges_time}
        if merges_time:
            arguments |= {"num_places": num_patches, "num_frames": 4}
        yield Case(
            f"expand_items {'moonvit' if merges_time else 'qwen'}",
            lambda items=items: (items,),
            lambda items, arguments=arguments: kernels.expand_items(items, num_patches, **arguments).coords,
            lambda _, coords=coords: coords,
            num_patches * (16 + (4 + 4 * 8 if merges_time else 0)),
        )


def item_table(height: int, width: int, device: torch.device, *, merges_time: bool) -> torch.Tensor:
    """One frame of height by width patches, in a bucket of NUM_SLOTS slots that it fills."""
    builder = FusedInputBuilder(lambda _: None, merge_size=2, merges_time=merges_time)
    num_patches = height * width
    bucket = Bucket(num_patches, NUM_SLOTS, num_patches, 4)
    return builder.pad(builder.prepare([Grid(1, height, width)]), bucket).items.contiguous().to(device)


def unscaled_later(
    pair: tuple[torch.Tensor, torch.Tensor],
    unscaled: Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """fp8 values times their scales for the check; in a capture the values alone, whose time is asked."""
    return pair[0] if torch.cuda.is_current_stream_capturing() else unscaled(pair)


def side(num_patches: int) -> int:
    """The largest even divisor of num_patches up to its root that leaves an even quotient."""
    return max(n for n in range(2, int(num_patches**0.5) + 1, 2) if num_patches % (2 * n) == 0)
