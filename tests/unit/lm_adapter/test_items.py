"""What callers send: how items are made, and how records are shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lm_adapter import (
    ClipItem,
    ImageItem,
    InvalidRequest,
    PreprocessOptions,
)

PHOTO = Path(__file__).parents[2] / "data" / "photos" / "coffee.jpg"
DIGEST = bytes(range(32))


def pixels_of(item: ImageItem) -> Any:
    return np.asarray(Image.open(io.BytesIO(item.data)))


def test_a_file_is_read_from_its_path() -> None:
    options = PreprocessOptions(max_pixels=65_536)
    item = ImageItem.from_path(str(PHOTO), digest=DIGEST, options=options)
    assert item == ImageItem(PHOTO.read_bytes(), DIGEST, options)
    assert ClipItem.from_path(PHOTO) == ClipItem(PHOTO.read_bytes())
    with pytest.raises(FileNotFoundError):
        ImageItem.from_path(PHOTO.with_suffix(".none"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_pillow_image_keeps_its_pixels(mode: str) -> None:
    image = Image.open(PHOTO).convert(mode)
    item = ImageItem.from_pil(image, digest=DIGEST)
    assert item.digest == DIGEST
    np.testing.assert_array_equal(pixels_of(item), np.asarray(image))


@pytest.mark.parametrize("to_array", [np.asarray, torch.from_numpy])
def test_an_array_keeps_its_pixels(to_array: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    for layout in (pixels, pixels.transpose(2, 0, 1)):
        np.testing.assert_array_equal(pixels_of(ImageItem.from_array(to_array(layout))), pixels)


def test_pixels_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"float32 array of shape \[4, 4, 3\], needs uint8"):
        ImageItem.from_array(np.zeros((4, 4, 3), np.float32))


@pytest.mark.parametrize("kind", [ImageItem, ClipItem])
def test_a_path_is_no_data(kind: Any) -> None:
    for data in (PHOTO, str(PHOTO)):
        text = rf"data is a {type(data).__name__}, needs bytes; {kind.__name__}\.from_path reads a file"
        with pytest.raises(InvalidRequest, match=text):
            kind(data)
