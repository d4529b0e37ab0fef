"""Content digests: of files, and the caller's.

The digest's and the key's every byte is in ``tests/contract/test_keys.py``, which holds service and adapter
equal, and in the vectors of ``tests/conformance``.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.errors import InvalidDigest
from encoder_service.ingest.identity import content_digest
from encoder_service.types import EncodedFile, Item, Modality
from tests.unit.ingest import image_files


def image_item(data: bytes, digest: bytes | None = None) -> Item:
    return Item(Modality.IMAGE, EncodedFile(data), digest)


@given(st.binary(max_size=80).filter(lambda digest: len(digest) != 32))
def test_a_digest_of_another_length_is_refused_with_both_numbers(digest: bytes) -> None:
    with pytest.raises(InvalidDigest, match=f"{len(digest)} bytes, needs 32"):
        content_digest(image_item(b"x", digest))


def test_p11_solid_images_of_transposed_size_differ() -> None:
    wide, tall = (image_files.ppm(np.full((*size, 3), 128, np.uint8)) for size in ((20, 30), (30, 20)))
    assert len(wide) == len(tall)
    assert content_digest(image_item(wide)) != content_digest(image_item(tall))
