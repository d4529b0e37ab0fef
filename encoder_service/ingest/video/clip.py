"""A clip, from its content to the pieces that the tower takes.

Owns opening a clip, its plan (frames, timestamps, grid), and decoding one piece at a time, so that decoding
overlaps with the tower and memory does not grow with the clip's length. The families' rules for sampling,
sizes and pieces are subclasses of ``ClipRules`` in ``qwen_vl`` and ``moonvit``.

Cutting a clip into pieces does not change its rows. Qwen's tower attends within one temporal patch, so a clip
may be cut between any two of them. Kimi's tower attends within a chunk, which is one piece. Each frame is
resized by itself, as in the reference.

Shape suffixes: T frames, H height, W width, C channels.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from encoder_service.errors import ClipTooLarge, InvalidOption, UndecodableClip
from encoder_service.ingest.decode import Transparent
from encoder_service.ingest.resize import resize_and_pad, resize_bytes
from encoder_service.ingest.settings import Settings
from encoder_service.ingest.video.boxes import check_tables
from encoder_service.ingest.video.container import check_whole, container_of, gif_pictures
from encoder_service.ingest.video.source import ClipHeader, ClipLimits, ClipSource, FramesClip
from encoder_service.types import EncodedFile, FrameArray, FrameItem, Grid, PreprocessOptions

MAX_FPS = 1000.0


def open_source(data: bytes, limits: ClipLimits, transparent: Transparent = "white") -> ClipSource:
    """Opens a clip file and decodes its first frame. transparent: how alpha is handled, see ``decode``.
    Raises UndecodableClip; ClipTooLarge with the number found and the number allowed."""
    if len(data) > limits.max_encoded_bytes:
        raise ClipTooLarge(
            f"the clip file has {len(data)} bytes, the limit is {limits.max_encoded_bytes}",
            found_bytes=len(data),
            max_encoded_bytes=limits.max_encoded_bytes,
        )
    container = container_of(data)
    check_whole(data, container)
    if container == "mov":
        check_tables(data, limits.max_source_frames)
    if container == "gif":
        data = gif_pictures(data)
    # Imported here, because PyAV loads slowly and a service that only sees images does not need it.
    from encoder_service.ingest.video.av_file import AvFile

    return AvFile(data, container, limits, transparent)


@dataclass(frozen=True)
class ClipPlan:
    """How a clip is sampled and resized. indices: the sampled frames of the source. timestamps_s: one per
    sampled frame. grid: of the whole clip. height, width: of a frame before padding, in pixels. chunk_grids:
    grids of the clip's chunks if the family averages rows over the frames of a chunk; otherwise empty."""

    indices: tuple[int, ...]
    timestamps_s: tuple[float, ...]
    grid: Grid
    height: int
    width: int
    chunk_grids: tuple[Grid, ...] = ()


class ClipRules(abc.ABC):
    """One family's rules for clips with one checkpoint's settings. Stateless and thread-safe.

    rules: version of the rules in the code. options: names of the accepted overrides. limits: limits of a
    clip. patch_size: pixels of a patch's side. transparent: how alpha of a file's frames is handled.
    """

    rules: ClassVar[str]
    options: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        settings: Settings,
        limits: ClipLimits,
        patch_size: int,
        transparent: Transparent,
    ) -> None:
        self.limits = limits
        self.patch_size = patch_size
        self.transparent = transparent
        # The part of the settings that the fingerprint covers.
        self.described: dict[str, object] = {"rules": self.rules, "settings": dataclasses.asdict(settings)}
        if transparent != "drop":
            self.described["transparent"] = transparent

    @abc.abstractmethod
    def check_values(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption for values that are out of bounds or contradict each other."""

    @abc.abstractmethod
    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        """Indices of the sampled frames, ascending; one may repeat."""

    @abc.abstractmethod
    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        """The plan for num_frames frames of this size, without indices and timestamps. Raises
        AspectRatioExceeded."""

    @abc.abstractmethod
    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        """Frames of one piece: as many as fit max_patches, but never fewer than attend to each other."""

    @abc.abstractmethod
    def depth(self, num_frames: int) -> int:
        """Number of patches along time for num_frames frames."""

    def times_s(self, indices: Sequence[int], header: ClipHeader) -> tuple[float, ...]:
        """The timestamps of sampled frames: the index divided by the source's rate, as
        ``VideoMetadata.timestamps`` of the reference."""
        return timestamps_of(indices, header.fps)

    def check_options(self, options: PreprocessOptions) -> None:
        """Raises InvalidOption for a value out of bounds. Expects only overrides named in ``options``."""
        bounds = {"fps": MAX_FPS, "min_frames": self.limits.max_frames, "max_frames": self.limits.max_frames}
        for name, ceiling in bounds.items():
            value = options.given().get(name)
            is_rate = name == "fps"
            if value is not None and not (value <= ceiling and (value > 0 if is_rate else value >= 1)):
                least = "more than 0 and at most" if is_rate else "1 to"
                raise InvalidOption(
                    f"{name} is {value}, allowed are {least} {ceiling:g}",
                    option=name,
                    found=value,
                    allowed=ceiling,
                )
        self.check_values(options)

    def open(self, content: EncodedFile | FrameArray, options: PreprocessOptions) -> Clip:
        """Opens and plans a clip. Decodes one frame of a file. Raises UndecodableClip, ClipTooLarge,
        AspectRatioExceeded, PixelTensorMismatch, InvalidRequest."""
        timestamps_s: Sequence[float] | None = None
        source: ClipSource
        if isinstance(content, EncodedFile):
            source = open_source(content.data, self.limits, self.transparent)
        else:
            source, timestamps_s = FramesClip(content, self.limits), content.timestamps_s
        try:
            return Clip(self, source, self.plan(source.header, options, timestamps_s))
        except BaseException:
            source.close()
            raise

    def plan(
        self, header: ClipHeader, options: PreprocessOptions, timestamps_s: Sequence[float] | None = None
    ) -> ClipPlan:
        """The plan of a clip. timestamps_s: one per frame for a clip that is already sampled, of which all
        frames are used. Otherwise the family samples and states the times. Raises ClipTooLarge,
        AspectRatioExceeded."""
        if timestamps_s is None:
            indices = self.sample(header, options)
            timestamps_s = self.times_s(indices, header)
        else:
            indices = list(range(header.num_frames))
        if len(indices) > self.limits.max_frames:
            raise ClipTooLarge(
                f"{len(indices)} frames of the clip would be taken, the limit is {self.limits.max_frames}",
                found=len(indices),
                max_frames=self.limits.max_frames,
            )
        plan = self.sized(len(indices), header.height, header.width, options)
        return dataclasses.replace(plan, indices=tuple(indices), timestamps_s=tuple(timestamps_s))


def _repeated(frames: Iterator[torch.Tensor], indices: Sequence[int]) -> Iterator[torch.Tensor]:
    """The frames at ``indices``, of which neighbours may be equal. frames: those at the different ones."""
    for frame, (_, group) in zip(frames, itertools.groupby(indices), strict=False):  # a source may be stopped
        for _ in group:
            yield frame


def timestamps_of(indices: Sequence[int], source_fps: float) -> tuple[float, ...]:
    """The times of frames in seconds, from their indices in the source."""
    return tuple(index / source_fps for index in indices)


class Clip:
    """An open clip. One thread at a time reads it. Any thread may close it at any time.

    plan: what is read of it. decode_ms, resize_ms: time spent so far. held_bytes: memory of the open decoder
    and of resizing one frame at most, without the file and the pieces.
    """

    def __init__(self, rules: ClipRules, source: ClipSource, plan: ClipPlan) -> None:
        """Raises ClipTooLarge if decoding would exceed the limit of decoded pixels."""
        self.plan = plan
        self.decode_ms = self.resize_ms = 0.0
        header, size = source.header, (plan.height, plan.width)
        padded = plan.grid.h * rules.patch_size, plan.grid.w * rules.patch_size
        self.held_bytes = source.held_bytes + resize_bytes(header.height, header.width, size, padded)
        self._rules = rules
        self._source = source
        self._frames = _repeated(source.frames(list(dict.fromkeys(plan.indices))), plan.indices)
        self._num_left = len(plan.indices)
        self._reading = threading.Lock()
        self._is_closed = False

    def pieces(self, max_patches: int) -> Iterator[FrameItem]:
        """The remaining pieces. The thread that takes a piece from the iterator decodes and resizes it. Ends
        early once the clip is closed. max_patches: limit of a piece; frames that are attended together stay
        in one piece even if they exceed it. Raises UndecodableClip, ClipTooLarge."""
        return iter(functools.partial(self._read_piece, max_patches), None)

    def close(self) -> None:
        """Ends reading and releases the source: at once, or when a thread that is reading reaches its next
        frame. Idempotent."""
        self._is_closed = True
        self._source.stop()
        if self._reading.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._reading.release()

    def _read_piece(self, max_patches: int) -> FrameItem | None:
        """The next piece; None after the last, or once closed."""
        with self._reading:
            try:
                piece = None if self._is_closed else self._decode_piece(max_patches)
            except UndecodableClip:
                if not self._is_closed:
                    raise
                piece = None
        if self._is_closed or not self._num_left:
            self.close()
        return piece

    def _decode_piece(self, max_patches: int) -> FrameItem | None:
        plan, patch_size = self.plan, self._rules.patch_size
        count = min(self._rules.piece_frames(plan, max_patches), self._num_left)
        if not count:
            return None
        height, width = plan.grid.h * patch_size, plan.grid.w * patch_size
        frames_THWC = torch.empty((count, height, width, 3), dtype=torch.uint8)
        started_s = time.perf_counter()
        for index, image_HWC in enumerate(itertools.islice(self._frames, count)):
            decoded_s = time.perf_counter()
            frames_THWC[index] = resize_and_pad(image_HWC, (plan.height, plan.width), (height, width))
            resized_s = time.perf_counter()
            self.decode_ms += (decoded_s - started_s) * 1e3
            self.resize_ms += (resized_s - decoded_s) * 1e3
            started_s = resized_s
            if self._is_closed:
                return None
        if self._is_closed:
            return None  # stopped: frames may be missing
        self._num_left -= count
        return FrameItem(frames_THWC, plan.grid._replace(t=self._rules.depth(count)))
