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
    DigestItem,
    EncodedRows,
    Grid,
    ImageItem,
    InvalidRequest,
    ItemFailed,
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


def test_records_are_shown_shortly() -> None:
    rows = EncodedRows(
        DIGEST, DIGEST, Grid(1, 2, 4), 2, 8, "float32", 1, np.zeros(64, np.uint8), timestamps_s=(0.5,) * 100
    )
    assert repr(rows) == (
        "EncodedRows(key=000102030405..., content_digest=000102030405..., grid_thw=Grid(t=1, h=2, w=4), "
        "num_rows=2, width=8, dtype='float32', num_deepstack_levels=1)"
    )
    assert repr(ImageItem(bytes(5000))) == "ImageItem(data=<5000 bytes>)"
    assert repr(DigestItem(DIGEST)) == "DigestItem(digest=000102030405...)"
    failed = ItemFailed("the image file has 0 bytes", reason="UNDECODABLE_IMAGE")
    assert repr(failed) == "ItemFailed(UNDECODABLE_IMAGE: the image file has 0 bytes)"
