"""Preprocessing of Kimi-K3. Sizes, padding and patches are Kimi-K2.5's; clips are refused.

Owns what differs: Pillow's resize, which keeps alpha, and the background that shows through it. The reference
is ``KimiK3VisionProcessor`` in the published checkpoint. Images of palettes and of one bit are converted to
colours before they are resized, as SGLang and vLLM do; the published code alone would resize them without
interpolation.

Shape suffixes: H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch

from encoder_service.ingest.decode import STRIP_PIXELS, DecodeLimits, OpenImage, Transparent
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import ImagePlan
from encoder_service.ingest.resize import pad, pillow_bytes, resize_pillow
from encoder_service.ingest.settings import (
    MoonViTSettings,
    SettingsReader,
    SteppedNormalisation,
    parse_moonvit,
)
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.types import Modality

Pattern = Literal["white", "black", "gray", "chessboard"]
PLAIN_LEVELS = {"white": 255, "black": 0, "gray": 128}
STAGES = ("before_resize", "after_resize")
# A pixel of a strip: float32 products of image and background, and their sum.
COMPOSITE_BYTES = 60


@dataclass(frozen=True)
class Background:
    """What shows through transparent pixels. square_size: pixels of a side of a chessboard's square. white,
    gray: levels of its squares. starts_white: the square on the top left is white."""

    pattern: Pattern = "black"
    square_size: int = 16
    starts_white: bool = True
    white: int = 255
    gray: int = 200

    def levels(self, rows: range, width: int) -> np.ndarray:
        """uint8 [H, W, 1] of these rows of an image."""
        if self.pattern != "chessboard":
            return np.full((len(rows), width, 1), PLAIN_LEVELS[self.pattern], np.uint8)
        y, x = np.arange(rows.start, rows.stop)[:, None], np.arange(width)
        is_odd = (y // self.square_size + x // self.square_size) % 2 == 1
        levels = np.where(is_odd == self.starts_white, self.gray, self.white)
        return levels.astype(np.uint8)[..., None]


@dataclass(frozen=True)
class KimiK3Settings(MoonViTSettings):
    """Kimi-K3. background: None if the checkpoint states none. fills_first: it is put under an image, or
    without one alpha is dropped, before the image is resized."""

    background: Background | None = None
    fills_first: bool = True


class KimiK3Preprocessor(MoonViTPreprocessor):
    """Kimi-K3. transparent: "white" for the checkpoint's background."""

    family = "kimi_k3"
    rules = "kimi_k3.1"  # change when the same settings give different pixels
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)

    def __init__(self, settings: KimiK3Settings, limits: DecodeLimits, transparent: Transparent) -> None:
        super().__init__(settings, limits, None, "drop" if transparent == "drop" else "keep")
        self.background = settings.background
        self.fills_first = settings.fills_first

    def image_bytes(self, image: OpenImage, plan: ImagePlan) -> int:
        num_pixels = image.size.height * image.size.width
        strip = COMPOSITE_BYTES * max(image.size.width, min(num_pixels, STRIP_PIXELS))
        resizing = pillow_bytes(*image.size, plan.target, plan.padded, has_alpha=True) + strip
        # The fourth channel, twice while an image is turned upright.
        return max(image.decoded_bytes + 2 * num_pixels, resizing)

    def resized(self, image_HWC: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        if self.fills_first:
            image_HWC = self.filled(image_HWC)
        return pad(self.filled(resize_pillow(image_HWC, *plan.target)), plan.padded)

    def filled(self, image_HWC: torch.Tensor) -> torch.Tensor:
        """uint8 [H, W, 3] of [H, W, 4] over the background, in the reference's float32 steps, rounded down.
        Without a background alpha is dropped."""
        height, width, num_channels = image_HWC.shape
        if num_channels == 3 or self.background is None:
            return image_HWC[..., :3].contiguous()
        image, filled = image_HWC.numpy(), np.empty((height, width, 3), np.uint8)
        num_rows = max(1, STRIP_PIXELS // width)
        for top in range(0, height, num_rows):
            rows = range(top, min(height, top + num_rows))
            strip = image[rows.start : rows.stop]
            alpha = strip[..., 3:].astype(np.float32) / 255.0
            under = (1 - alpha) * self.background.levels(rows, width)
            filled[rows.start : rows.stop] = alpha * strip[..., :3] + under
        return torch.from_numpy(filled)


def kimi_k3_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,  # noqa: ARG001
    limits: DecodeLimits,
    clip_limits: ClipLimits,  # noqa: ARG001
    transparent: Transparent,
) -> KimiK3Preprocessor:
    """As ``preprocessor.Build``."""
    images = parse_moonvit(reader)
    reader = reader.nested("media_proc_cfg")
    for key in ("image_mean", "image_std"):
        # The reference normalises in float64. Only halves have the same results in float32.
        reader.require(key, [0.5, 0.5, 0.5])
    plain = images.normalisation
    settings = KimiK3Settings(
        images.patch_size,
        images.merge_size,
        images.max_patches,
        images.max_patches_per_side,
        SteppedNormalisation(plain.image_mean, plain.image_std, 1 / 255),
        background=parse_background(reader),
        fills_first=reader.one_of("transparent_bg_fill_stage", STAGES) == STAGES[0],
    )
    return KimiK3Preprocessor(settings, limits, transparent)


def parse_background(reader: SettingsReader) -> Background | None:
    """The section ``transparent_bg_config``, with the reference's defaults. Raises UnsupportedCheckpoint."""
    if not reader.has("transparent_bg_config"):
        return None
    section, default = reader.section("transparent_bg_config"), Background()
    return Background(
        pattern=section.one_of("pattern", ("black", *get_args(Pattern))),
        square_size=section.count("chessboard_square_size", default=default.square_size),
        starts_white=section.flag("chessboard_square_on_top_left", default=default.starts_white),
        white=section.level("chessboard_white_value", default.white),
        gray=section.level("chessboard_gray_value", default.gray),
    )
