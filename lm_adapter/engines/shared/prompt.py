"""A prompt with one placeholder id for each row, the offsets of its images, and M-RoPE positions.

Imports no torch. Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_adapter.engines.shared.checkpoint import VisionInterface
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.mrope import MRopePositions, mrope_positions
from lm_adapter.prefill.placeholders import expand_placeholders


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """ids: [N]; offsets: first and last token of each image; positions: None for models without M-RoPE."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    positions: MRopePositions | None

    @classmethod
    def of(cls, ids: Sequence[int], grids: Sequence[Grid], interface: VisionInterface) -> ImagePrompt:
        """ids: before or after expansion; grids: one per image, in order. Raises InvalidRequest, which is a
        ValueError, where ids and images cannot be aligned."""
        items = [interface.prompt_item(grid, Modality.IMAGE) for grid in grids]
        expanded = expand_placeholders(ids, items, interface.placeholder_ids)
        positions = None
        if interface.uses_mrope:
            positions = mrope_positions(
                expanded, grids, merge_size=interface.merge_size, centred=interface.centres_images
            )
        offsets = [(span.start, span.end - 1) for span in expanded.spans]
        return cls(expanded.ids.tolist(), offsets, positions)
