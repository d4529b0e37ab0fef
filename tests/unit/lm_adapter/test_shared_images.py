"""Image files as engines carry them: what the header says, and files made of pixels."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from encoder_service.errors import UndecodableImage
from encoder_service.ingest.decode import ALLOWED_FORMATS, DecodeLimits, open_image
from lm_adapter.engines.shared import images
from lm_adapter.engines.shared.images import TURNED, ImageFile
from lm_adapter.keys import content_digest
from lm_adapter.pixels import ORIENTATION
from tests.unit.ingest.image_files import odd_pngs

LIMITS = DecodeLimits(1 << 24, 1 << 24)
GENERATOR = np.random.default_rng(7)


def file_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def file_of(name: str, size: tuple[int, int] = (37, 23), orientation: int = 0) -> bytes:
    """name: of the format. orientation: 0 for none."""
    out = io.BytesIO()
    exif = {"exif": file_exif(orientation)} if orientation else {}
    Image.new("RGB", size, "red").save(out, name, **exif)
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
    image, size = ImageFile.read(data), open_image(data, LIMITS).size
    assert image.size == (image.width, image.height)
    assert image.size == ((23, 37) if orientation in TURNED else (37, 23))
    assert image.size == (size.width, size.height)
    assert (image.data, image.digest) == (data, content_digest(data))


@pytest.mark.parametrize("data", [one for one, _ in odd_pngs(9, 5).values()])
def test_cut_pngs_have_the_services_size_or_none(data: bytes) -> None:
    for length in range(len(data) + 1):
        try:
            expected = open_image(data[:length], LIMITS).size
        except UndecodableImage:
            with pytest.raises(ValueError, match="Failed to load image"):
                ImageFile.read(data[:length])
        else:
            assert ImageFile.read(data[:length]).size == (expected.width, expected.height)


def test_formats_are_those_that_the_service_takes() -> None:
    """ICO is none: Pillow decodes it while it opens the file."""
    assert images.FORMATS == ALLOWED_FORMATS
    with pytest.raises(UndecodableImage):
        open_image(file_of("ICO"), LIMITS)
    with pytest.raises(ValueError, match="cannot identify"):
        ImageFile.read(file_of("ICO"))


def test_p34_no_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's API server."""
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("it was decoded"))
    for data, _ in odd_pngs(37, 23).values():
        assert ImageFile.read(data).size in ((37, 23), (23, 37))


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
            assert ImageFile.read(bytes(damaged)).width > 0
        except ValueError:
            continue


# Pixels ---------------------------------------------------------------------------------------------------


MODES = (
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F",
    "I;16", "I;16L", "I;16B",
)  # fmt: skip
"""Pillow's."""
# What may be in an image's info: Pillow puts in what a file holds, and leaves it there through conversions.
TRANSPARENCY = (
    st.integers(-2, 70_000) | st.binary(max_size=300) | st.tuples(*[st.integers(0, 300)] * 3)
    | st.floats(0, 9) | st.text(max_size=3) | st.none()
)  # fmt: skip
INFO = st.fixed_dictionaries(
    {},
    optional={
        "transparency": TRANSPARENCY,
        "icc_profile": st.binary(max_size=99) | st.just(GENERATOR.bytes(1_400_000)) | st.none(),
        "exif": st.integers(0, 9).map(file_exif) | st.binary(max_size=30),
        "xmp": st.binary(max_size=30),
        "XML:com.adobe.xmp": st.text(max_size=30),
        "comment": st.binary(max_size=30) | st.text(max_size=30),
        "Title": st.text(max_size=3000),
        "dpi": st.tuples(st.floats(), st.floats()),
        "gamma": st.floats(),
        "background": st.integers(0, 300),
        "default_image": st.booleans(),
        "duration": st.integers(),
        "loop": st.integers(),
    },
)


def in_memory(mode: str, seed: int) -> Image.Image:
    """Noise, of 7x5 pixels. A palette has fewer colours than its pixels name, and may have alpha."""
    rng = np.random.default_rng(seed)
    num_bytes = len(Image.new(mode, (7, 5)).tobytes())
    values = rng.normal(100, 100, 35).astype("<f4").tobytes() if mode == "F" else rng.bytes(num_bytes)
    image = Image.frombytes(mode, (7, 5), values)
    if mode in ("P", "PA"):
        channels = rng.choice(["RGB", "RGBA"])
        image.putpalette(rng.bytes(len(channels) * int(rng.integers(1, 257))), channels)
    return image


def composited(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Upright and on white, by Pillow. A transparent colour of another mode counts as none."""
    with contextlib.suppress(Exception):  # EXIF that cannot be read
        image = ImageOps.exif_transpose(image)
    image = image.convert("LA") if image.mode == "La" else image
    image.info.pop("exif", None)
    try:
        above = image.convert("RGBA" if image.has_transparency_data else "RGB").convert("RGBA")
    except (TypeError, ValueError):
        image.info.pop("transparency")
        return composited(image)
    white = Image.new("RGBA", above.size, "white")
    return np.asarray(Image.alpha_composite(white, above).convert("RGB"))


@given(st.sampled_from(MODES), st.integers(0, 1 << 32), INFO)
def test_p57_a_file_of_pixels_has_pixels_and_alpha_and_nothing_else(
    mode: str, seed: int, info: dict[str, Any]
) -> None:
    image = in_memory(mode, seed)
    bare = None if {"transparency", "exif"} & set(info) else ImageFile.of_pixels(image)
    image.info.update(info)
    found = ImageFile.of_pixels(image)
    assert image.info == info or str(image.info) == str(info)  # of the caller; NaN differs from itself
    assert bare is None or found.data == bare.data
    assert [kind for kind in chunks(found.data) if kind not in (b"IHDR", b"IDAT", b"IEND")] == []
    assert np.array_equal(open_image(found.data, LIMITS).decode().numpy(), composited(image.copy()))


def chunks(png: bytes) -> list[bytes]:
    kinds, start = [], 8
    while start < len(png):
        kinds.append(png[start + 4 : start + 8])
        start += 12 + int.from_bytes(png[start : start + 4], "big")
    return kinds


@pytest.mark.parametrize(("name", "mode"), [("GIF", "P"), ("PNG", "RGBA"), ("WEBP", "RGB"), ("TIFF", "CMYK")])
def test_p57_of_an_animation_the_current_frame_is_taken(name: str, mode: str) -> None:
    frames, out = [Image.fromarray(pixels_of(5, 7, 4)).convert(mode) for _ in range(3)], io.BytesIO()
    frames[0].save(out, name, save_all=True, append_images=frames[1:], **({"loop": 0} if mode == "P" else {}))
    opened = Image.open(out)
    for number in (0, 2, 1):
        opened.seek(number)
        found = ImageFile.of_pixels(opened)
        opened.seek(number)
        assert np.array_equal(open_image(found.data, LIMITS).decode().numpy(), composited(opened.copy()))
        assert not {b"acTL", b"fcTL", b"tEXt"} & set(chunks(found.data))


@pytest.mark.parametrize("name", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_p57_an_opened_image_is_turned_as_its_file_is(name: str, orientation: int) -> None:
    """Pillow itself turns a TIFF when it loads it."""
    out = io.BytesIO()
    exif = {"exif": file_exif(orientation)} if orientation else {}
    more = {"lossless": True} if name == "WEBP" else {}
    Image.fromarray(pixels_of(5, 7, 3)).save(out, name, **exif, **more)
    of_file = ImageFile.read(out.getvalue())
    with Image.open(out) as image:
        of_pixels = ImageFile.of_pixels(image)
    assert of_pixels.size == of_file.size == ((5, 7) if orientation in TURNED else (7, 5))
    found, expected = (open_image(one.data, LIMITS).decode().numpy() for one in (of_pixels, of_file))
    assert np.array_equal(found, expected)


def test_p33_an_image_whose_file_is_cut_is_a_value_error() -> None:
    """Pillow reads pixels only when they are needed."""
    for name in ("JPEG", "PNG", "GIF"):
        out = io.BytesIO()
        Image.fromarray(pixels_of(64, 64, 3)).save(out, name)
        cut = Image.open(io.BytesIO(out.getvalue()[: len(out.getvalue()) // 2]))
        with pytest.raises(ValueError, match="Failed to load image"):
            ImageFile.of_pixels(cut)


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
