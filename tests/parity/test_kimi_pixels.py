"""Pixels of Kimi-VL and Kimi-K3 equal their published processors' bit for bit: sizes, alpha, padding."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_service.checkpoints.synthetic import small_files
from encoder_service.config import Settings
from encoder_service.errors import ImageTooLarge, UnsupportedContent
from encoder_service.ingest.decode import DecodeLimits, to_rgb
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.types import FrameItem, Grid, Item, Modality, PixelValues, PreprocessOptions
from tests.parity import kimi_processors
from tests.published import PUBLISHED
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 28, max_image_pixels=1 << 26)
PLAIN = PreprocessOptions()
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
Reference = Callable[[Image.Image, dict[str, Any]], tuple[torch.Tensor, Grid]]


def opened(
    folder: Path, family: str, change: Callable[[dict[str, Any]], None] = lambda settings: None
) -> tuple[Preprocessor, dict[str, Any]]:
    """The service's preprocessor of the published settings with a change, and the settings."""
    settings: dict[str, Any] = json.loads(small_files(family, "tiny")["preprocessor_config.json"])
    change(settings)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return load_preprocessor(folder, family, LIMITS), settings


def check(preprocessor: Preprocessor, data: bytes, expected: tuple[torch.Tensor, Grid]) -> None:
    item, _, _ = preprocessor.open_image(data, PLAIN).load()
    assert isinstance(item, FrameItem)
    assert item.grid == expected[1]
    assert torch.equal(preprocessor.patchify(item.frames_THWC), expected[0])


def sizes(num_random: int) -> list[tuple[int, int]]:
    draw = random.Random(11)
    block = [
        (28 * draw.randint(1, 9) + draw.choice((-1, 0, 1)), draw.randint(1, 400)) for _ in range(num_random)
    ]
    return [(1, 1), (13, 300), (300, 13), (14, 29), (28, 28), (255, 257), *block]


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k3"])
@pytest.mark.parametrize("budget", [40, 1 << 16])
def test_pixels_of_any_size_equal_the_published_processors(family: str, budget: int, tmp_path: Path) -> None:
    """Below the budget of patches and above it, where Pillow resizes."""
    reference: Reference = getattr(kimi_processors, family)

    def set_budget(settings: dict[str, Any]) -> None:
        where, key = (settings, "in_token_limit")
        if family == "kimi_k3":
            where, key = settings["media_proc_cfg"], "in_patch_limit"
        where[key] = budget

    preprocessor, settings = opened(tmp_path, family, set_budget)
    for height, width in sizes(12):
        image = Image.fromarray(image_files.pixels(height, width, seed=height))
        check(preprocessor, image_files.encode(image, "PNG"), reference(image, settings))


def test_kimi_vl_normalises_as_torchvision_with_any_mean(tmp_path: Path) -> None:
    preprocessor, settings = opened(tmp_path, "kimi_vl", lambda settings: settings.update(CLIP))
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    image = Image.fromarray(ramp)
    check(preprocessor, image_files.encode(image, "PNG"), kimi_processors.kimi_vl(image, settings))


BACKGROUNDS: dict[str, Any] = {
    "published": {},
    "gray first": {"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 5,
        "chessboard_square_on_top_left": False, "chessboard_white_value": 250, "chessboard_gray_value": 90}},
    "before": {"transparent_bg_fill_stage": "before_resize"},
    "white": {"transparent_bg_config": {"pattern": "white"}},
    "gray": {"transparent_bg_config": {"pattern": "gray"}},
    "black": {"transparent_bg_config": {"pattern": "black"}},
    "none": {"transparent_bg_config": None},
}  # fmt: skip


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("budget", [20, 4096])
def test_kimi_k3s_background_shows_through_alpha(background: str, budget: int, tmp_path: Path) -> None:
    changes = BACKGROUNDS[background] | {"in_patch_limit": budget}
    preprocessor, settings = opened(
        tmp_path, "kimi_k3", lambda settings: settings["media_proc_cfg"].update(changes)
    )
    for mode, channels in (("RGBA", 4), ("LA", 2)):
        image = Image.fromarray(image_files.pixels(83, 121, channels=channels))
        assert image.mode == mode
        check(
            preprocessor,
            image_files.encode(image, "PNG"),
            kimi_processors.kimi_k3(image.convert("RGBA"), settings),
        )


def test_kimi_k3_turns_an_image_with_alpha_upright_before_its_background(tmp_path: Path) -> None:
    preprocessor, settings = opened(tmp_path, "kimi_k3")
    image = Image.fromarray(image_files.pixels(40, 90, channels=4))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = image_files.encode(image, "PNG", exif=exif)
    check(preprocessor, data, kimi_processors.kimi_k3(image.transpose(Image.Transpose.ROTATE_270), settings))


def test_transparent_drop_drops_kimi_k3s_alpha_too(tmp_path: Path) -> None:
    _, settings = opened(tmp_path, "kimi_k3")
    image = Image.fromarray(image_files.pixels(40, 90, channels=4))
    preprocessor = load_preprocessor(tmp_path, "kimi_k3", LIMITS, transparent="drop")
    expected = kimi_processors.kimi_k3(Image.fromarray(to_rgb(image, "drop")), settings)
    check(preprocessor, image_files.encode(image, "PNG"), expected)
    assert preprocessor.fingerprint != load_preprocessor(tmp_path, "kimi_k3", LIMITS).fingerprint


def test_kimi_vl_has_alpha_over_white(tmp_path: Path) -> None:
    preprocessor, settings = opened(tmp_path, "kimi_vl")
    image = Image.fromarray(image_files.pixels(40, 90, channels=4))
    expected = kimi_processors.kimi_vl(Image.fromarray(to_rgb(image, "white")), settings)
    check(preprocessor, image_files.encode(image, "PNG"), expected)


def test_kimi_vl_refuses_sides_beyond_its_rotary_table(tmp_path: Path) -> None:
    preprocessor, _ = opened(tmp_path, "kimi_vl")
    grid = preprocessor.plan_image(20, 28 * 255, PLAIN).grid
    assert grid == Grid(1, 2, 510)
    with pytest.raises(
        ImageTooLarge, match="image of 7141x20 has 512 patches along a side, Kimi-VL takes 511"
    ):
        preprocessor.plan_image(20, 28 * 255 + 1, PLAIN)


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k3", "ling_vl"])
def test_clips_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """Also those that are called an image."""
    preprocessor, _ = opened(tmp_path, family)
    assert preprocessor.clips is None
    clip = PixelValues(torch.zeros(8, preprocessor.patch_dim), Grid(2, 2, 2))
    with pytest.raises(UnsupportedContent, match=rf"{family} takes no clips, grid \[2, 2, 2\] is one"):
        preprocessor.open(Item(Modality.IMAGE, clip))
    with pytest.raises(UnsupportedContent, match=f"{family} takes image items, this is a video item"):
        preprocessor.check_options(Modality.VIDEO, PLAIN)


def test_the_largest_image_of_kimi_k3_is_taken_by_default() -> None:
    preprocessor = load_preprocessor(PUBLISHED / "Kimi-K3", "kimi_k3", LIMITS)
    assert 65_536 < preprocessor.longest_item <= Settings.model_fields["max_patches_per_item"].default


@pytest.mark.parametrize("family", ["kimi_vl", "kimi_k3"])
def test_no_image_has_more_patches_than_the_longest(family: str, tmp_path: Path) -> None:
    preprocessor, _ = opened(tmp_path, family)
    draw, most = random.Random(5), 0
    for _ in range(3000):
        height, width = (int(28 * 2 ** draw.uniform(0, 8)) + draw.choice((-1, 13, 27)) for _ in range(2))
        try:
            most = max(most, preprocessor.plan_image(height, width, PLAIN).grid.num_patches)
        except ImageTooLarge:
            continue
    assert 0.97 * preprocessor.longest_item < most <= preprocessor.longest_item
