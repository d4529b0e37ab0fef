"""Decoded pixels equal what the reference package's loader gives, and limits hold before decoding."""

from __future__ import annotations

import io
import random
import resource
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from encoder_service.errors import ImageTooLarge, UndecodableImage
from encoder_service.ingest.decode import ALLOWED_FORMATS, DecodeLimits, open_image
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 24, max_image_pixels=1 << 24)
FILES = image_files.every_file()
UPRIGHT_AND_TURNED = FILES | image_files.every_orientation()


def loaded(data: bytes) -> np.ndarray:
    """uint8 [H, W, 3] by the two calls of ``transformers.image_utils.load_image``, which drops alpha;
    ``tests/parity`` holds the two equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("name", UPRIGHT_AND_TURNED)
def test_every_format_mode_and_orientation(name: str) -> None:
    data = UPRIGHT_AND_TURNED[name]
    image, expected = open_image(data, LIMITS), loaded(data)
    pixels = image.decode("drop")
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    np.testing.assert_array_equal(pixels.numpy(), expected)
    assert image.size == expected.shape[:2]


def test_every_allowed_format_is_covered() -> None:
    met = {Image.open(io.BytesIO(data)).format for data in FILES.values()}
    writable = {name for name in ALLOWED_FORMATS if name in Image.SAVE and name in Image.OPEN}
    assert met >= writable - {"DIB"}  # a bare bitmap body; its plugin is the one behind BMP and ICO


@pytest.mark.parametrize("name", image_files.odd_pngs(1, 1))
def test_orientations_behind_the_pixels(name: str) -> None:
    width, height = random.sample(range(1, 200), 2)
    data, is_turned = image_files.odd_pngs(width, height)[name]
    assert loaded(data).shape[:2] == ((width, height) if is_turned else (height, width))
    image = open_image(data, LIMITS)
    assert image.size == image.decode().shape[:2] == loaded(data).shape[:2]


@pytest.mark.parametrize("block", [b"\xff" * 40, b"MM\0*\0\0\0\x08\0\x09", b"II*\0\xff\xff\xff\x7f", b""])
def test_damaged_exif_counts_as_upright(block: bytes) -> None:
    plain = image_files.encode(image_files.image("RGB"), "PNG")
    data = image_files.png_with_late_chunk(plain, image_files.png_chunk(b"eXIf", block))
    image = open_image(data, LIMITS)
    np.testing.assert_array_equal(image.decode().numpy(), loaded(plain))
    assert image.size == loaded(plain).shape[:2]


def text_on_clear_ground(mode: str) -> bytes:
    """Black strokes; the ground is transparent, and black below."""
    alpha = np.zeros((20, 40), np.uint8)
    alpha[5:15, 5:35:6] = 255
    picture = Image.merge("RGBA", [*[Image.new("L", (40, 20))] * 3, Image.fromarray(alpha)])
    if mode == "P":
        indexed = Image.fromarray((alpha > 0).astype(np.uint8), "P")
        indexed.putpalette(bytes(6))
        return image_files.encode(indexed, "PNG", transparency=b"\x00\xff")
    return image_files.encode(picture.convert(mode), "PNG")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_p42_black_text_on_transparent_ground_stays_readable(mode: str) -> None:
    data = text_on_clear_ground(mode)
    pixels = open_image(data, LIMITS).decode()
    assert set(pixels.unique().tolist()) == {0, 255}
    assert pixels[0, 0].tolist() == [255] * 3
    assert pixels[10, 5].tolist() == [0] * 3
    assert not open_image(data, LIMITS).decode("drop").any()


def test_p42_alpha_is_blended_with_white_or_dropped() -> None:
    rgba = image_files.pixels(channels=4)
    data = image_files.encode(Image.fromarray(rgba), "PNG")
    np.testing.assert_array_equal(open_image(data, LIMITS).decode("drop").numpy(), rgba[:, :, :3])
    share = rgba[:, :, 3:] / 255
    blended = rgba[:, :, :3] * share + 255 * (1 - share)
    assert np.abs(open_image(data, LIMITS).decode().numpy() - blended).max() <= 1


def test_encoded_bytes_are_limited() -> None:
    data = FILES["png-RGB"]
    limits = DecodeLimits(max_encoded_bytes=len(data) - 1, max_image_pixels=1 << 20)
    with pytest.raises(ImageTooLarge, match=f"{len(data)} bytes, the limit is {len(data) - 1}"):
        open_image(data, limits)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_limited_at_the_exact_number(name: str) -> None:
    height, width = open_image(FILES[name], LIMITS).size
    open_image(FILES[name], DecodeLimits(1 << 24, height * width)).decode()
    with pytest.raises(ImageTooLarge) as caught:
        open_image(FILES[name], DecodeLimits(1 << 24, height * width - 1))
    assert caught.value.details["found_pixels"] == str(height * width)
    assert caught.value.details["max_image_pixels"] == str(height * width - 1)


@pytest.mark.parametrize("name", image_files.bombs(12000, 9000))
def test_bombs_are_refused_before_anything_is_allocated(name: str) -> None:
    data = image_files.bombs(12000, 9000)[name]
    assert len(data) < 8192
    before, started = _peak_rss_bytes(), time.thread_time()
    with pytest.raises(ImageTooLarge) as caught:
        open_image(data, DecodeLimits(1 << 20, 100_000_000))
    assert time.thread_time() - started < 1
    assert _peak_rss_bytes() - before < 50 << 20  # the pixels alone would take 309 MiB
    assert caught.value.details == {"found_pixels": "108000000", "max_image_pixels": "100000000"}


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PSD", "FITS", "ICNS", "XPM", "ICO"])
def test_formats_off_the_list_are_not_opened(kind: str) -> None:
    Image.init()
    if kind in Image.SAVE:
        data = image_files.encode(image_files.image("RGB"), kind)
    else:
        data = {"PSD": b"8BPS\0\1" + b"\0" * 60, "FITS": b"SIMPLE  =" + b" " * 80, "XPM": b"/* XPM */"}[kind]
    with pytest.raises(UndecodableImage):
        open_image(data, LIMITS)


def icon(kind: bytes) -> bytes:
    """A Windows icon of 128 pixels with its mask, as editors write it."""
    noise = np.random.default_rng(1).integers(0, 256, (128, 128, 4), dtype=np.uint8)
    data = image_files.encode(Image.fromarray(noise), "ICO", sizes=[(128, 128)], bitmap_format="bmp")
    return data[:2] + kind + data[4:14] + (67_624).to_bytes(4, "little") + data[18:] + bytes(2048)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (icon(b"\1\0"), "a Windows icon"),
        (icon(b"\2\0"), "a Windows cursor"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "a HEIF or HEIC image"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(64), "a HEIF or HEIC image"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(64), "an MP4 or other ISO file"),
        (b"\xff\x0a" + bytes(64), "a JPEG XL image"),
        (b"8BPS\0\1" + bytes(64), "a Photoshop image"),
        (b"%PDF-1.7\n" + bytes(64), "a PDF document"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\x1a\x45\xdf\xa3" + bytes(64), "a Matroska or WebM file"),
        (b"PK\x03\x04" + bytes(64), "a ZIP archive"),
    ],
)
def test_p54_a_format_off_the_list_is_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(UndecodableImage, match=f"{name}.*; readable formats are JPEG, PNG"):
        open_image(data, LIMITS)


@pytest.mark.parametrize(
    "header",
    [
        bytes(18),
        b"\0\0\2\0\0\0\0\x18\0\0\0\0\x10\0\x10\0\x18\0",  # bits of a colour map without one
        b"\0\1\1\0\0\0\0\x18\0\0\0\0\x10\0\x10\0\x08\0",  # a colour map of 0 entries
        b"\0\0\1\0\0\0\0\0\0\0\0\0\x10\0\x10\0\x08\0",  # indices without a colour map
        b"\0\0\2\0\0\0\0\0\0\0\0\0\x10\0\x10\0\x09\0",  # 9 bits
        b"\0\0\2\0\0\0\0\0\0\0\0\0\x10\0\x10\0\x18\x08",  # 24 bits with alpha
        b"\0\0\2\0\0\0\0\0\0\0\0\0\0\0\x10\0\x18\0",  # no width
        b"\0\0\2\0\0\0\0\0\0\0\0\0\x10\0\x10\0\x18\xc0",  # reserved flags
    ],
)
def test_a_header_that_a_tga_file_would_not_have_is_no_image(header: bytes) -> None:
    with pytest.raises(UndecodableImage, match="no image that can be read"):
        open_image(header + bytes(4096), LIMITS)


@pytest.mark.parametrize("kind", [b"IHDR", b"PLTE"])
def test_damage_names_the_format_and_the_chunk(kind: bytes) -> None:
    """The text of the plugin that recognises a file, not that of the last one that was tried."""
    data = bytearray(FILES["png-P"])
    at = data.index(kind)
    data[at + 4 + int.from_bytes(data[at - 4 : at], "big")] ^= 1
    with pytest.raises(UndecodableImage, match=f"PNG file of .* its chunk {kind.decode()} has a wrong"):
        open_image(bytes(data), LIMITS).decode()
