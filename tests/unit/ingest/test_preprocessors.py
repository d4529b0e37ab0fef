"""Options, grids, caller tensors, patch order and loading of both families, without the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import (
    AspectRatioExceeded,
    GridMismatch,
    InvalidInput,
    InvalidOption,
    NonFinitePixels,
    PixelTensorMismatch,
    UndecodableImage,
    UnsupportedContent,
)
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.types import (
    DigestOnly,
    EncodedFile,
    Grid,
    Item,
    Modality,
    PixelValues,
    PreprocessOptions,
)
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 26, max_image_pixels=1 << 24)
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
QWEN = QwenVLPreprocessor(QwenVLSettings(16, 2, 2, 4096, 1 << 20, HALF), LIMITS)
KIMI = MoonViTPreprocessor(MoonViTSettings(14, 2, 1024, 64, HALF), LIMITS)
BOTH: list[Preprocessor] = [QWEN, KIMI]
PLAIN = PreprocessOptions()


def solid(height: int, width: int, level: int = 128) -> bytes:
    return image_files.ppm(np.full((height, width, 3), level, np.uint8))


# Options


@pytest.mark.parametrize(
    ("preprocessor", "given", "text"),
    [
        (QWEN, {"min_pixels": 0}, "min_pixels is 0, allowed are 1 to 16777216"),
        (QWEN, {"max_pixels": 0}, "max_pixels is 0, allowed are 1 to 16777216"),
        (QWEN, {"max_pixels": 1 << 25}, "max_pixels is 33554432, allowed are 1 to 16777216"),
        (QWEN, {"min_pixels": 9000, "max_pixels": 8000}, "min_pixels 9000 is above max_pixels 8000"),
        (
            QWEN,
            {"max_patches": 5},
            "max_patches = 5 does not apply to image items of qwen_vl.*min_pixels, max_pixels",
        ),
        (KIMI, {"max_patches": 0}, "max_patches is 0, allowed are 1 to 85598"),
        (KIMI, {"max_patches": 85599}, "max_patches is 85599, allowed are 1 to 85598"),
        (KIMI, {"max_patches_per_side": 0}, "max_patches_per_side is 0, allowed are 1 to 64"),
        (KIMI, {"max_patches_per_side": 65}, "max_patches_per_side is 65, allowed are 1 to 64"),
        (KIMI, {"min_pixels": 5}, "min_pixels = 5 does not apply to image items of kimi_k25"),
    ],
)
def test_options_out_of_bounds(preprocessor: Preprocessor, given: dict[str, Any], text: str) -> None:
    options = PreprocessOptions(**given)
    with pytest.raises(InvalidOption, match=text):
        preprocessor.check_options(Modality.IMAGE, options)


# A caller's own pixels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("preprocessor", "shape"), [(QWEN, (24, 1536)), (KIMI, (24, 588)), (KIMI, (24, 3, 14, 14))]
)
def test_pixel_tensors_are_taken_as_they_are(
    preprocessor: Preprocessor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape).to(dtype)
    item = preprocessor.check_pixels(PixelValues(values, Grid(1, 4, 6)))
    assert item.grid == Grid(1, 4, 6)
    assert item.pixel_values.dtype == torch.float32
    assert item.pixel_values.is_contiguous()
    assert torch.equal(item.pixel_values, values.float().reshape(24, -1))
    assert preprocessor.check_pixels(PixelValues(values, Grid(3, 4, 2))).grid == Grid(3, 4, 2)


@pytest.mark.parametrize(
    ("preprocessor", "values", "grid", "error", "text"),
    [
        (QWEN, torch.zeros(23, 1536), (1, 4, 6), GridMismatch, r"23 rows, grid_thw \[1, 4, 6\] needs 24"),
        (QWEN, torch.zeros(15, 1536), (1, 3, 5), GridMismatch, r"\[1, 3, 5\].*merge size 2"),
        (QWEN, torch.zeros(0, 1536), (1, 0, 4), GridMismatch, r"\[1, 0, 4\], every side needs at least 1"),
        (QWEN, torch.zeros(24, 1535), (1, 4, 6), PixelTensorMismatch, r"\[24, 1535\].*\[P, 1536\]"),
        (QWEN, torch.zeros(24, 3, 512), (1, 4, 6), PixelTensorMismatch, r"\[24, 3, 512\]"),
        (QWEN, torch.zeros(()), (1, 4, 6), PixelTensorMismatch, r"\[\]"),
        (KIMI, torch.zeros(24, 3, 14, 15), (1, 4, 6), PixelTensorMismatch, r"\[P, 588\] or \[P, 3, 14, 14\]"),
        (
            QWEN,
            torch.zeros(24, 1536, dtype=torch.uint8),
            (1, 4, 6),
            PixelTensorMismatch,
            "is uint8, needs one of float32",
        ),
    ],
)
def test_pixel_tensors_that_are_refused(
    preprocessor: Preprocessor,
    values: torch.Tensor,
    grid: tuple[int, int, int],
    error: type[InvalidInput],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        preprocessor.check_pixels(PixelValues(values, Grid(*grid)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_p33_non_finite_pixels_are_counted(bad: float, dtype: torch.dtype) -> None:
    values = torch.zeros(24, 1536, dtype=dtype)
    values[3, 5] = values[23, 1535] = bad
    with pytest.raises(NonFinitePixels, match="2 NaN or infinite elements among 36864") as caught:
        QWEN.check_pixels(PixelValues(values, Grid(1, 4, 6)))
    assert caught.value.details == {"found": "2", "num_elements": "36864"}


@settings(deadline=None)
@given(st.integers(-3, 9), st.integers(-3, 9), st.integers(-3, 9), st.integers(0, 40), st.sampled_from(BOTH))
def test_rows_and_grid_always_agree(t: int, h: int, w: int, rows: int, preprocessor: Preprocessor) -> None:
    pixels = PixelValues(torch.zeros(rows, preprocessor.patch_dim), Grid(t, h, w))
    sound = min(t, h, w) >= 1 and h % 2 == w % 2 == 0 and t * h * w == rows
    if sound:
        assert preprocessor.check_pixels(pixels).pixel_values.shape[0] == rows
    else:
        with pytest.raises(GridMismatch):
            preprocessor.check_pixels(pixels)


def test_an_absurd_aspect_is_refused_from_the_header() -> None:
    """The pixels behind this header are cut off."""
    whole = solid(1, 400)
    with pytest.raises(UndecodableImage):
        KIMI.open_image(whole[:-9], PLAIN).load()
    with pytest.raises(AspectRatioExceeded, match="the limit is 200"):
        QWEN.open_image(whole[:-9], PLAIN)


@pytest.mark.parametrize(("preprocessor", "grid"), [(QWEN, Grid(1, 4, 10)), (KIMI, Grid(1, 6, 12))])
def test_items_are_dispatched_by_their_content(preprocessor: Preprocessor, grid: Grid) -> None:
    pixels = PixelValues(torch.zeros(24, preprocessor.patch_dim), Grid(1, 4, 6))
    item = Item(Modality.IMAGE, pixels)
    opened = preprocessor.open(item)
    assert opened.grid == opened.load().item.grid == Grid(1, 4, 6)
    opened = preprocessor.open(Item(Modality.IMAGE, EncodedFile(solid(64, 160))))
    loaded, decode_ms, resize_ms = opened.load()
    assert opened.grid == loaded.grid == grid
    assert min(decode_ms, resize_ms) > 0
    for refused in (Item(Modality.IMAGE, DigestOnly(), b"d" * 32), Item(Modality.VIDEO, EncodedFile(b"x"))):
        with pytest.raises(UnsupportedContent):
            preprocessor.open(refused)
    with pytest.raises(UnsupportedContent, match="no settings for clips"):
        preprocessor.open_clip(EncodedFile(b"x"), PLAIN)
