"""Animated WebP to RGB frames, through Pillow: FFmpeg reads single pictures alone.

Owns the count, the rate and the frames of such a file; limits and errors are ``video_file``'s.

A frame lasts as many milliseconds as the file says. The rate is the average over all of them, as it is of any
other clip. Alpha is dropped, as it is of images.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.headers import webp_canvas
from encoder_service.ingest.video_file import (
    ClipHeader,
    check_decoded_pixels,
    check_frame_size,
    decoder_errors,
)
from encoder_service.ingest.video_rules import DEFAULT_SOURCE_FPS
from encoder_service.ingest.video_settings import ClipLimits

NAME = "WebP"
MIN_CHUNKS = 1 << 16
STRIDE = 32  # frames that are decoded without a look at whether anybody still waits


class WebPClip:
    """A WebP file, animated or not. See ``video_file.ClipSource``."""

    def __init__(self, data: bytes, limits: ClipLimits) -> None:
        self._data = data
        self._limits = limits
        self._is_stopped = False
        canvas = webp_canvas(data)
        if canvas is None:
            raise UndecodableClip(f"the WebP file of {len(data)} bytes has no header that can be read")
        # Before Pillow sees it: its plugin allocates the canvas while opening.
        check_frame_size(canvas.width, canvas.height, limits)
        durations_ms = frame_durations_ms(data, max(MIN_CHUNKS, 4 * limits.max_source_frames))
        num_frames = max(1, len(durations_ms))
        if num_frames > limits.max_source_frames:
            raise ClipTooLarge(
                f"the clip has {num_frames} frames, the limit is {limits.max_source_frames}",
                found=num_frames,
                max_source_frames=limits.max_source_frames,
            )
        total_s = sum(durations_ms) / 1e3
        fps = num_frames / total_s if total_s else DEFAULT_SOURCE_FPS
        duration_s = num_frames / fps
        if duration_s > limits.max_duration_s:
            raise ClipTooLarge(
                f"the clip lasts {duration_s:.1f} s, the limit is {limits.max_duration_s:.1f} s",
                found_s=round(duration_s, 1),
                max_duration_s=limits.max_duration_s,
            )
        self.header = ClipHeader(num_frames, fps, canvas.height, canvas.width, duration_s, NAME)

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        # There are no key frames to start at.
        num_decoded = max(indices, default=-1) + 1
        check_decoded_pixels(num_decoded, self.header.width, self.header.height, self._limits)
        return self._frames(indices)

    def _frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        with (
            decoder_errors(len(self._data), NAME),
            Image.open(io.BytesIO(self._data), formats=("WEBP",)) as image,
        ):
            found = getattr(image, "n_frames", 1)
            if found != self.header.num_frames:
                raise UndecodableClip(
                    f"the WebP file promises {self.header.num_frames} frames and has {found}",
                    found=found,
                    needed=self.header.num_frames,
                )
            at = 0
            for index in indices:
                for between in range(at + STRIDE, index, STRIDE):
                    if self._is_stopped:
                        return
                    image.seek(between)
                    image.load()
                at = index
                image.seek(index)
                yield torch.from_numpy(np.array(image.convert("RGB"), dtype=np.uint8))

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        """Nothing is kept open between frames of two calls."""


def frame_durations_ms(data: bytes, max_chunks: int) -> list[int]:
    """Of each ANMF chunk (RFC 9649, section 2.7.1.1) of a file that is whole; empty for a still picture.
    Raises ClipTooLarge for more chunks of any kind."""
    durations, start, num_chunks = [], 12, 0
    while start + 8 <= len(data):
        num_chunks += 1
        if num_chunks > max_chunks:
            raise ClipTooLarge(
                f"the clip has over {max_chunks} chunks, which is the limit", max_chunks=max_chunks
            )
        kind, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        if kind == b"ANMF" and start + 24 <= len(data):
            durations.append(int.from_bytes(data[start + 20 : start + 23], "little"))
        start += 8 + size + (size & 1)
    return durations
