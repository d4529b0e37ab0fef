"""Truncated and corrupt files of every format answer with one of our errors, or decode; nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from encoder_service.errors import ImageTooLarge, UndecodableImage
from encoder_service.ingest.decode import DecodeLimits, open_image
from tests.unit.ingest import image_files

LIMITS = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)
FILES = image_files.every_file()
NUM_CUTS, NUM_FLIPS = 40, 60


def attempt(data: bytes) -> None:
    """Decodes to pixels of the header's size, or is refused; any other exception fails the calling test."""
    try:
        image = open_image(data, LIMITS)
        assert 1 <= image.size.height * image.size.width <= LIMITS.max_image_pixels
        pixels = image.decode()
    except (UndecodableImage, ImageTooLarge):
        return
    assert pixels.dtype == torch.uint8
    assert image.size == tuple(pixels.shape[:2])


@pytest.mark.parametrize("name", FILES)
def test_truncated_anywhere(name: str) -> None:
    data = FILES[name]
    cuts = {*range(min(30, len(data))), *(len(data) * i // NUM_CUTS for i in range(NUM_CUTS)), len(data) - 1}
    for cut in sorted(cuts):
        attempt(data[:cut])


@pytest.mark.parametrize("name", FILES)
def test_half_an_image_never_decodes(name: str) -> None:
    num_frames = 2 if name.endswith(("-pages", "-animated")) or name == "mpo" else 1
    data = FILES[name][: len(FILES[name]) // 2 // num_frames]
    with pytest.raises(UndecodableImage) as caught:
        open_image(data, LIMITS).decode()
    assert caught.value.details["found_bytes"] == str(len(data))


@pytest.mark.parametrize("name", FILES)
def test_corrupt_anywhere(name: str) -> None:
    rng = random.Random(name)
    for _ in range(NUM_FLIPS):
        data = bytearray(FILES[name])
        for _ in range(rng.choice((1, 1, 2, 8, 40))):
            # Headers decide most, so that half of the damage goes there.
            end = len(data) if rng.random() < 0.5 else min(96, len(data))
            data[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        attempt(bytes(data))
