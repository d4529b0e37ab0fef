"""What the engines' plugins compute for Kimi-VL and Kimi-K3: grids, texts around an image."""

from __future__ import annotations

import math

from lm_adapter.items import Grid

MAX_PATCHES_PER_SIDE = 511


def kimi_vl_grid(width: int, height: int, *, patch_size: int, merge_size: int, max_patches: int) -> Grid:
    """The grid of an image by the rule of Kimi-VL's published processor: scaled down to the budget of whole
    patches, then padded to whole merge blocks. Raises ValueError for a side of too many patches."""
    num_patches = (width // patch_size) * (height // patch_size)
    scaled = width, height
    if num_patches > max_patches:
        scale = math.sqrt(max_patches / num_patches)
        scaled = int(width * scale), int(height * scale)
    block = patch_size * merge_size
    columns, rows = (-(-side // block) * merge_size for side in scaled)
    if max(columns, rows) > MAX_PATCHES_PER_SIDE:
        raise ValueError(
            f"the image of {width}x{height} has {max(columns, rows)} patches along a side, Kimi-VL takes"
            f" {MAX_PATCHES_PER_SIDE}"
        )
    return Grid(1, rows, columns)


def k3_media_texts(width: int, height: int) -> tuple[str, str]:
    """The texts before and after the placeholders of an image in a prompt of Kimi-K3. width, height: of the
    image as it was sent, in pixels."""
    return f"<|media_begin|>image {width}x{height}<|media_content|>", "<|media_end|>"
