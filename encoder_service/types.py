"""The records that packages pass to each other: items, pixels, encoded rows and timings.

``vision_encoder.layout.items`` has the records that clients use too. Knows nothing of gRPC, files or devices.
Shape legend: P patches, R rows (visual tokens), D language-model width, L deepstack levels.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from vision_encoder.layout.items import Grid as Grid
from vision_encoder.layout.items import Modality as Modality
from vision_encoder.layout.items import PreprocessOptions as PreprocessOptions

DIGEST_BYTES = 32


@dataclass(frozen=True)
class EncodedFile:
    """The bytes of an image or video file."""

    data: bytes


@dataclass(frozen=True)
class PixelValues:
    """Pixels that the caller preprocessed.

    pixel_values: [P, ...] float tensor on the host. grid: as the caller states it.
    """

    pixel_values: torch.Tensor
    grid: Grid


@dataclass(frozen=True)
class FrameArray:
    """A clip that the caller decoded.

    frames_THWC: uint8 [T, H, W, 3] on the host. fps: frame rate of these frames, from which the family
    samples; None means the reference's default of 24. timestamps_s: one per frame, for a clip that the caller
    has already sampled; then every frame is used.
    """

    frames_THWC: torch.Tensor
    fps: float | None = None
    timestamps_s: tuple[float, ...] | None = None


@dataclass(frozen=True)
class DigestOnly:
    """No content: the rows come from the store or from an encode in progress, or the item fails."""


Content: TypeAlias = EncodedFile | PixelValues | FrameArray | DigestOnly


@dataclass(frozen=True)
class Item:
    """One image or clip of a request, as the pipeline sees it."""

    modality: Modality
    content: Content
    content_digest: bytes | None = None
    options: PreprocessOptions = field(default_factory=PreprocessOptions)


@dataclass(frozen=True)
class FrameItem:
    """Decoded, resized, padded pixels, not yet normalised or cut into patches.

    frames_THWC: uint8 [T, H, W, 3]; T counts frames (1 for an image), H and W are multiples of the
    patch size times the merge size. grid: the grid of the patches that these frames are cut into.
    """

    frames_THWC: torch.Tensor
    grid: Grid


@dataclass(frozen=True)
class PatchItem:
    """Patches ready for the tower. pixel_values: [P, patch_dim], float32 or the tower's dtype."""

    pixel_values: torch.Tensor
    grid: Grid


TowerItem: TypeAlias = FrameItem | PatchItem


class LoadedPixels(NamedTuple):
    """The pixels that a worker prepared from an item's content, and the time of each step."""

    item: TowerItem
    decode_ms: float
    resize_ms: float


@dataclass
class StageTimings:
    """Milliseconds of one item in each stage, as the wire contract defines the stages."""

    identify_ms: float = 0.0
    admit_ms: float = 0.0
    decode_ms: float = 0.0
    resize_ms: float = 0.0
    queue_ms: float = 0.0
    tower_ms: float = 0.0
    store_ms: float = 0.0
    total_ms: float = 0.0


class CacheTier(enum.Enum):
    MISS = "miss"
    IN_FLIGHT = "in_flight"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class RowsSpec:
    """The shape of one item's rows: num_rows rows of ``width`` = D * (1 + L) elements."""

    num_rows: int
    width: int
    dtype: torch.dtype
    num_deepstack_levels: int

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.num_rows * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class ClipFacts:
    """The facts about a clip that a prompt contains. timestamps_s: times of the sampled frames. chunk_grids:
    for a family that averages over frames, the grids of the chunks in the order of their rows; otherwise
    empty."""

    timestamps_s: tuple[float, ...]
    chunk_grids: tuple[Grid, ...] = ()


@dataclass(frozen=True)
class EncodedItem:
    """One item's visual tokens. rows: [R, D * (1 + L)], contiguous. clip: set for a clip that the service
    sampled or whose sender gave timestamps."""

    key: bytes
    content_digest: bytes
    grid: Grid
    rows: torch.Tensor
    num_deepstack_levels: int
    clip: ClipFacts | None = None

    @functools.cached_property
    def spec(self) -> RowsSpec:
        num_rows, width = self.rows.shape
        return RowsSpec(num_rows, width, self.rows.dtype, self.num_deepstack_levels)
