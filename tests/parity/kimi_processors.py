"""The image processors of Kimi-VL's and Kimi-K3's published checkpoints, spelled out a second time.

The reference package has neither; the hub has both as code of their checkpoints. Owns their steps on Pillow's
images, in numpy and float64, as the published code has them.

Shape suffixes: H height, W width, C channels, P patches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image

from encoder_service.types import Grid

BLOCK = 28
BICUBIC = Image.Resampling.BICUBIC


def padded(pixels_HWC: np.ndarray) -> np.ndarray:
    height, width, _ = pixels_HWC.shape
    return np.pad(pixels_HWC, ((0, -height % BLOCK), (0, -width % BLOCK), (0, 0)))


def patches_of(values_HWC: np.ndarray, side: int = 14) -> tuple[torch.Tensor, Grid]:
    grid = Grid(1, values_HWC.shape[0] // side, values_HWC.shape[1] // side)
    rows = [
        values_HWC[y * side : (y + 1) * side, x * side : (x + 1) * side].transpose(2, 0, 1).reshape(-1)
        for y in range(grid.h)
        for x in range(grid.w)
    ]
    return torch.from_numpy(np.stack(rows)), grid


def kimi_vl(image: Image.Image, settings: dict[str, Any]) -> tuple[torch.Tensor, Grid]:
    """float32 [P, 588] of an RGB image, and its grid. Normalised by torchvision's steps."""
    width, height = image.size
    budget, count = settings["in_token_limit"], (width // 14) * (height // 14)
    if count > budget:
        scale = math.sqrt(budget / count)
        image = image.resize((int(width * scale), int(height * scale)), BICUBIC)
    values = torch.from_numpy(padded(np.asarray(image))).permute(2, 0, 1).float().div(255)
    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("image_mean", "image_std"))
    values = values.sub(mean).div(std)
    return patches_of(values.permute(1, 2, 0).numpy())


def kimi_k3(image: Image.Image, settings: dict[str, Any]) -> tuple[torch.Tensor, Grid]:
    """float32 [P, 588] of an image in RGB or RGBA, and its grid."""
    own = settings["media_proc_cfg"]
    (width, height), budget, side = image.size, own["in_patch_limit"], own["patch_limit_on_one_side"] * 14
    by_area = math.sqrt(budget / (max(1.0, width // 14) * max(1.0, height // 14)))
    scale = min(1.0, by_area, side / width, side / height)
    size = min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale)))
    background, stage = (
        own.get("transparent_bg_config"),
        own.get("transparent_bg_fill_stage", "before_resize"),
    )
    if stage == "before_resize":
        image = over_background(image, background)
    image = over_background(image.resize(size, BICUBIC), background)
    values = (padded(np.asarray(image)) / 255.0).astype(np.float32)
    values -= np.array(own["image_mean"])
    values *= 1.0 / np.array(own["image_std"])
    return patches_of(values)


def over_background(image: Image.Image, background: dict[str, Any] | None) -> Image.Image:
    if background is None or image.mode == "RGB":
        return image.convert("RGB")
    rgba = np.asarray(image.convert("RGBA"))
    levels = np.zeros(rgba.shape[:2] + (1,), np.uint8)
    size = background.get("chessboard_square_size", 16)
    for y in range(rgba.shape[0]):
        for x in range(rgba.shape[1]):
            is_other = (y // size + x // size) % 2 == 1
            is_gray = is_other == background.get("chessboard_square_on_top_left", True)
            square: Any = background.get(f"chessboard_{'gray' if is_gray else 'white'}_value")
            plain = {"gray": 128, "white": 255}.get(background["pattern"], 0)
            levels[y, x] = square if background["pattern"] == "chessboard" else plain
    alpha = rgba[..., 3:].astype(np.float32) / 255.0
    mixed = alpha * rgba[..., :3] + (1 - alpha) * levels
    return Image.fromarray(mixed.astype(np.uint8))
