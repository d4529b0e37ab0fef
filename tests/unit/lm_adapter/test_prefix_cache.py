"""Pad ids in and out of prompts, and who may share them; ids restored are compared in tests/conformance."""

from __future__ import annotations

from typing import Any

import pytest

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.prefill.placeholders import PromptItem, expand_placeholders
from lm_adapter.prefill.prefix_cache import (
    FIRST_PAD_ID,
    PadIdLedger,
    PadScheme,
    restore_placeholders,
    substitute_pad_ids,
)

IMAGE, VIDEO, VOCAB = 900, 901, 1000
BAND = 715_494_549  # (2147483647 - 1000000 + 1) // 3, by hand: 2146483648 / 3 = 715494549.33


def with_hash(value: int, tail: int = 0) -> bytes:
    return value.to_bytes(8, "little") + bytes([tail]) * 24


def test_p06_every_item_has_its_own_pad_id_in_a_copy_of_the_prompt() -> None:
    prompt = expand_placeholders(
        [1, IMAGE, 2, VIDEO, 3, VIDEO], [PromptItem(IMAGE, (2,)), PromptItem(VIDEO, (1, 1))]
    )
    before = prompt.ids.tolist()
    assert substitute_pad_ids(prompt, [2001, 2002]).tolist() == [1, 2001, 2001, 2, 2002, 3, 2002]
    assert prompt.ids.tolist() == before
    with pytest.raises(InvalidRequest, match="2 items, 1 pad ids"):
        substitute_pad_ids(prompt, [2001])


def test_p06_sglangs_clips_come_back_as_clips_where_they_are_named() -> None:
    image, clip = FIRST_PAD_ID + 5, FIRST_PAD_ID + 2**30 - 1
    restored = restore_placeholders(
        [1, image, clip, clip, 2],
        scheme=PadScheme.SGLANG,
        image_placeholder_id=IMAGE,
        video_placeholder_id=VIDEO,
        vocab_size=VOCAB,
        video_pad_ids={clip},
    )
    assert restored.tolist() == [1, 900, 901, 901, 2]


def test_p06_a_placeholder_outside_the_vocabulary_never_leaves() -> None:
    """Kimi's nominal video id is 163840 with a vocabulary of 163840 ids."""
    restored = restore_placeholders(
        [5, 163_840],
        scheme=PadScheme.TOKENSPEED,
        image_placeholder_id=163_605,
        video_placeholder_id=163_840,
        vocab_size=163_840,
    )
    assert restored.tolist() == [5, 163_605]


def test_p06_unknown_ids_are_refused() -> None:
    kwargs: dict[str, Any] = {"scheme": PadScheme.SGLANG, "image_placeholder_id": IMAGE, "vocab_size": VOCAB}
    with pytest.raises(InvalidRequest, match=r"1 of 2 ids are neither .* 1000; the first is 5000"):
        restore_placeholders([1, 5000], video_placeholder_id=VIDEO, **kwargs)
    kwargs["image_placeholder_id"] = 2000
    with pytest.raises(InvalidRequest, match="2000 and 3000 are both"):
        restore_placeholders([1], video_placeholder_id=3000, **kwargs)


@pytest.mark.parametrize(
    ("scheme", "last"),
    [(PadScheme.SGLANG, 1_000_000 + (1 << 30) - 1), (PadScheme.TOKENSPEED, 1_000_000 + 2 * BAND - 1)],
)
def test_p06_an_id_past_the_schemes_last_is_no_pad_id(scheme: PadScheme, last: int) -> None:
    kwargs: dict[str, Any] = {
        "scheme": scheme,
        "image_placeholder_id": IMAGE,
        "video_placeholder_id": VIDEO,
        "vocab_size": VOCAB,
    }
    assert restore_placeholders([last], **kwargs).tolist() == [IMAGE if scheme is PadScheme.SGLANG else VIDEO]
    with pytest.raises(InvalidRequest, match=f"the first is {last + 1}"):
        restore_placeholders([last + 1], **kwargs)


def test_p12_equal_pad_ids_of_different_content_are_not_shareable() -> None:
    ledger = PadIdLedger(PadScheme.SGLANG)
    first, second = with_hash(77, tail=1), with_hash(77 + (1 << 30), tail=2)
    granted, refused = ledger.claim(first, Modality.IMAGE), ledger.claim(second, Modality.IMAGE)
    assert granted.pad_id == refused.pad_id
    assert (granted.shareable, refused.shareable) == (True, False)
    assert ledger.claim(first, Modality.IMAGE).shareable
    # Equal first eight bytes are not enough either.
    assert not ledger.claim(with_hash(77, tail=3), Modality.IMAGE).shareable
    # One content read as an image and as a clip has different rows.
    assert not ledger.claim(first, Modality.VIDEO).shareable


def test_p12_an_id_passes_on_only_after_the_engine_dropped_its_kv() -> None:
    ledger = PadIdLedger(PadScheme.TOKENSPEED)
    first, second = with_hash(5, tail=1), with_hash(5, tail=2)
    assert ledger.claim(first, Modality.IMAGE).shareable
    ledger.forget(second, Modality.IMAGE)
    assert not ledger.claim(second, Modality.IMAGE).shareable
    ledger.forget(first, Modality.IMAGE)
    assert ledger.claim(second, Modality.IMAGE).shareable
    ledger.clear()
    assert len(ledger) == 0
    assert ledger.claim(first, Modality.IMAGE).shareable


def test_p17_a_full_ledger_grants_nothing_new_and_forgets_nothing() -> None:
    ledger = PadIdLedger(PadScheme.SGLANG, max_entries=2)
    claims = [ledger.claim(with_hash(n), Modality.IMAGE) for n in (1, 2, 3, 1)]
    assert [claim.shareable for claim in claims] == [True, True, False, True]
    assert len(ledger) == 2
    with pytest.raises(InvalidRequest, match="got max_entries 0"):
        PadIdLedger(PadScheme.SGLANG, max_entries=0)
