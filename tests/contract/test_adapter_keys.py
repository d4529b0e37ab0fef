"""The adapter's keys and digests are the service's, over random inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lm_adapter as adapter
from encoder_service import types as service
from encoder_service.ingest import identity
from encoder_service.rpc import convert as service_convert
from lm_adapter import convert, keys
from lm_adapter.testing import fake_model

digests = st.binary(min_size=32, max_size=32)
grids = st.tuples(st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1))
modalities = st.sampled_from(["image", "video"])
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
option_values = st.fixed_dictionaries(
    {},
    optional={
        "min_pixels": st.integers(0, 2**64 - 1),
        "max_pixels": st.integers(0, 2**64 - 1),
        "max_patches": st.integers(0, 2**32 - 1),
        "max_patches_per_side": st.integers(0, 2**32 - 1),
        "fps": st.floats(allow_nan=False) | st.integers(0, 1000),
        "min_frames": st.integers(0, 2**32 - 1),
        "max_frames": st.integers(0, 2**32 - 1),
    },
)


@settings(deadline=None, max_examples=300)
@given(
    digests,
    st.text(max_size=20),
    modalities,
    st.binary(max_size=40),
    st.binary(max_size=40),
    dtypes,
    option_values,
)
def test_p11_keys_of_files_and_digests_are_equal_through_the_wire(
    digest: bytes,
    namespace: str,
    modality: str,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    dtype: str,
    options: dict[str, int | float],
) -> None:
    ours = adapter.ImageItem(
        b"file",
        digest,
        adapter.PreprocessOptions(**options),  # type: ignore[arg-type]
        adapter.Modality(modality),
    )
    model = fake_model(
        model_fingerprint=model_fingerprint, preprocess_fingerprint=preprocess_fingerprint, dtype=dtype
    )
    theirs = service_convert.item_from_proto(convert.item_message(ours))
    expected = identity.embedding_key(
        theirs,
        identity.content_digest(theirs),
        namespace=namespace,
        model_fingerprint=model_fingerprint,
        preprocess_fingerprint=preprocess_fingerprint,
        dtype=getattr(torch, dtype),
    )
    assert keys.item_key(ours, model, namespace=namespace) == expected


@settings(deadline=None, max_examples=100)
@given(digests, grids, dtypes, modalities)
def test_p11_keys_of_pixel_items_are_equal(
    digest: bytes, grid: tuple[int, int, int], dtype: str, modality: str
) -> None:
    content = service.PixelValues(torch.zeros(1, 1), service.Grid(*grid))
    item = service.Item(service.Modality(modality), content, digest)
    fingerprints = {"model_fingerprint": b"m" * 32, "preprocess_fingerprint": b"p" * 32}
    expected = identity.embedding_key(
        item, digest, namespace="n", dtype=getattr(torch, dtype), **fingerprints
    )
    ours = adapter.PixelItem(
        torch.zeros(1, 1), adapter.Grid(*grid), digest=digest, modality=adapter.Modality(modality)
    )
    assert expected == keys.item_key(ours, fake_model(dtype=dtype, **fingerprints), namespace="n")


@settings(deadline=None)
@given(st.binary(max_size=500))
def test_p10_content_digests_are_equal(data: bytes) -> None:
    item = service.Item(service.Modality.IMAGE, service.EncodedFile(data))
    assert keys.content_digest(data) == identity.content_digest(item)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2), (4, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_p10_pixel_digests_are_equal_through_the_wire(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(shape).to(dtype)
    item = adapter.PixelItem(values, adapter.Grid(1, 2, 2))
    theirs = service_convert.item_from_proto(convert.item_message(item))
    assert keys.item_digest(item) == identity.content_digest(theirs)
    if dtype is not torch.bfloat16:
        as_numpy = adapter.PixelItem(values.numpy(), item.grid)
        assert keys.item_digest(as_numpy) == identity.content_digest(theirs)


@settings(deadline=None, max_examples=150)
@given(
    st.binary(max_size=3000) | st.sampled_from([bytes(size) for size in (0, 1, 1023, 1024, 1025, 2049)]),
    st.text(max_size=20),
    modalities,
    option_values,
)
def test_p10_a_file_hashed_by_its_client_has_the_key_that_the_service_gives_it(
    data: bytes, namespace: str, modality: str, options: dict[str, int | float]
) -> None:
    item = adapter.ImageItem(
        data,
        options=adapter.PreprocessOptions(**options),  # type: ignore[arg-type]
        modality=adapter.Modality(modality),
    )
    item_has_the_services_key(item, namespace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 1, 2), (1, 6)])
def test_p10_pixels_hashed_by_their_client_have_the_key_that_the_service_gives_them(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    item = adapter.PixelItem(values, adapter.Grid(1, 2, 2))
    item_has_the_services_key(item, "n")
    if dtype is not torch.bfloat16:
        swapped = adapter.PixelItem(values.numpy().astype(values.numpy().dtype.newbyteorder(">")), item.grid)
        item_has_the_services_key(swapped, "n")
    strided = values.repeat_interleave(2, -1)[..., ::2]
    assert not strided.is_contiguous()
    item_has_the_services_key(adapter.PixelItem(strided, item.grid), "n")


@pytest.mark.parametrize("given", [{}, {"fps": 2.0}, {"timestamps_s": (0.0, 0.5)}])
def test_p10_frames_hashed_by_their_client_have_the_key_that_the_service_gives_them(
    given: dict[str, object],
) -> None:
    frames = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
    for content in (frames, frames.numpy(), frames.numpy()[:, :, ::-1]):
        item_has_the_services_key(adapter.FramesItem(content, **given), "n")  # type: ignore[arg-type]


def item_has_the_services_key(item: adapter.Item, namespace: str) -> None:
    """As it is sent without a digest, and with the one that its client computed."""
    model = fake_model()
    key = keys.item_key(item, model, namespace=namespace)
    for sent in (item, replace(item, digest=keys.item_digest(item))):
        theirs = service_convert.item_from_proto(convert.item_message(sent))
        assert key == identity.embedding_key(
            theirs,
            identity.content_digest(theirs),
            namespace=namespace,
            model_fingerprint=model.model_fingerprint,
            preprocess_fingerprint=model.preprocess_fingerprint,
            dtype=getattr(torch, model.dtype),
        )


def test_the_two_sides_spell_everything_alike() -> None:
    assert vars(adapter.PreprocessOptions()).keys() == vars(service.PreprocessOptions()).keys()
    # What is after the pipeline is added where results are written.
    assert vars(adapter.StageTimings()).keys() == {*vars(service.StageTimings()), "delivery_ms"}
    assert {m.value for m in adapter.Modality} == {m.value for m in service.Modality}
    assert {t.value for t in adapter.CacheTier} - {"unknown"} == {t.value for t in service.CacheTier}
