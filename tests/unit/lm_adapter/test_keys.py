"""Digests of the adapter's items; that keys are the service's is in tests/contract/test_keys.py."""

from __future__ import annotations

import pytest

from lm_adapter import (
    DigestItem,
    ImageItem,
    InvalidRequest,
    UrlItem,
)
from lm_adapter.keys import content_digest, item_key
from lm_adapter.testing import fake_model
from tests.unit.lm_adapter.interpreter import output_of

MODEL = fake_model()


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
    assert output_of(code).splitlines() == [
        "hashing content needs the package blake3, which is not installed",
        "MISSING_DEPENDENCY True",
    ]
