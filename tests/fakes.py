"""A tower and a preprocessor that cost nothing, for tests of everything around them."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence

import torch
from torch import nn

from encoder_service.errors import GridMismatch, InvalidOption, NonFinitePixels, UndecodableImage
from encoder_service.ingest.preprocessor import ImagePlan, OpenItem, Preprocessor
from encoder_service.towers.tower import Tower, TowerInputs
from encoder_service.types import (
    FrameItem,
    Grid,
    LoadedPixels,
    Modality,
    PatchItem,
    PixelValues,
    PreprocessOptions,
)

MERGE = 2
PATCH_DIM = 4
OUT_WIDTH = 8
LEVELS = 1


def fake_image(height: int, width: int, value: int = 7) -> bytes:
    """A file that FakePreprocessor reads: patches high, patches wide, one byte of colour."""
    return b"FAKE" + struct.pack("<IIB", height, width, value)


class FakePreprocessor(Preprocessor):
    """Reads ``fake_image``. ``gate``: cleared, it holds decoding until set again."""

    fingerprint = b"p" * 32
    patch_dim = PATCH_DIM

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_loads = 0
        self.num_opened = 0

    def check_options(self, modality: Modality, options: PreprocessOptions) -> None:
        if options.max_patches is not None:
            raise InvalidOption("max_patches is not an option of this family")

    def check_values(self, options: PreprocessOptions) -> None:
        pass

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        return ImagePlan((height, width), (height, width), Grid(1, height, width))

    @property
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((PATCH_DIM,),)

    def open_image(self, data: bytes, options: PreprocessOptions) -> OpenItem:
        self.num_opened += 1
        if data[:4] != b"FAKE":
            raise UndecodableImage("not a fake image")
        height, width, value = struct.unpack_from("<IIB", data, 4)
        grid = Grid(1, height, width)
        return OpenItem(grid, 8 * height * width, functools.partial(self._load, grid, value))

    def _load(self, grid: Grid, value: int) -> LoadedPixels:
        self.num_loads += 1
        assert self.gate.wait(30)
        frames = torch.full((1, grid.h, grid.w, 3), value, dtype=torch.uint8)
        return LoadedPixels(FrameItem(frames, grid), 1.0, 2.0)

    def check_pixels(self, pixels: PixelValues) -> PatchItem:
        if len(pixels.pixel_values) != pixels.grid.num_patches:
            raise GridMismatch(f"{len(pixels.pixel_values)} rows, grid needs {pixels.grid.num_patches}")
        if not pixels.pixel_values.isfinite().all():
            raise NonFinitePixels("pixel_values hold NaN")
        return PatchItem(pixels.pixel_values.float(), pixels.grid)

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        return frames_THWC.reshape(-1, 3)[:, :1].float().expand(-1, PATCH_DIM)


class FakeTower(Tower):
    """Rows are the mean pixel of their four patches, plus the level. A pixel of -1 poisons its batch."""

    family = "fake"
    patch_size = 1
    merge_size = MERGE
    temporal_patch_size = 1
    patch_dim = PATCH_DIM
    out_width = OUT_WIDTH
    num_deepstack_levels = LEVELS
    merges_time = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.batches: list[list[Grid]] = []
        self.num_entered = 0
        self.gate = threading.Event()
        self.gate.set()
        self.fails_with: Exception | None = None
        self._grids: list[Grid] = []

    def check_grid(self, grid: Grid) -> None:
        if grid.h % MERGE or grid.w % MERGE:
            raise GridMismatch(f"grid {tuple(grid)} has sides that are no multiple of {MERGE}")

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        num_patches = sum(grid.num_patches for grid in grids)
        self._grids = list(grids)
        empty = torch.zeros(num_patches, 1)
        return TowerInputs(
            position_index=empty.long(),
            position_weight=empty,
            rope_cos=empty,
            rope_sin=empty,
            cu_seqlens=torch.tensor([0, num_patches], dtype=torch.int32),
            seqlens=(num_patches,),
            max_seqlen=num_patches,
        )

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        self.num_entered += 1
        assert self.gate.wait(30)
        self.batches.append(self._grids)
        if self.fails_with is not None:
            raise self.fails_with
        pixels = inputs.pixel_values
        assert pixels is not None
        if (pixels == -1).any():
            raise RuntimeError("poisoned")
        main = pixels.reshape(-1, MERGE**2 * PATCH_DIM).mean(1, keepdim=True).expand(-1, OUT_WIDTH)
        return torch.cat([main, main + 1], dim=1)
