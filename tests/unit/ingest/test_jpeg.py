"""The faster JPEG decoder gives Pillow's pixels, or leaves the file to Pillow, damaged files included."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from encoder_service.errors import VisionEncoderError
from encoder_service.ingest import decode, jpeg
from encoder_service.ingest.decode import DecodeLimits, open_image
from encoder_service.ingest.headers import ImageSize
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 24, max_image_pixels=1 << 24)
NUM_FILES = 250


def encoded(random_: random.Random, **options: Any) -> bytes:
    """A photograph-like file with a random size, chroma, quality and, as often as not, an orientation."""
    height, width = random_.randint(1, 90), random_.randint(1, 90)
    coarse = np.random.default_rng(random_.getrandbits(32)).integers(
        0, 256, (max(1, height // 4), max(1, width // 4), 3), dtype=np.uint8
    )
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    if random_.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = random_.randint(0, 9)
        options["exif"] = exif
    options = {
        "quality": random_.randint(1, 100),
        "subsampling": random_.choice([0, 1, 2]),
        "progressive": random_.random() < 0.2,
    } | options
    file = io.BytesIO()
    picture.save(file, "JPEG", restart_marker_blocks=random_.choice([0, 0, 1, 5]), **options)
    return file.getvalue()


def damaged(random_: random.Random, data: bytes) -> bytes:
    """The file with bytes changed, cut off, put behind it or an end marker put into it."""
    broken = bytearray(data)
    match random_.randrange(4):
        case 0:
            for _ in range(random_.randint(1, 6)):
                broken[random_.randrange(len(broken))] = random_.randrange(256)
        case 1:
            del broken[random_.randrange(2, len(broken)) :]
        case 2:
            broken += random_.randbytes(20)
        case _:
            index = random_.randrange(len(broken))
            broken[index:index] = b"\xff\xd9"
    return bytes(broken)


def outcome(data: bytes) -> tuple[tuple[int, ...], bytes] | str:
    try:
        pixels = open_image(data, LIMITS).decode()
    except VisionEncoderError as error:
        return f"{error.reason}: {error.message}"
    assert pixels.is_contiguous()
    return tuple(pixels.shape), pixels.numpy().tobytes()


def test_same_outcome_as_pillow_for_sound_and_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    random_ = random.Random(seed)
    files = []
    for _ in range(NUM_FILES):
        data = encoded(random_)
        files.append(damaged(random_, data) if random_.random() < 0.6 else data)
    ours = [outcome(data) for data in files]
    monkeypatch.setattr(decode, "decode_jpeg", lambda *_: None)
    for number, data in enumerate(files):
        assert ours[number] == outcome(data), f"file {number} of seed {seed}"


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_decodes_sequential_files(subsampling: int) -> None:
    data = encoded(random.Random(), subsampling=subsampling, progressive=False)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(
            jpeg.decode_jpeg(data, ImageSize(image.height, image.width)), np.array(image)
        )


@pytest.mark.parametrize(
    "data",
    [
        encoded(random.Random(1), progressive=True),
        image_files.encode(image_files.image("L"), "JPEG"),
        image_files.encode(image_files.image("CMYK"), "JPEG"),
    ],
    ids=["progressive", "grey", "cmyk"],
)
def test_leaves_other_kinds_to_pillow(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("was decoded"))
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(open_image(data, LIMITS).decode().numpy(), expected)
