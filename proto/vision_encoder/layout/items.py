"""Records of an item that the service and its clients share: its modality, its grid, its options."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Modality(enum.Enum):
    IMAGE = "image"
    VIDEO = "video"


class Grid(NamedTuple):
    """One item's extent in patches, before the spatial merge: temporal patches, height, width."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    def num_rows(self, merge_size: int, *, merges_time: bool, num_chunks: int = 1) -> int:
        """Rows (visual tokens) of an item of this grid: one for each block of ``merge_size`` x ``merge_size``
        patches. merges_time: the tower averages over the frames of a chunk, which has the rows of one frame.
        num_chunks: of a clip of such a tower."""
        frames = num_chunks if merges_time else self.t
        return frames * self.h * self.w // merge_size**2


@dataclass(frozen=True, repr=False)
class PreprocessOptions:
    """Per-item overrides of the checkpoint's processor settings; ``None`` keeps the checkpoint's value."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_patches: int | None = None
    max_patches_per_side: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    def __repr__(self) -> str:
        return f"PreprocessOptions({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, int | float]:
        """The overrides that are set, by field name, in field order. fps is a float, as on the wire."""
        values: dict[str, int | float] = {
            name: value for name, value in vars(self).items() if value is not None
        }
        if "fps" in values:
            values["fps"] = float(values["fps"])
        return values
