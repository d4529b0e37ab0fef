"""A prompt with one placeholder id for each row, the offsets of its images, and M-RoPE positions.

Imports no torch. Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lm_adapter.engines.shared.checkpoint import VisionInterface
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.mrope import MRopePositions, mrope_positions
from lm_adapter.prefill.placeholders import ExpandedPrompt, expand_placeholders


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Raises InvalidRequest, which is a ValueError, where ids and images cannot be aligned.

    expanded: ``of`` makes it; grids: one per image, in order.
    """

    expanded: ExpandedPrompt
    grids: Sequence[Grid]
    interface: VisionInterface

    @classmethod
    def of(cls, ids: Sequence[int], grids: Sequence[Grid], interface: VisionInterface) -> ImagePrompt:
        """ids: before or after expansion."""
        items = [interface.prompt_item(grid, Modality.IMAGE) for grid in grids]
        return cls(expand_placeholders(ids, items, interface.placeholder_ids), grids, interface)

    @cached_property
    def ids(self) -> list[int]:
        """[N]"""
        ids: list[int] = self.expanded.ids.tolist()
        return ids

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """The first and the last token of each image."""
        return [(span.start, span.end - 1) for span in self.expanded.spans]

    @cached_property
    def positions(self) -> MRopePositions | None:
        """None for models without M-RoPE."""
        if not self.interface.uses_mrope:
            return None
        return mrope_positions(
            self.expanded,
            self.grids,
            merge_size=self.interface.merge_size,
            centred=self.interface.centres_images,
        )
