"""Keys and digests of the adapter; that they are the service's is tests/contract/test_adapter_keys.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm_adapter import (
    ClipItem,
    DigestItem,
    FramesItem,
    Grid,
    ImageItem,
    InvalidRequest,
    PixelItem,
    PreprocessOptions,
    UrlItem,
)
from lm_adapter.keys import content_digest, item_digest, item_key
from lm_adapter.testing import fake_model

ROOT = Path(__file__).parents[3]
MODEL = fake_model()


def test_p11_everything_that_decides_the_rows_changes_the_key() -> None:
    item = ImageItem(b"", digest=b"d" * 32)
    pixels = np.zeros((8, 6), np.float32)
    keys = [
        item_key(item, MODEL),
        item_key(ImageItem(b"", digest=b"e" * 32), MODEL),
        item_key(item, MODEL, namespace="a"),
        item_key(ClipItem(b"", digest=b"d" * 32), MODEL),
        item_key(item, replace(MODEL, model_fingerprint=b"n" * 32)),
        item_key(item, replace(MODEL, preprocess_fingerprint=b"q" * 32)),
        item_key(replace(item, options=PreprocessOptions(min_pixels=1)), MODEL),
        item_key(replace(item, options=PreprocessOptions(max_pixels=1)), MODEL),
        item_key(replace(item, options=PreprocessOptions(fps=1)), MODEL),
        item_key(PixelItem(pixels, Grid(1, 2, 4), digest=b"d" * 32), MODEL),
        item_key(PixelItem(pixels, Grid(1, 4, 2), digest=b"d" * 32), MODEL),
        item_key(FramesItem(np.zeros((2, 4, 4, 3), np.uint8), fps=2.0, digest=b"d" * 32), MODEL),
        item_key(FramesItem(np.zeros((2, 4, 4, 3), np.uint8), fps=3.0, digest=b"d" * 32), MODEL),
        item_key(item, replace(MODEL, dtype="bfloat16")),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(one) == 32 for one in keys)


@pytest.mark.parametrize("digest", [b"short", b"d" * 33])
def test_a_digest_has_thirty_two_bytes(digest: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"{len(digest)} bytes, needs 32") as caught:
        item_key(DigestItem(digest), MODEL)
    assert caught.value.reason == "INVALID_DIGEST"


def test_p10_an_item_is_named_by_its_digest_or_by_its_content() -> None:
    by_content = item_key(ImageItem(b"jpeg"), MODEL)
    assert by_content == item_key(ImageItem(b"jpeg", digest=content_digest(b"jpeg")), MODEL)
    assert by_content == item_key(DigestItem(content_digest(b"jpeg")), MODEL)
    assert by_content != item_key(ImageItem(b"jpeg", digest=b"d" * 32), MODEL)
    with pytest.raises(InvalidRequest, match="0 bytes, needs 32"):
        item_key(DigestItem(b""), MODEL)
    digest = content_digest(b"jpeg")
    assert item_key(UrlItem("https://a.test/b", digest), MODEL) == item_key(DigestItem(digest), MODEL)
    with pytest.raises(InvalidRequest, match="digest"):
        item_key(UrlItem("https://a.test/b"), MODEL)


def test_content_digest_is_blake3() -> None:
    # The empty input of the BLAKE3 test vectors.
    expected = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert content_digest(b"").hex() == expected


def test_p11_pixels_of_transposed_grids_and_shapes_differ() -> None:
    pixels = np.zeros((8, 6), np.float32)
    digests = [
        item_digest(PixelItem(pixels, Grid(1, 2, 4))),
        item_digest(PixelItem(pixels, Grid(1, 4, 2))),
        item_digest(PixelItem(pixels.reshape(8, 3, 2), Grid(1, 2, 4))),
        item_digest(PixelItem(np.zeros((8, 12), np.float16), Grid(1, 2, 4))),
    ]
    assert len(set(digests)) == 4


def test_p10_without_blake3_content_is_not_hashed_at_all() -> None:
    code = """
import sys
sys.modules["blake3"] = None
from lm_adapter import DigestItem, ImageItem, MissingDependency, VisionEncoderClient
from lm_adapter.keys import content_digest, item_key
from lm_adapter.testing import FakeEncoder, fake_model
item_key(DigestItem(b"d" * 32), fake_model())
try:
    content_digest(b"x")
except MissingDependency as error:
    print(error)
with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
    outcomes = client.encode([ImageItem(b"x"), ImageItem(b"x", digest=b"d" * 32)])
    print(outcomes[0].reason, outcomes[1].num_rows > 0)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert completed.stdout.splitlines() == [
        "hashing content needs the package blake3, which is not installed",
        "MISSING_DEPENDENCY True",
    ]
