"""A clip from its content to the pieces that the tower is given.

Owns both families' plan for a clip (frames, timestamps, grid), the cut into pieces, and the reader that
decodes a piece at a time, so that a clip never lies in memory as a whole. Decoding is ``video_stream``'s, the
arithmetic ``video_rules``', settings ``video_settings``'.

Pieces are exact. Qwen's tower attends within one temporal patch, so that a clip may be cut between any two of
them; Kimi's attends within a chunk, which is therefore a piece. Each frame is resized by itself, as in the
reference, where frames are a dimension of the batch.

Shape suffixes: T frames, H height, W width, C channels.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from encoder_service.errors import ClipTooLarge, InvalidOption, UndecodableClip
from encoder_service.ingest.frames import resize_bicubic
from encoder_service.ingest.moonvit import PatchLimits, limited_size
from encoder_service.ingest.settings import MoonViTSettings, QwenVLSettings
from encoder_service.ingest.video_file import ClipHeader, ClipSource, open_clip
from encoder_service.ingest.video_frames import open_frames
from encoder_service.ingest.video_rules import (
    moonvit_indices,
    qwen_indices,
    qwen_target_size,
    timestamps_of,
)
from encoder_service.ingest.video_settings import ClipLimits, MoonViTVideoSettings, QwenVideoSettings
from encoder_service.types import EncodedFile, FrameArray, FrameItem, Grid, PreprocessOptions

MAX_FPS = 1000.0


@dataclass(frozen=True)
class ClipPlan:
    """What becomes of a clip. indices: frames of the source that are taken; timestamps_s: of each of them;
    grid: of the whole clip; chunk_grids: of its chunks where rows are averaged over the frames of one, else
    none; height, width: of a frame before padding, in pixels."""

    indices: tuple[int, ...]
    timestamps_s: tuple[float, ...]
    grid: Grid
    height: int
    width: int
    chunk_grids: tuple[Grid, ...] = ()


class ClipPreprocessor(abc.ABC):
    """One family's rules for clips with one checkpoint's settings. Stateless and thread-safe.

    Attributes a subclass sets: taken_options; rules, their version. merge_pixels: sides of padded frames are
    its multiples.
    """

    taken_options: ClassVar[tuple[str, ...]]
    rules: ClassVar[str]
    limits: ClipLimits
    patch_size: int
    merge_pixels: int

    @property
    @abc.abstractmethod
    def described(self) -> dict[str, object]:
        """What enters the fingerprint of the settings."""

    @abc.abstractmethod
    def check_values(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption for values that are out of bounds or contradict each other; only taken options
        are given."""

    @abc.abstractmethod
    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        """Which frames of a source are taken, ascending."""

    @abc.abstractmethod
    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        """The plan for so many frames of this size, without their indices and timestamps. Raises
        AspectRatioExceeded."""

    @abc.abstractmethod
    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        """Frames of one piece: as many as max_patches allow, at least those that are attended together."""

    @abc.abstractmethod
    def piece_grid(self, num_frames: int, plan: ClipPlan) -> Grid: ...

    def check_options(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption; only taken options are given."""
        bounds: dict[str, float] = {"fps": MAX_FPS, "min_frames": self.limits.max_frames}
        bounds["max_frames"] = self.limits.max_frames
        for name, ceiling in bounds.items():
            value = options.given().get(name)
            floor = 0 if name == "fps" else 1
            if value is not None and not (floor < value <= ceiling or value == floor == 1):
                least = "more than 0 and at most" if name == "fps" else "1 to"
                raise InvalidOption(
                    f"{name} is {value}, allowed are {least} {ceiling:g}",
                    option=name,
                    found=value,
                    allowed=ceiling,
                )
        self.check_values(options)

    def open(self, content: EncodedFile | FrameArray, options: PreprocessOptions) -> Clip:
        """The clip, planned; of a file one frame is decoded. Raises UndecodableClip, ClipTooLarge,
        AspectRatioExceeded, PixelTensorMismatch, InvalidOption."""
        self.check_options(options)
        timestamps_s: Sequence[float] | None = None
        source: ClipSource
        if isinstance(content, EncodedFile):
            source = open_clip(content.data, self.limits)
        else:
            source, timestamps_s = open_frames(content, self.limits), content.timestamps_s
        try:
            return Clip(self, source, self.plan(source.header, options, timestamps_s))
        except BaseException:
            source.close()
            raise

    def plan(
        self,
        header: ClipHeader,
        options: PreprocessOptions,
        timestamps_s: Sequence[float] | None = None,
    ) -> ClipPlan:
        """timestamps_s: of every frame of a source that was sampled before: all are taken. Raises
        ClipTooLarge,
        AspectRatioExceeded."""
        if timestamps_s is None:
            indices = self.sample(header, options)
            timestamps_s = timestamps_of(indices, header.fps)
        else:
            indices = list(range(header.num_frames))
        if len(indices) > self.limits.max_frames:
            raise ClipTooLarge(
                f"{len(indices)} frames of the clip are to be taken, the limit is {self.limits.max_frames}",
                found=len(indices),
                max_frames=self.limits.max_frames,
            )
        plan = self.sized(len(indices), header.height, header.width, options)
        return dataclasses.replace(plan, indices=tuple(indices), timestamps_s=tuple(timestamps_s))

    def fit(self, image_HWC: torch.Tensor, plan: ClipPlan) -> torch.Tensor:
        """uint8 [H, W, 3] resized, and padded with black to the right and below where the family pads."""
        resized_HWC = resize_bicubic(image_HWC, plan.height, plan.width)
        right = plan.grid.w * self.patch_size - plan.width
        below = plan.grid.h * self.patch_size - plan.height
        return (
            torch.nn.functional.pad(resized_HWC, (0, 0, 0, right, 0, below))
            if right or below
            else resized_HWC
        )


class Clip:
    """A clip that is open, to be read piece by piece, by one thread at a time; closed by any, at any time.
    decode_ms, resize_ms: spent so far."""

    def __init__(self, rules: ClipPreprocessor, source: ClipSource, plan: ClipPlan) -> None:
        self.plan = plan
        self.decode_ms = self.resize_ms = 0.0
        self._rules = rules
        self._source = source
        self._frames: Iterator[torch.Tensor] = iter(source.frames(plan.indices))
        self._left = len(plan.indices)
        self._guard = threading.Lock()
        self._is_reading = self._is_closed = False

    def piece_grids(self, max_patches: int) -> list[Grid]:
        """Grids of the pieces to come, in order."""
        size = self._rules.piece_frames(self.plan, max_patches)
        counts = [min(size, self._left - start) for start in range(0, self._left, size)]
        return [self._rules.piece_grid(count, self.plan) for count in counts]

    def read_piece(self, max_patches: int) -> FrameItem | None:
        """The next piece, decoded and resized; None after the last, or once closed. Raises UndecodableClip,
        ClipTooLarge."""
        with self._guard:
            if self._is_closed:
                return None
            self._is_reading = True
        try:
            return self._read_piece(max_patches)
        except UndecodableClip:
            if self._is_closed:
                return None
            raise
        finally:
            with self._guard:
                self._is_reading = False
                is_over = self._is_closed or not self._left
            if is_over:
                self._source.close()

    def _read_piece(self, max_patches: int) -> FrameItem | None:
        count = min(self._rules.piece_frames(self.plan, max_patches), self._left)
        if not count:
            return None
        plan, patch_size = self.plan, self._rules.patch_size
        frames_THWC = torch.empty(
            (count, plan.grid.h * patch_size, plan.grid.w * patch_size, 3), dtype=torch.uint8
        )
        started_s = time.perf_counter()
        for place, image_HWC in enumerate(itertools.islice(self._frames, count)):
            if self._is_closed:
                return None
            decoded_s = time.perf_counter()
            frames_THWC[place] = self._rules.fit(image_HWC, plan)
            resized_s = time.perf_counter()
            self.decode_ms += (decoded_s - started_s) * 1e3
            self.resize_ms += (resized_s - decoded_s) * 1e3
            started_s = resized_s
        if self._is_closed:
            return None  # stopped: what is not decoded is not in there
        self._left -= count
        return FrameItem(frames_THWC, self._rules.piece_grid(count, plan))

    def close(self) -> None:
        """Gives back what is open; nothing more is read. Whoever reads meanwhile stops between two frames and
        gets None. Twice is once."""
        with self._guard:
            self._is_closed = True
            is_reading = self._is_reading
        if is_reading:
            self._source.stop()
        else:
            self._source.close()


class QwenClips(ClipPreprocessor):
    """Qwen3-VL and Qwen3.5."""

    rules = "qwen_video.1"  # raise when the same settings give other pixels
    taken_options = ("min_pixels", "max_pixels", "fps", "min_frames", "max_frames")

    def __init__(self, settings: QwenVideoSettings, images: QwenVLSettings, limits: ClipLimits) -> None:
        self.settings = settings
        self.limits = limits
        self.patch_size = images.patch_size
        self.merge_pixels = images.patch_size * images.merge_size
        self._temporal = images.temporal_patch_size

    @property
    def described(self) -> dict[str, object]:
        return {"rules": self.rules, "settings": dataclasses.asdict(self.settings)}

    def check_values(self, options: PreprocessOptions) -> None:
        self.with_options(options)

    def with_options(self, options: PreprocessOptions) -> QwenVideoSettings:
        """The checkpoint's settings with the request's in their place where given. Raises InvalidOption."""
        given: dict[str, Any] = options.given()
        settings = dataclasses.replace(self.settings, **given)
        for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
            least, most = getattr(settings, low), getattr(settings, high)
            if least < 1:
                raise InvalidOption(f"{low} is {least}, needs at least 1", option=low, found=least)
            if least > most:
                raise InvalidOption(
                    f"{low} {least} is above {high} {most} (an absent one is the checkpoint's)",
                    **{low: least, high: most},
                )
        return settings

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return qwen_indices(
            header.num_frames,
            header.fps,
            fps=settings.fps,
            min_frames=settings.min_frames,
            max_frames=settings.max_frames,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        target_height, target_width = qwen_target_size(
            num_frames,
            height,
            width,
            factor=self.merge_pixels,
            temporal=self._temporal,
            settings=self.with_options(options),
        )
        grid = Grid(
            -(-num_frames // self._temporal),
            target_height // self.patch_size,
            target_width // self.patch_size,
        )
        return ClipPlan((), (), grid, target_height, target_width)

    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        return max(1, max_patches // (plan.grid.h * plan.grid.w)) * self._temporal

    def piece_grid(self, num_frames: int, plan: ClipPlan) -> Grid:
        return Grid(-(-num_frames // self._temporal), plan.grid.h, plan.grid.w)


class MoonViTClips(ClipPreprocessor):
    """Kimi-K2.5 and K2.6: frames keep their size up to a patch budget of each, and are averaged by chunks."""

    rules = "moonvit_video.1"  # raise when the same settings give other pixels
    taken_options = ("max_patches", "max_patches_per_side", "fps", "max_frames")

    @property
    def chunk_limits(self) -> tuple[int, PatchLimits]:
        """Frames that are attended together, and the limits of each."""
        settings = self.settings
        return settings.chunk_frames, PatchLimits(settings.max_patches, settings.max_patches_per_side)

    def __init__(self, settings: MoonViTVideoSettings, images: MoonViTSettings, limits: ClipLimits) -> None:
        self.settings = settings
        self.limits = limits
        self.patch_size = images.patch_size
        self.merge_pixels = images.patch_size * images.merge_size
        self._merge_size = images.merge_size

    @property
    def described(self) -> dict[str, object]:
        return {"rules": self.rules, "settings": dataclasses.asdict(self.settings)}

    def check_values(self, options: PreprocessOptions) -> None:
        self.with_options(options)

    def with_options(self, options: PreprocessOptions) -> MoonViTVideoSettings:
        """The checkpoint's settings with the request's in their place where given. Raises InvalidOption."""
        given: dict[str, Any] = options.given()
        settings = dataclasses.replace(self.settings, **given)
        # The side's ceiling is the checkpoint's: the tower's rotary table ends there.
        ceilings = {
            "max_patches": max(self.limits.max_frame_pixels // self.patch_size**2, self.settings.max_patches),
            "max_patches_per_side": self.settings.max_patches_per_side,
        }
        for name, ceiling in ceilings.items():
            value = getattr(settings, name)
            if not 1 <= value <= ceiling:
                raise InvalidOption(
                    f"{name} is {value}, allowed are 1 to {ceiling}",
                    option=name,
                    found=value,
                    allowed=ceiling,
                )
        return settings

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return moonvit_indices(
            header.num_frames, header.fps, fps=settings.fps, max_frames=settings.max_frames
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        settings = self.with_options(options)
        limits = PatchLimits(settings.max_patches, settings.max_patches_per_side)
        target_height, target_width = limited_size(height, width, self.patch_size, limits)
        grid_h, grid_w = (
            -(-side // self.merge_pixels) * self._merge_size for side in (target_height, target_width)
        )
        chunk = self.settings.chunk_frames
        chunks = tuple(
            Grid(min(chunk, num_frames - start), grid_h, grid_w) for start in range(0, num_frames, chunk)
        )
        return ClipPlan((), (), Grid(num_frames, grid_h, grid_w), target_height, target_width, chunks)

    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        del plan, max_patches
        return self.settings.chunk_frames

    def piece_grid(self, num_frames: int, plan: ClipPlan) -> Grid:
        return Grid(num_frames, plan.grid.h, plan.grid.w)
