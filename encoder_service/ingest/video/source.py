"""The interface of sources of frames, the limits of all clips, and clips given as arrays of frames.

Owns ``ClipSource``, the limits of clips, the translation of decoders' exceptions, and ``FramesClip``, a clip
that the caller decoded. ``av_file`` reads files, ``clip`` opens them.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from encoder_service.config import MIB, Settings
from encoder_service.errors import (
    ClipTooLarge,
    InvalidRequest,
    PixelTensorMismatch,
    UndecodableClip,
    VisionEncoderError,
)
from encoder_service.ingest.cores import decoder_threads
from encoder_service.types import FrameArray

# The rate of a clip that states none: the default of the reference processors.
DEFAULT_SOURCE_FPS = 24.0


@dataclass(frozen=True)
class ClipLimits:
    """Limits of one clip.

    max_encoded_bytes: size of the file. max_frame_pixels: width times height of a frame. max_duration_s,
    max_source_frames: of the source, independent of sampling. max_decoded_pixels: sum over all frames that
    have to be decoded for the sampled ones. max_frames: number of sampled frames. decode_threads: threads of
    one clip's decoder.
    """

    max_encoded_bytes: int = 256 * MIB
    max_frame_pixels: int = 64_000_000
    max_duration_s: float = 7200.0
    max_source_frames: int = 1_000_000
    max_decoded_pixels: int = 250_000_000_000
    max_frames: int = 2048
    decode_threads: int = 1


def clip_limits(settings: Settings, max_frame_pixels: int, num_workers: int) -> ClipLimits:
    """The limits that the service's settings give. num_workers: threads that decode and resize images."""
    return ClipLimits(
        max_encoded_bytes=settings.max_clip_bytes,
        max_frame_pixels=max_frame_pixels,
        max_decoded_pixels=settings.max_clip_decoded_pixels,
        decode_threads=decoder_threads(num_workers),
    )


@dataclass(frozen=True)
class ClipHeader:
    """A clip before sampling. num_frames: frames that it shows. fps: their average rate. height, width:
    upright, in pixels."""

    num_frames: int
    fps: float
    height: int
    width: int


class ClipSource(Protocol):
    """An open clip. One thread at a time uses it, not always the same one. Any thread may call ``stop``."""

    header: ClipHeader
    held_bytes: int  # by the open source and one of its frames at most, without the file

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """The frames at these ascending indices as uint8 [H, W, 3]. The call raises ClipTooLarge if decoding
        would exceed the limit. Iterating raises UndecodableClip, ClipTooLarge."""

    def stop(self) -> None:
        """Makes a running iteration end soon, either early or with UndecodableClip."""

    def close(self) -> None:
        """Releases the source. Idempotent."""


@contextlib.contextmanager
def decoder_errors(num_bytes: int, name: str) -> Iterator[None]:
    """Translates every exception of a decoder into UndecodableClip. Decoders raise almost anything for
    hostile bytes, so the block must hold only calls of decoders. name: the container's name, for messages."""
    try:
        yield
    except VisionEncoderError:
        raise
    except Exception as error:
        raise UndecodableClip(
            f"the {name} file of {num_bytes} bytes is damaged or of an unsupported kind: {_cause(error)}",
            container=name,
            found_bytes=num_bytes,
        ) from error


# What FFmpeg means by the system's error numbers.
_CAUSES = {
    errno.EPERM: "a frame depends on frames that the file does not have",
    errno.EINVAL: "a field has a value that is not allowed",
    errno.ENOMEM: "it takes more memory than a decoder may use",
    errno.EIO: "it ends within a frame, or an offset leads outside of it",
    errno.EAGAIN: "a decoder gives no frame",
    errno.ENOENT: "it refers to another file",
    errno.ERANGE: "a number is out of range",
    errno.EDOM: "a number is out of range",
    errno.ENOSYS: "it uses a feature that the decoder lacks",
}


def _cause(error: Exception) -> str:
    """What is wrong with a file, in words."""
    text = getattr(error, "strerror", None) or str(error)
    name = type(error).__name__
    if text == "Invalid data found when processing input":
        return "its data cannot be decoded"
    if text == "End of file":
        return "it ends too early"
    if text.startswith("Not yet implemented in FFmpeg") or name in ("PatchWelcomeError", "ExperimentalError"):
        return _CAUSES[errno.ENOSYS]
    if text.startswith(("Internal bug", "Unknown error", "Generic error")) or not text:
        return f"the decoder failed ({name})"
    return _CAUSES.get(getattr(error, "errno", None) or 0, text)


def check_num_frames(num_frames: int, limits: ClipLimits) -> None:
    limit = limits.max_source_frames
    if num_frames > limit:
        raise ClipTooLarge(
            f"the clip has at least {num_frames} frames, the limit is {limit}",
            found=num_frames,
            max_source_frames=limit,
        )


def check_duration(duration_s: float, limits: ClipLimits) -> None:
    limit_s = limits.max_duration_s
    if duration_s > limit_s:
        raise ClipTooLarge(
            f"the clip lasts {duration_s:.1f} s, the limit is {limit_s:.1f} s",
            found_s=round(duration_s, 1),
            max_duration_s=limit_s,
        )


def check_frame_size(width: int, height: int, limits: ClipLimits) -> None:
    """Raises UndecodableClip for a side of 0, ClipTooLarge for too many pixels."""
    found, limit = width * height, limits.max_frame_pixels
    if found < 1:
        raise UndecodableClip(f"the clip's frames are {width}x{height}, each side needs at least 1")
    if found > limit:
        raise ClipTooLarge(
            f"the clip's frames are {width}x{height} = {found} pixels, the limit is {limit}",
            found_pixels=found,
            max_frame_pixels=limit,
        )


def check_decoded_pixels(num_frames: int, width: int, height: int, limits: ClipLimits) -> None:
    """num_frames: all frames that have to be decoded, sampled or not. Raises ClipTooLarge."""
    found, limit = num_frames * width * height, limits.max_decoded_pixels
    if found > limit:
        raise ClipTooLarge(
            f"decoding the clip takes {num_frames} frames = {found} pixels, the limit is {limit}",
            found_pixels=found,
            max_decoded_pixels=limit,
        )


class FramesClip:
    """A ClipSource for an array of frames."""

    def __init__(self, content: FrameArray, limits: ClipLimits) -> None:
        """Raises PixelTensorMismatch for another shape or dtype, InvalidRequest for a rate or timestamps that
        are out of range or order, ClipTooLarge, UndecodableClip."""
        frames = content.frames_THWC
        if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[3] != 3 or not frames.shape[0]:
            raise PixelTensorMismatch(
                f"frames are {str(frames.dtype).removeprefix('torch.')} {list(frames.shape)}, "
                "needed are uint8 [T, H, W, 3] with T of at least 1; alpha is not taken",
                found=list(frames.shape),
                needed="uint8 [T, H, W, 3]",
            )
        num_frames, height, width, _ = frames.shape
        timestamps_s = content.timestamps_s
        if timestamps_s is not None:
            _check_timestamps(timestamps_s, num_frames)
        fps = DEFAULT_SOURCE_FPS if content.fps is None else content.fps
        if not (math.isfinite(fps) and fps > 0):
            raise InvalidRequest(f"frames have {fps} fps, needed is a finite number above 0", found=fps)
        self._frames_THWC = frames
        self.held_bytes = 0  # the array is the caller's
        self.header = ClipHeader(num_frames, fps, height, width)
        check_frame_size(width, height, limits)
        check_num_frames(num_frames, limits)
        check_duration(num_frames / fps if timestamps_s is None else timestamps_s[-1], limits)

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        return (self._frames_THWC[index] for index in indices)

    def stop(self) -> None:
        """Does nothing, because nothing is decoded."""

    def close(self) -> None:
        """Does nothing, because the array belongs to the caller."""


def _check_timestamps(timestamps_s: Sequence[float], num_frames: int) -> None:
    """Checks that there is one timestamp per frame, ascending from 0. Raises InvalidRequest."""
    if len(timestamps_s) != num_frames:
        raise InvalidRequest(
            f"there are {len(timestamps_s)} timestamps for {num_frames} frames, needed is one for each",
            found=len(timestamps_s),
            needed=num_frames,
        )
    for index, (previous_s, at_s) in enumerate(pairwise([0.0, *timestamps_s])):
        if not (math.isfinite(at_s) and at_s >= previous_s):
            raise InvalidRequest(
                f"timestamp {index} is {at_s} s, needed is a finite number of at least {previous_s} s",
                found=at_s,
                needed=previous_s,
            )
