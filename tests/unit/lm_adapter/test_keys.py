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
