"""Rows taken out of a prompt: ids, spans and positions of what is left, so that splice and M-RoPE agree.

Owns what follows from a choice of rows; the choice itself is the engine's, behind ``RowPruner``. Pure numpy.

A row that is dropped takes its token with it. Every token that stays keeps the position it had: the grid of
an item keeps its holes, and the text behind it does not move closer. So ``delta`` grows by the number of rows
dropped, and decoding goes on from where the whole prompt would have. KV of a pruned item is not that of the
whole one, nor of another choice: a prefix cache has to key it by ``pruned_digest``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.mrope import MRopePositions
from lm_adapter.placeholders import ExpandedPrompt, ItemSpan, Segment
from lm_adapter.types import DIGEST_BYTES

__all__ = ["PrunedPrompt", "RowMask", "RowPruner", "choose_rows", "prune_prompt", "pruned_digest"]

RowMask = npt.NDArray[np.bool_]
_TAG = b"vision_encoder.pruned.v1"


class RowPruner(Protocol):
    """The hook: which rows of one item the language model gets to see."""

    def __call__(self, item: int, grid: Sequence[int], rows: Any) -> RowMask | None:
        """bool [R], True for rows that stay, at least one of them; None keeps all.

        item: its index in the prompt; grid: [t, h, w] in patches; rows: the item's [R, D * (1 + L)], whole,
        in the order frame, row, column of the merged grid. A choice that looks at the rows' values reads
        them from the device, which the host then waits for; one that goes by the grid does not.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class PrunedPrompt:
    """prompt, positions: of the tokens that stay; keep: one mask per item, for ``Splicer(keep=...)``, whose
    rows stay whole."""

    prompt: ExpandedPrompt
    positions: MRopePositions
    keep: tuple[RowMask | None, ...]


def choose_rows(
    pruner: RowPruner, grids: Sequence[Sequence[int]], rows: Sequence[Any]
) -> list[RowMask | None]:
    """Asks the hook for every item. Raises InvalidRequest when grids and rows differ in number."""
    if len(grids) != len(rows):
        raise InvalidRequest(f"{len(grids)} grids came with rows of {len(rows)} items")
    return [
        pruner(item, grid, item_rows) for item, (grid, item_rows) in enumerate(zip(grids, rows, strict=True))
    ]


def prune_prompt(
    prompt: ExpandedPrompt, positions: MRopePositions, keep: Sequence[RowMask | None]
) -> PrunedPrompt:
    """The prompt without the rows that ``keep`` drops.

    keep: per item bool [R] or None. A segment that loses all rows leaves its span (the frame's timestamp
    stays, it is text); an item has to keep one row at least.
    Raises InvalidRequest when masks and items disagree in number or in rows, or an item would vanish.
    """
    if len(keep) != len(prompt.spans):
        raise InvalidRequest(f"prompt has {len(prompt.spans)} items, {len(keep)} masks were given")
    if positions.num_tokens != len(prompt):
        raise InvalidRequest(f"positions are of {positions.num_tokens} tokens, the prompt has {len(prompt)}")
    stays = np.ones(len(prompt), dtype=np.bool_)
    for span, mask in zip(prompt.spans, keep, strict=True):
        if mask is None:
            continue
        if mask.dtype != np.bool_ or mask.shape != (span.length,) or not mask.any():
            raise InvalidRequest(
                f"item {span.item} has {span.length} rows, its mask is {mask.dtype} {list(mask.shape)} with "
                f"{int(mask.sum())} kept; needs bool [{span.length}] with 1 kept or more"
            )
        row = 0
        for segment in span.segments:
            stays[segment.start : segment.end] = mask[row : row + segment.length]
            row += segment.length
    before = np.concatenate([[0], np.cumsum(stays)])  # tokens that stay, ahead of each
    spans = tuple(
        ItemSpan(
            span.item,
            tuple(
                Segment(int(before[s.start]), int(before[s.end] - before[s.start]))
                for s in span.segments
                if before[s.end] > before[s.start]
            ),
        )
        for span in prompt.spans
    )
    num_dropped = len(prompt) - int(before[-1])
    return PrunedPrompt(
        ExpandedPrompt(prompt.ids[stays], spans),
        MRopePositions(positions.prompt[:, stays], positions.delta + num_dropped),
        tuple(keep),
    )


def pruned_digest(digest: bytes, mask: RowMask | None) -> bytes:
    """The digest that stands for an item with these rows kept: for pad ids, ``PadIdLedger`` and
    ``shared_prefix_length``. The digest itself when none is dropped.

    SHA-256 of a tag, the digest, the number of rows as 8 little-endian bytes, and the mask, first row in the
    lowest bit. Raises InvalidRequest for a digest that is not 32 bytes.
    """
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a content digest has {DIGEST_BYTES} bytes, got {len(digest)}")
    if mask is None or mask.all():
        return digest
    packed = np.packbits(mask, bitorder="little").tobytes()
    return hashlib.sha256(_TAG + digest + len(mask).to_bytes(8, "little") + packed).digest()
