"""Image files as engines carry them: what the header says, and files made of pixels."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from encoder_service.errors import UndecodableImage
from encoder_service.ingest.decode import ALLOWED_FORMATS, DecodeLimits, read_size
from lm_adapter.engines.plugin import images
from lm_adapter.engines.plugin.images import ORIENTATION, TURNED, ImageFile
from lm_adapter.keys import content_digest
from tests.unit.ingest.image_files import odd_pngs

LIMITS = DecodeLimits(1 << 24, 1 << 24)
GENERATOR = np.random.default_rng(7)


def file_of(name: str, size: tuple[int, int] = (37, 23), orientation: int = 0) -> bytes:
    """name: of the format. orientation: 0 for none."""
    exif, out = Image.Exif(), io.BytesIO()
    if orientation:
        exif[ORIENTATION] = orientation
    Image.new("RGB", size, "red").save(out, name, **({"exif": exif} if orientation else {}))
    return out.getvalue()


def pixels_of(*shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return GENERATOR.integers(0, 256, shape, dtype=np.uint8)


def decoded(image: ImageFile) -> Image.Image:
    return Image.open(io.BytesIO(image.data))


# Files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_sizes_are_those_of_the_upright_image_as_the_encoder_has_them(name: str, orientation: int) -> None:
    data = file_of(name, orientation=orientation)
    image, size = ImageFile.read(data), read_size(data, LIMITS)
    assert image.size == (image.width, image.height)
    assert image.size == ((23, 37) if orientation in TURNED else (37, 23))
    assert image.size == (size.width, size.height)
    assert (image.data, image.digest) == (data, content_digest(data))


@pytest.mark.parametrize("name", odd_pngs(1, 1))
def test_pngs_whose_orientation_follows_their_pixels(name: str) -> None:
    width, height = random.sample(range(1, 200), 2)
    data, is_turned = odd_pngs(width, height)[name]
    size = read_size(data, LIMITS)
    assert ImageFile.read(data).size == (size.width, size.height)
    assert ImageFile.read(data).size == ((height, width) if is_turned else (width, height))


@pytest.mark.parametrize("data", [one for one, _ in odd_pngs(9, 5).values()])
def test_cut_pngs_have_the_services_size_or_none(data: bytes) -> None:
    for length in range(len(data) + 1):
        try:
            expected = read_size(data[:length], LIMITS)
        except UndecodableImage:
            with pytest.raises(ValueError, match="Failed to load image"):
                ImageFile.read(data[:length])
        else:
            assert ImageFile.read(data[:length]).size == (expected.width, expected.height)


def test_formats_are_those_that_the_service_takes() -> None:
    """ICO is none: Pillow decodes it while it opens the file."""
    assert images.FORMATS == ALLOWED_FORMATS
    with pytest.raises(UndecodableImage):
        read_size(file_of("ICO"), LIMITS)
    with pytest.raises(ValueError, match="cannot identify"):
        ImageFile.read(file_of("ICO"))


def test_images_with_too_many_pixels_are_refused_with_both_figures() -> None:
    data = file_of("PNG", (50, 40))
    assert ImageFile.read(data, 2000).size == ImageFile.read(data).size == (50, 40)
    with pytest.raises(ValueError, match=r"50x40 \(2000 pixels\) exceed the maximum of 1999 pixels"):
        ImageFile.read(data, 1999)


def test_p34_no_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's API server."""
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("it was decoded"))
    for data, _ in odd_pngs(37, 23).values():
        assert ImageFile.read(data).size in ((37, 23), (23, 37))
    with pytest.raises(ValueError, match="exceed the maximum"):
        ImageFile.read(file_of("PNG"), 1)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_p33_data_that_is_no_image_is_a_value_error(name: str) -> None:
    data = file_of(name, orientation=6)
    rng = random.Random(name)
    broken = [b"", b"garbage", rng.randbytes(5000), b"<svg/>", data[:20]]
    for data_so_far in broken:
        with pytest.raises(ValueError, match="Failed to load image"):
            ImageFile.read(data_so_far)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert ImageFile.read(bytes(damaged), 1 << 20).width > 0
        except ValueError:
            continue


# Pixels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pixels_of_modes_that_png_has_survive(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(GENERATOR.integers(0, 1 << 16, (5, 7), dtype=np.uint16))
    else:
        image = Image.fromarray(pixels_of(5, 7, 4)).convert(mode)
    assert image.mode == mode
    found = ImageFile.of_pixels(image)
    assert found.size == (7, 5)
    assert found.digest == content_digest(found.data)
    assert decoded(found).mode == mode
    assert np.array_equal(np.asarray(decoded(found).convert("RGBA")), np.asarray(image.convert("RGBA")))
    assert found.digest != ImageFile.of_pixels(image.rotate(180)).digest


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "F"])
def test_pixels_of_other_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(pixels_of(5, 7, 3))
    image = image.convert("L").convert(mode) if mode == "F" else image.convert(mode)
    found = decoded(ImageFile.of_pixels(image))
    assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_transparency_survives() -> None:
    image = Image.new("P", (3, 2))
    image.info["transparency"] = 0
    assert decoded(ImageFile.of_pixels(image)).convert("RGBA").getpixel((0, 0)) == (0, 0, 0, 0)


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_pixels_of_arrays_survive(num_channels: int) -> None:
    """[height, width, channels] and [channels, height, width]; also views."""
    array_HWC = pixels_of(6, 2 * 5, num_channels)[:, ::2]
    array_CHW = np.moveaxis(array_HWC, -1, 0)
    for array in (array_HWC, array_CHW, torch.from_numpy(array_HWC), torch.from_numpy(array_CHW)):
        image = ImageFile.of_pixels(array)
        assert image.size == (5, 6)
        assert np.array_equal(np.asarray(decoded(image)).reshape(6, 5, num_channels), array_HWC)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((4, 6, 3), np.float32), r"float32 array of shape \[4, 6, 3\], needs uint8"),
        (np.zeros((3, 8, 6), np.float64), r"float64 array of shape \[3, 8, 6\], needs uint8"),
        (torch.zeros(3, 8, 6), r"float32 array of shape \[3, 8, 6\], needs uint8"),
        (np.zeros((4, 6), np.uint8), r"uint8 array of shape \[4, 6\], needs .*\[height, width, channels\]"),
        (np.zeros((7, 6, 5), np.uint8), r"uint8 array of shape \[7, 6, 5\]"),
        (np.zeros((1, 4, 6, 3), np.uint8), r"shape \[1, 4, 6, 3\]"),
        (np.zeros((0, 6, 3), np.uint8), "empty"),
        ([[[0, 0, 0]]], "int64 array"),
        (None, "object array"),
        ("image.png", "an image is a <U9 array"),
    ],
)
def test_other_arrays_are_refused_with_what_they_are(array: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ImageFile.of_pixels(array)
