"""Frames that a caller decoded, as a clip: an array of all of them, or those that were sampled already.

Owns the checks of such an array. Which of its frames are taken is ``clips``': of an array with a rate those
that the family samples, of one with timestamps all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from encoder_service.errors import ClipTooLarge, InvalidRequest, PixelTensorMismatch
from encoder_service.ingest.identity import dtype_name
from encoder_service.ingest.video_file import ClipHeader, check_frame_size
from encoder_service.ingest.video_rules import DEFAULT_SOURCE_FPS
from encoder_service.ingest.video_settings import ClipLimits
from encoder_service.types import FrameArray


class FramesClip:
    """See ``video_file.ClipSource``."""

    def __init__(self, frames_THWC: torch.Tensor, header: ClipHeader) -> None:
        self._frames_THWC = frames_THWC
        self.header = header

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        return (self._frames_THWC[index] for index in indices)

    def stop(self) -> None:
        """Nothing is decoded."""

    def close(self) -> None:
        """The array is its owner's."""


def open_frames(content: FrameArray, limits: ClipLimits) -> FramesClip:
    """Raises PixelTensorMismatch for another shape or dtype, InvalidRequest for a rate or timestamps without
    meaning, ClipTooLarge, UndecodableClip."""
    frames = content.frames_THWC
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[3] != 3 or not frames.shape[0]:
        raise PixelTensorMismatch(
            f"frames are {dtype_name(frames.dtype)} {list(frames.shape)}, needed are uint8 "
            "[T, H, W, 3] with T of at least 1",
            found=list(frames.shape),
            needed="uint8 [T, H, W, 3]",
        )
    count, height, width, _ = frames.shape
    check_frame_size(width, height, limits)
    if count > limits.max_source_frames:
        raise ClipTooLarge(
            f"the clip has {count} frames, the limit is {limits.max_source_frames}",
            found=count,
            max_source_frames=limits.max_source_frames,
        )
    fps = DEFAULT_SOURCE_FPS if content.fps is None else content.fps
    if not (math.isfinite(fps) and fps > 0):
        raise InvalidRequest(f"frames have {fps} fps, needed is a finite number above 0", found=fps)
    if content.timestamps_s is not None:
        check_timestamps(content.timestamps_s, count, limits)
    elif count / fps > limits.max_duration_s:
        raise ClipTooLarge(
            f"the clip lasts {count / fps:.1f} s, the limit is {limits.max_duration_s:.1f} s",
            found_s=round(count / fps, 1),
            max_duration_s=limits.max_duration_s,
        )
    return FramesClip(frames, ClipHeader(count, fps, height, width, count / fps, "frames"))


def check_timestamps(timestamps_s: Sequence[float], num_frames: int, limits: ClipLimits) -> None:
    """One for each frame, ascending, from 0 to the longest clip. Raises InvalidRequest, ClipTooLarge."""
    if len(timestamps_s) != num_frames:
        raise InvalidRequest(
            f"there are {len(timestamps_s)} timestamps for {num_frames} frames, needed is one for each",
            found=len(timestamps_s),
            needed=num_frames,
        )
    previous_s = 0.0
    for place, at_s in enumerate(timestamps_s):
        if not (math.isfinite(at_s) and at_s >= previous_s):
            raise InvalidRequest(
                f"timestamp {place} is {at_s} s, needed is a finite number of at least {previous_s} s",
                found=at_s,
                needed=previous_s,
            )
        previous_s = at_s
    if previous_s > limits.max_duration_s:
        raise ClipTooLarge(
            f"the clip lasts {previous_s:.1f} s, the limit is {limits.max_duration_s:.1f} s",
            found_s=round(previous_s, 1),
            max_duration_s=limits.max_duration_s,
        )
