"""The batches that the tower bench times, and the useful work in each.

Owns the cases and the count of operations. Sides are in patches, so that families of different patch sizes
get the same grids and compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encoder_service.towers import Tower, TowerInputs
from encoder_service.towers.config import MoonViTConfig, QwenVisionConfig
from encoder_service.types import Grid

# Patches a side of an image, by pixels a side at 16 pixels a patch.
SIDES = {256: 16, 448: 28, 512: 32, 768: 48, 1024: 64}
SIZES_OF_MIXED = ((8, 448), (2, 1024), (4, 768), (16, 256), (6, 512))
CASES = ("1x448", "1x1024", "8x1024", "32x448", "mixed", "clip")
QUICK_CASES = ("1x448", "1x1024")
# To see on a CPU that the bench runs.
SMALL_CASE = "1x256"
KNOWN_CASES = (SMALL_CASE, *CASES)
# Where the device is busy throughout, so that its power and clocks tell something.
SATURATED_CASES = ("8x1024", "32x448")
# Compiling takes tens of seconds a case.
COMPILED_CASES = ("1x448", "1x1024", "8x1024")
# The most telling first: a run that is cut short has these.
RUN_ORDER = (SMALL_CASE, "1x1024", "8x1024", "1x448", "32x448", "mixed", "clip")


def grids_of(case: str, *, merges_time: bool) -> list[Grid]:
    """The items of a case. ``clip`` is 16 times 448 pixels: one item of 16 frame pairs where attention stays
    within a frame, four items of four frames (the longest that the tower takes) where it spans the clip."""
    if case == "clip":
        return [Grid(4, 28, 28)] * 4 if merges_time else [Grid(16, 28, 28)]
    if case == "mixed":
        return [Grid(1, SIDES[side], SIDES[side]) for count, side in SIZES_OF_MIXED for _ in range(count)]
    count, side = (int(part) for part in case.split("x"))
    return [Grid(1, SIDES[side], SIDES[side])] * count


def num_patches_of(case: str) -> int:
    """Patches of a case, the same in every family."""
    return sum(grid.num_patches for grid in grids_of(case, merges_time=False))


def random_inputs(tower: Tower, grids: Sequence[Grid], seed: int) -> TowerInputs:
    """A prepared batch on the tower's device with random float32 pixels."""
    generator = torch.Generator(tower.device).manual_seed(seed)
    num_patches = sum(grid.num_patches for grid in grids)
    pixels = torch.randn(num_patches, tower.patch_dim, generator=generator, device=tower.device) * 0.5
    return tower.prepare(grids).to(tower.device).with_pixels(pixels)


def useful_flops(tower: Tower, inputs: TowerInputs) -> int:
    """Multiplications and additions of the products and of attention; norms, activations and rotations are
    left out."""
    config: QwenVisionConfig | MoonViTConfig = tower.config  # type: ignore[assignment]
    width, num_patches = config.hidden_size, inputs.num_patches
    num_rows = (
        inputs.merge_index.shape[0] if inputs.merge_index is not None else num_patches
    ) // config.merge_size**2
    merged_width = width * config.merge_size**2
    products = num_patches * width * (4 * width + 2 * config.intermediate_size)
    attention = 2 * width * sum(length**2 for length in inputs.seqlens)
    merger = num_rows * merged_width * (merged_width + config.out_width)
    return 2 * (
        num_patches * tower.patch_dim * width
        + config.depth * (products + attention)
        + (1 + tower.num_deepstack_levels) * merger
    )
