"""M-RoPE: three-axis positions of a prompt, and the scalar that decoding needs.

Owns positions; ``rotary`` applies them. Pure numpy.

Formula (Qwen2-VL, arXiv 2409.12191; Qwen3-VL splits clips by frame), where ``next`` is the next free
position:

* a text token gets position (next, next, next); then next += 1;
* row (i, j, k) of an item with merged grid (t, h', w') gets (next + i, next + j, next + k); then
  next += max(t, h', w'). For positions only, a clip [T, h, w] is T units of (1, h', w') with its timestamps
  as text between them; the encoder's grid stays [T, h, w];
* with a time step s of an item (Qwen2.5-VL, Qwen3-Omni), row (i, j, k) gets next + floor(i * s) in time.

Ling-3.0-VL centres images (VideoRoPE, arXiv 2502.05173; SGLang's ``BailingMRotaryEmbedding``): row (0, j, k)
gets (next, next + j - (h' - 1) // 2, next + k - (w' - 1) // 2), which may be negative; then next += 1.

After N tokens, delta = next - N. Token n >= N has position n + delta on all axes, also when the prompt ends
in an item. Without centring ``next`` is the maximum over all three axes + 1, because every unit and every
text token reaches next - 1 on at least one axis. Positions are computed from spans, not from ids, so pad ids
that a prefix cache substitutes later do not affect them.

Shape legend: N tokens of the prompt, B prompts, S padded length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.prefill.placeholders import ExpandedPrompt, ItemSpan, merged_grid

NUM_AXES = 3


@dataclasses.dataclass(frozen=True, eq=False)
class MRopePositions:
    """Positions of one prompt. prompt: int64 [3, N], axes t, h, w; delta: position minus index from N on.

    Decoding needs only ``delta``: ``decode(index)`` reads nothing else.
    """

    prompt: npt.NDArray[np.int64]
    delta: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt[0])

    @property
    def next_position(self) -> int:
        """The position of the first token after the prompt."""
        return self.num_tokens + self.delta

    def chunk(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """int64 [3, end - start]: positions of tokens [start, end). Tokens after the prompt are generated
        tokens, so a request that was preempted during decoding can be prefilled again with them.

        Raises InvalidRequest unless 0 <= start <= end.
        """
        if not 0 <= start <= end:
            raise InvalidRequest(f"a chunk needs 0 <= start <= end, got start {start} and end {end}")
        inside = self.prompt[:, start : min(end, self.num_tokens)]
        if end <= self.num_tokens:
            return inside
        generated = np.arange(max(start, self.num_tokens), end, dtype=np.int64) + self.delta
        return np.concatenate([inside, np.broadcast_to(generated, (NUM_AXES, len(generated)))], axis=1)

    def decode(self, index: int) -> int:
        """The position, equal on all axes, of the generated token with this index. Indices count from the
        start of the prompt.

        Raises InvalidRequest for an index inside the prompt.
        """
        if index < self.num_tokens:
            raise InvalidRequest(
                f"token {index} belongs to the prompt of {self.num_tokens} tokens, not to decoding"
            )
        return index + self.delta

    def drafts(self, index: int, depths: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """int64 [3, K]: positions of K draft tokens that are verified in one pass after ``index`` tokens.

        index: number of final tokens of the sequence (prompt and accepted tokens). depths: [K], 0 for the
        token with this index, 1 for the next one. A chain has depths 0..K-1; in a tree, branches have equal
        depths. A draft model gets the same positions, and ids without pad ids
        (``prefix_cache.restore_placeholders``).
        Raises InvalidRequest for an index inside the prompt or a negative depth.
        """
        steps = np.asarray(depths, dtype=np.int64)
        if steps.ndim != 1 or steps.min(initial=0) < 0:
            raise InvalidRequest(
                f"drafts need a list of depths from 0 on, got shape {list(steps.shape)} "
                f"with smallest {int(steps.min(initial=0))}"
            )
        return np.broadcast_to(self.decode(index) + steps, (NUM_AXES, len(steps)))


def mrope_positions(
    prompt: ExpandedPrompt,
    grids: Sequence[Sequence[int]],
    *,
    merge_size: int,
    time_steps: Sequence[float] | None = None,
    centred: bool = False,
) -> MRopePositions:
    """Positions of an expanded prompt.

    grids: [t, h, w] in patches, one per item, images and clips together in prompt order. time_steps: one per
    item, the positions from one temporal patch to the next where that is not 1; positions are rounded down.
    For clips of Qwen2.5-VL and Qwen3-Omni seconds of a temporal patch times ``tokens_per_second`` and
    ``position_id_per_seconds``. centred: Ling's rule, which
    has images only.
    Raises InvalidRequest when grids and spans differ in number or in rows, for grids that the merge size
    does not divide, and for clips that are to be centred.
    """
    if len(grids) != len(prompt.spans):
        raise InvalidRequest(
            f"prompt has {len(prompt.spans)} items, {len(grids)} grids were given", reason="GRID_MISMATCH"
        )
    parts: list[npt.NDArray[np.int64]] = []
    token = position = 0
    steps = [1.0] * len(grids) if time_steps is None else time_steps
    if len(steps) != len(grids) or not all(0 < step < math.inf for step in steps):
        raise InvalidRequest(
            f"time_steps are {list(steps)}, needs {len(grids)} finite numbers above 0, one for each item"
        )
    for span, grid, step in zip(prompt.spans, grids, steps, strict=True):
        extents = _unit_grid(span, grid, merge_size)
        unit = np.indices(extents, dtype=np.int64).reshape(NUM_AXES, -1)
        if step != 1:
            unit[0] = (unit[0] * step).astype(np.int64)
        advance = int(unit.max()) + 1
        if centred:
            _refuse_clip(span, grid)
            unit -= [[0], [(extents[1] - 1) // 2], [(extents[2] - 1) // 2]]
            advance = 1
        for segment in span.segments:
            num_text = segment.start - token
            parts += [_text(position, num_text), unit + (position + num_text)]
            position += num_text + advance
            token = segment.end
    num_text = len(prompt) - token
    parts.append(_text(position, num_text))
    return MRopePositions(np.concatenate(parts, axis=1), position + num_text - len(prompt))


def plain_positions(num_tokens: int) -> MRopePositions:
    """Positions for families with plain RoPE (Kimi): the token's index on every axis, and delta 0."""
    return MRopePositions(_text(0, num_tokens), 0)


def batch_positions(
    prompts: Sequence[MRopePositions],
    start: int,
    end: int,
    *,
    padded_length: int,
    side: Literal["left", "right"],
) -> npt.NDArray[np.int64]:
    """int64 [3, B, end - start]: columns [start, end) of the batch padded to S columns; 0 at padding.

    Raises InvalidRequest for a prompt longer than ``padded_length``, an unknown side, and unless
    0 <= start <= end. Columns after S are generated tokens; they need left padding, where every prompt ends
    in column S - 1.
    """
    if side not in ("left", "right"):
        raise InvalidRequest(f"padding is on side {side!r}, needs left or right")
    if not 0 <= start <= end:
        raise InvalidRequest(f"columns need 0 <= start <= end, got start {start} and end {end}")
    if side == "right" and end > padded_length:
        raise InvalidRequest(
            f"column {end} is beyond the padded length {padded_length}, which needs left padding"
        )
    positions = np.zeros((NUM_AXES, len(prompts), end - start), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        padding = padded_length - prompt.num_tokens
        if padding < 0:
            raise InvalidRequest(
                f"prompt {row} has {prompt.num_tokens} tokens, the padded length is {padded_length}"
            )
        offset = padding if side == "left" else 0
        last = end if side == "left" else min(end, prompt.num_tokens)
        first_column = max(start, offset)
        if first_column < last:
            chunk = prompt.chunk(first_column - offset, last - offset)
            positions[:, row, first_column - start : last - start] = chunk
    return positions


def _text(position: int, length: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(position, position + length, dtype=np.int64), (NUM_AXES, length))


def _refuse_clip(span: ItemSpan, grid: Sequence[int]) -> None:
    if grid[0] != 1:
        raise InvalidRequest(
            f"item {span.item} has grid {list(grid)}, centred positions need a t of 1: an image",
            reason="GRID_MISMATCH",
        )


def _unit_grid(span: ItemSpan, grid: Sequence[int], merge_size: int) -> tuple[int, int, int]:
    """The merged grid of each unit of an item: (t, h', w'), or (1, h', w') if each frame is a unit."""
    t, h, w = merged_grid(grid, merge_size)
    num_units = len(span.segments)
    unit = (1 if num_units == t else t, h, w)
    if num_units not in (1, t) or any(segment.length != math.prod(unit) for segment in span.segments):
        raise InvalidRequest(
            f"item {span.item} has grid {list(grid)}, {t * h * w} rows after the merge by "
            f"{merge_size}x{merge_size}, and {num_units} segments with {span.length} placeholders",
            reason="GRID_MISMATCH",
            details={"grid": list(grid), "segments": num_units, "rows": span.length},
        )
    return unit
