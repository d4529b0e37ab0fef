"""Clip files, whatever reads them: what opens one, and what is known of it before a frame is decoded.

Owns the limits that hold for every file and the one place where decoders' exceptions become ours. MP4, WebM,
Matroska and GIF are ``video_stream``'s, which is imported with the first such clip: PyAV takes a while to
load, and a service that sees images alone never needs it. Animated WebP is ``video_webp``'s, what the first
bytes and the tables of a file say ``video_container``'s and ``video_tables``'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from encoder_service.errors import ClipTooLarge, UndecodableClip, UnsupportedContent, VisionEncoderError
from encoder_service.ingest.video_container import CONTAINER_NAMES, check_whole, container_of
from encoder_service.ingest.video_fragments import check_fragments
from encoder_service.ingest.video_settings import ClipLimits
from encoder_service.ingest.video_tables import check_tables


@dataclass(frozen=True)
class ClipHeader:
    """What is known of a clip before a frame is decoded. num_frames: that it shows; fps: of them, on average;
    height, width: upright, in pixels; container: for people to read."""

    num_frames: int
    fps: float
    height: int
    width: int
    duration_s: float
    container: str


class ClipSource(Protocol):
    """A clip whose frames can be asked for. Used by one thread at a time, not always the same."""

    header: ClipHeader

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """The frames at these places, ascending, as uint8 [H, W, 3], one by one. Raises ClipTooLarge at the
        call where decoding takes too much; as frames are asked for UndecodableClip, ClipTooLarge."""

    def stop(self) -> None:
        """From any thread: whoever decodes meanwhile ends soon, with fewer frames or UndecodableClip."""

    def close(self) -> None:
        """Gives back what is open. Twice is once."""


def open_clip(data: bytes, limits: ClipLimits) -> ClipSource:
    """Reads as much of a clip as its header needs; no frame is decoded of a WebP, one of others. Raises
    UndecodableClip, ClipTooLarge with the number found and the number allowed, UnsupportedContent where the
    package that reads such files is missing."""
    if len(data) > limits.max_encoded_bytes:
        raise ClipTooLarge(
            f"the clip file has {len(data)} bytes, the limit is {limits.max_encoded_bytes}",
            found_bytes=len(data),
            max_encoded_bytes=limits.max_encoded_bytes,
        )
    container = container_of(data)
    check_whole(data, container)
    if container == "webp":
        from encoder_service.ingest.video_webp import WebPClip

        return WebPClip(data, limits)
    if container == "mov":
        check_tables(data, limits.max_source_frames)
        check_fragments(data)
    try:
        from encoder_service.ingest.video_stream import StreamClip
    except ImportError as error:
        raise UnsupportedContent(
            f"{CONTAINER_NAMES[container]} clips are read by the package av, which cannot be imported here: "
            f"{error}",
            package="av",
        ) from error
    return StreamClip(data, container, limits)


@contextlib.contextmanager
def decoder_errors(num_bytes: int, name: str) -> Iterator[None]:
    """The one place where what a decoder raises becomes an error of ours: fed hostile bytes, it raises almost
    anything, and all of it is the file's fault. Keep the block to its calls."""
    try:
        yield
    except VisionEncoderError:
        raise
    except MemoryError as error:
        raise UndecodableClip(
            f"the {name} file of {num_bytes} bytes asks its decoder for more memory than it gets",
            container=name,
        ) from error
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UndecodableClip(
            f"the {name} file of {num_bytes} bytes is damaged or of an unsupported kind: {said}",
            container=name,
            found_bytes=num_bytes,
        ) from error


def check_frame_size(width: int, height: int, limits: ClipLimits) -> None:
    """Raises UndecodableClip for a side of 0, ClipTooLarge."""
    if min(width, height) < 1:
        raise UndecodableClip(f"the clip's frames are {width}x{height}, each side needs at least 1")
    if width * height > limits.max_frame_pixels:
        raise ClipTooLarge(
            f"the clip's frames are {width}x{height} = {width * height} pixels, the limit is "
            f"{limits.max_frame_pixels}",
            found_pixels=width * height,
            max_frame_pixels=limits.max_frame_pixels,
        )


def check_decoded_pixels(num_frames: int, width: int, height: int, limits: ClipLimits) -> None:
    """num_frames: that are decoded, whether or not anybody wants them. Raises ClipTooLarge."""
    found = num_frames * width * height
    if found > limits.max_decoded_pixels:
        raise ClipTooLarge(
            f"decoding the clip takes {num_frames} frames = {found} pixels, the limit is "
            f"{limits.max_decoded_pixels}",
            found_pixels=found,
            max_decoded_pixels=limits.max_decoded_pixels,
        )
