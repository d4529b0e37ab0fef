"""Pad ids: content-dependent ids that replace placeholder ids, for engines whose prefix cache compares ids.

Owns the engines' formulas, the substitution and its inverse, and the detection of two contents with equal pad
ids. Digests are computed elsewhere. Pure numpy.

With h the little-endian integer of the digest's first 8 bytes:

* TokenSpeed: the ids from 1,000,000 to 2^31 - 1 in three bands of S = (2^31 - 1 - 1000000 + 1) // 3;
  id = 1000000 + tag * S + h mod S, tag 0 for images and 1 for clips.
* SGLang, and TokenSpeed before it had bands: id = 1000000 + h mod 2^30, independent of the modality. SGLang
  0.5.23 has four wider ids for each item instead, which are not here: the plugin gives it the whole key.

With 30 bits, a collision is likely from about 30 thousand items on, so equal pad ids do not prove equal
content. ``PadIdLedger`` therefore compares whole digests when an id is claimed. A digest here is 32 bytes
that cover everything the rows depend on: the embedding key, or the content digest if settings and model are
fixed. Pad ids are outside the vocabulary; use ``restore_placeholders`` for draft models and detokenisers.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.prefill.alignment import Ids
from lm_adapter.prefill.placeholders import ExpandedPrompt
from vision_encoder.layout.keys import DIGEST_BYTES

FIRST_PAD_ID = 1_000_000
_TOKENSPEED_BAND = (2**31 - 1 - FIRST_PAD_ID + 1) // 3
_SGLANG_IDS = 2**30
_TAGS = {Modality.IMAGE: 0, Modality.VIDEO: 1}


class PadScheme(enum.Enum):
    TOKENSPEED = "tokenspeed"
    SGLANG = "sglang"


def pad_id(digest: bytes, modality: Modality, scheme: PadScheme) -> int:
    """The engine's pad id for a content. Raises InvalidRequest for a digest that is not 32 bytes long."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a content digest has {DIGEST_BYTES} bytes, got {len(digest)}")
    content_hash = int.from_bytes(digest[:8], "little")
    if scheme is PadScheme.SGLANG:
        return FIRST_PAD_ID + content_hash % _SGLANG_IDS
    return FIRST_PAD_ID + _TAGS[modality] * _TOKENSPEED_BAND + content_hash % _TOKENSPEED_BAND


def substitute_pad_ids(prompt: ExpandedPrompt, pad_ids: Sequence[int]) -> Ids:
    """int64 [N]: a copy of the prompt's ids with every placeholder of item i replaced by pad_ids[i].

    Raises InvalidRequest when the numbers of items and pad ids differ.
    """
    if len(pad_ids) != len(prompt.spans):
        raise InvalidRequest(f"prompt has {len(prompt.spans)} items, {len(pad_ids)} pad ids were given")
    ids = prompt.ids.copy()
    for span, item_pad_id in zip(prompt.spans, pad_ids, strict=True):
        for segment in span.segments:
            ids[segment.start : segment.end] = item_pad_id
    return ids


def restore_placeholders(
    ids: Sequence[int] | npt.NDArray[np.integer],
    *,
    scheme: PadScheme,
    image_placeholder_id: int,
    video_placeholder_id: int,
    vocab_size: int,
    video_pad_ids: Collection[int] = (),
) -> Ids:
    """int64 [N]: the ids with pad ids replaced by placeholders inside the vocabulary, for draft models and
    detokenisers.

    SGLang's pad ids do not encode the modality. They become the image placeholder, except for
    ``video_pad_ids``, the pad ids of the sequence's clips, which the caller must supply. A placeholder id
    that is itself outside the vocabulary, such as Kimi's nominal video id 163840, becomes the other
    placeholder. Raises InvalidRequest when neither placeholder is in the vocabulary, and for an id that is
    neither a pad id nor in the vocabulary.
    """
    inside = [p for p in (image_placeholder_id, video_placeholder_id) if 0 <= p < vocab_size]
    if not inside:
        raise InvalidRequest(
            f"placeholders {image_placeholder_id} and {video_placeholder_id} are both outside the vocabulary "
            f"of {vocab_size} ids"
        )
    image = image_placeholder_id if image_placeholder_id in inside else inside[0]
    video = video_placeholder_id if video_placeholder_id in inside else inside[0]
    restored = np.array(ids, dtype=np.int64)
    if scheme is PadScheme.TOKENSPEED:
        num_pad_ids = len(_TAGS) * _TOKENSPEED_BAND
        is_video = (restored - FIRST_PAD_ID) // _TOKENSPEED_BAND == _TAGS[Modality.VIDEO]
    else:
        num_pad_ids = _SGLANG_IDS
        is_video = np.isin(restored, np.array(list(video_pad_ids), dtype=np.int64))
    is_pad = (restored >= max(FIRST_PAD_ID, vocab_size)) & (restored < FIRST_PAD_ID + num_pad_ids)
    restored[is_pad & ~is_video] = image
    restored[is_pad & is_video] = video
    restored[restored == video_placeholder_id] = video
    restored[restored == image_placeholder_id] = image
    outside = restored[(restored < 0) | (restored >= vocab_size)]
    if len(outside):
        raise InvalidRequest(
            f"{len(outside)} of {len(restored)} ids are neither pad ids nor in the vocabulary of {vocab_size}"
            f"; the first is {int(outside[0])}"
        )
    return restored


@dataclass(frozen=True)
class PadClaim:
    """A pad id for one content. shareable: False when another content has this id, or when the ledger is
    full. The engine must then keep the request from reading and writing the prefix cache (by a salt, an extra
    key or a flag)."""

    pad_id: int
    shareable: bool


class PadIdLedger:
    """Maps each pad id to its content, for as long as the engine may hold KV for it.

    A granted id is never given to another content until ``forget`` or ``clear`` is called. Call these when
    the engine evicts or flushes: forgetting earlier would let a later content read the KV of an earlier one.
    Holds at most ``max_entries`` entries of about 200 bytes. Not thread-safe; use one per engine.
    """

    def __init__(self, scheme: PadScheme, *, max_entries: int = 1_000_000) -> None:
        if max_entries < 1:
            raise InvalidRequest(f"a ledger holds 1 entry or more, got max_entries {max_entries}")
        self._scheme = scheme
        self._max_entries = max_entries
        self._holders: dict[int, tuple[bytes, Modality]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def claim(self, digest: bytes, modality: Modality) -> PadClaim:
        """The content's pad id, and whether KV for it may be shared. Raises the errors of ``pad_id``."""
        item_pad_id = pad_id(digest, modality, self._scheme)
        content = (digest, modality)
        holder = self._holders.get(item_pad_id)
        if holder is None and len(self._holders) < self._max_entries:
            holder = self._holders[item_pad_id] = content
        return PadClaim(item_pad_id, shareable=holder == content)

    def forget(self, digest: bytes, modality: Modality) -> None:
        """To be called when the engine has dropped all KV of this content."""
        item_pad_id = pad_id(digest, modality, self._scheme)
        if self._holders.get(item_pad_id) == (digest, modality):
            del self._holders[item_pad_id]

    def clear(self) -> None:
        """To be called when the engine has flushed its prefix cache."""
        self._holders.clear()
