"""The adapter's keys and digests are the service's, through the wire, over random items."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lm_adapter.items as adapter
from encoder_service import types as service
from encoder_service.ingest import identity
from encoder_service.rpc import convert as service_convert
from lm_adapter import convert, keys
from lm_adapter.testing import fake_model
from lm_adapter.types import CacheTier

FINGERPRINTS = {"model_fingerprint": b"m" * 32, "preprocess_fingerprint": b"p" * 32}
digests = st.binary(min_size=32, max_size=32)
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


def service_key(item: adapter.Item, namespace: str, dtype: str = "float32", **fingerprints: bytes) -> bytes:
    """The key that the service derives from the message that the adapter sends."""
    theirs = service_convert.item_from_proto(convert.item_message(item))
    return identity.embedding_key(
        theirs,
        identity.content_digest(theirs),
        namespace=namespace,
        dtype=getattr(torch, dtype),
        **(FINGERPRINTS | fingerprints),
    )


def adapter_key(item: adapter.Item, namespace: str, dtype: str = "float32", **fingerprints: Any) -> bytes:
    model = fake_model(dtype=dtype, **(FINGERPRINTS | fingerprints))
    return keys.item_key(item, model, namespace=namespace)


@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=3000) | st.sampled_from([bytes(size) for size in (0, 1, 1023, 1024, 1025, 2049)]),
    st.none() | digests,
    st.text(max_size=20),
    modalities,
    st.binary(max_size=40),
    st.binary(max_size=40),
    dtypes,
    option_values,
)
def test_p10_p11_files_and_digests_have_one_key_on_both_sides(
    data: bytes,
    digest: bytes | None,
    namespace: str,
    modality: str,
    model: bytes,
    preprocess: bytes,
    dtype: str,
    options: dict[str, int | float],
) -> None:
    item = adapter.ImageItem(
        data,
        digest,
        adapter.PreprocessOptions(**options),  # type: ignore[arg-type]
        adapter.Modality(modality),
    )
    fingerprints = {"model_fingerprint": model, "preprocess_fingerprint": preprocess}
    found = service_key(item, namespace, dtype, **fingerprints)
    hashed = (
        item
        if digest is not None
        else adapter.ImageItem(data, keys.content_digest(data), item.options, item.modality)
    )
    assert adapter_key(hashed, namespace, dtype, **fingerprints) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 1, 2), (1, 6)])
def test_p10_p11_pixels_have_one_key_on_both_sides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    tensors = [values, values.repeat_interleave(2, -1)[..., ::2]]
    forms: list[Any] = [*tensors, *([values.numpy()] if dtype is not torch.bfloat16 else [])]
    found = set()
    for form in forms:
        item = adapter.PixelItem(form, adapter.Grid(1, 2, 2))
        assert keys.item_digest(item) == identity.content_digest(
            service_convert.item_from_proto(convert.item_message(item))
        )
        with_digest = adapter.PixelItem(form, adapter.Grid(1, 2, 2), digest=keys.item_digest(item))
        assert adapter_key(with_digest, "n") == service_key(item, "n")
        found.add(service_key(item, "n"))
    assert len(found) == 1
    assert service_key(adapter.PixelItem(values, adapter.Grid(1, 4, 1)), "n") not in found


def clips() -> list[adapter.ClipItem | adapter.FramesItem]:
    shape = (random.randint(1, 5), random.randint(1, 9), random.randint(1, 9), 3)
    frames = np.random.default_rng().integers(0, 256, shape, dtype=np.uint8)
    at_s = tuple(sorted(random.uniform(0, 100) for _ in frames))
    return [
        adapter.ClipItem(random.randbytes(50)),
        adapter.ClipItem(random.randbytes(50), options=adapter.PreprocessOptions(fps=1.5, max_frames=7)),
        adapter.FramesItem(frames),
        adapter.FramesItem(frames, fps=24000 / 1001),
        adapter.FramesItem(frames, timestamps_s=at_s),
        adapter.FramesItem(torch.from_numpy(frames), fps=2, options=adapter.PreprocessOptions(min_frames=2)),
        adapter.FramesItem(frames, fps=2, digest=b"d" * 32),
    ]


@pytest.mark.parametrize("place", range(7))
def test_p11_clips_have_one_key_on_both_sides(place: int) -> None:
    item = clips()[place]
    assert adapter_key(item, "n") == service_key(item, "n")


def test_the_two_sides_spell_everything_alike() -> None:
    assert vars(adapter.PreprocessOptions()).keys() == vars(service.PreprocessOptions()).keys()
    assert {m.value for m in adapter.Modality} == {m.value for m in service.Modality}
    assert {t.name for t in CacheTier} - {"UNKNOWN"} == {t.name for t in service.CacheTier}
