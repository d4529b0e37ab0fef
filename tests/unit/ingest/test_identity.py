"""One digest per content, one key per everything that decides the rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import InvalidDigest
from encoder_service.ingest.identity import (
    content_digest,
    embedding_key,
)
from encoder_service.types import (
    Content,
    DigestOnly,
    EncodedFile,
    Grid,
    Item,
    Modality,
    PixelValues,
    PreprocessOptions,
)
from tests.unit.ingest import image_files

KEY_FIELDS: dict[str, Any] = {
    "namespace": "",
    "model_fingerprint": b"m" * 32,
    "preprocess_fingerprint": b"p" * 32,
    "dtype": torch.float32,
}


def image_item(data: bytes, **fields: Any) -> Item:
    return Item(Modality.IMAGE, EncodedFile(data), **fields)


def key(item: Item, **fields: Any) -> bytes:
    return embedding_key(item, content_digest(item), **(KEY_FIELDS | fields))


@given(st.binary())
def test_p10_a_files_digest_is_blake3_of_its_bytes(data: bytes) -> None:
    assert content_digest(image_item(data)) == blake3(data).digest()


@given(st.binary(min_size=32, max_size=32), st.binary())
def test_p10_a_given_digest_is_authoritative(digest: bytes, data: bytes) -> None:
    assert content_digest(image_item(data, content_digest=digest)) == digest
    assert content_digest(Item(Modality.IMAGE, DigestOnly(), digest)) == digest


@given(st.binary(max_size=80).filter(lambda digest: len(digest) != 32))
def test_a_digest_of_another_length_is_refused_with_both_numbers(digest: bytes) -> None:
    with pytest.raises(InvalidDigest, match=f"{len(digest)} bytes, needs 32"):
        content_digest(image_item(b"x", content_digest=digest))


def test_p10_a_digest_only_item_without_one_is_refused() -> None:
    with pytest.raises(InvalidDigest):
        content_digest(Item(Modality.IMAGE, DigestOnly()))


def test_p11_solid_images_of_transposed_size_differ() -> None:
    wide, tall = (
        image_files.ppm(image_files.pixels(height, width) * 0 + 128) for height, width in ((20, 30), (30, 20))
    )
    assert len(wide) == len(tall)
    assert content_digest(image_item(wide)) != content_digest(image_item(tall))
    assert key(image_item(wide)) != key(image_item(tall))


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_p11_equal_pixels_of_another_grid_or_shape_differ(h: int, w: int, t: int, dtype: torch.dtype) -> None:
    values = torch.full((t * h * w, 588), 0.25, dtype=dtype)
    items: list[Content] = [
        PixelValues(values, Grid(*grid))
        for grid in dict.fromkeys([(t, h, w), (t, w, h), (h, t, w), (w, h, t)])
    ]
    items.append(PixelValues(values.view(-1, 3, 14, 14), Grid(t, h, w)))
    items.append(
        PixelValues(values.view(torch.int16 if dtype is torch.bfloat16 else torch.int32), Grid(t, h, w))
    )
    digests = {content_digest(Item(Modality.IMAGE, content)) for content in items}
    assert len(digests) == len(items)
    # The key differs by grid even where a caller's own digest does not.
    keys = {key(Item(Modality.IMAGE, content, b"d" * 32)) for content in items}
    assert len(keys) == len({content.grid for content in items if isinstance(content, PixelValues)})


def test_pixel_digests_follow_values_not_strides() -> None:
    values = torch.randn(6, 588)
    strided = values.t().contiguous().t()
    assert not strided.is_contiguous()
    grid = Grid(1, 2, 3)
    assert content_digest(Item(Modality.IMAGE, PixelValues(strided, grid))) == content_digest(
        Item(Modality.IMAGE, PixelValues(values, grid))
    )
    changed = values.clone()
    changed[5, 587] += 1
    assert content_digest(Item(Modality.IMAGE, PixelValues(changed, grid))) != content_digest(
        Item(Modality.IMAGE, PixelValues(values, grid))
    )


def test_p11_every_field_of_a_key_counts() -> None:
    item = image_item(b"bytes")
    keys = [
        key(item),
        key(image_item(b"other bytes")),
        key(item, namespace="tenant"),
        key(item, model_fingerprint=b"n" * 32),
        key(item, preprocess_fingerprint=b"q" * 32),
        key(item, dtype=torch.bfloat16),
        key(dataclasses.replace(item, modality=Modality.VIDEO)),
        key(dataclasses.replace(item, options=PreprocessOptions(min_pixels=5))),
        key(dataclasses.replace(item, options=PreprocessOptions(max_pixels=5))),
        key(dataclasses.replace(item, options=PreprocessOptions(fps=5.0))),
        key(Item(Modality.IMAGE, PixelValues(torch.zeros(1, 4), Grid(1, 1, 1)), content_digest(item))),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(value) for value in keys} == {32}


def test_a_key_is_the_same_for_a_file_and_for_its_digest_alone() -> None:
    item = image_item(b"bytes")
    assert key(Item(Modality.IMAGE, DigestOnly(), content_digest(item))) == key(item)
