"""Animated WebP to RGB frames, through Pillow, because FFmpeg reads only still WebP.

Owns the number, the rate and the frames of such a file. The rate is the average over the durations that the
file states. Alpha is dropped.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.headers import webp_size
from encoder_service.ingest.video.source import (
    DEFAULT_SOURCE_FPS,
    ClipHeader,
    ClipLimits,
    check_decoded_pixels,
    check_duration,
    check_frame_size,
    check_num_frames,
    decoder_errors,
)

CHUNKS_PER_FRAME = 4


class WebPClip:
    """A ClipSource for a WebP file, animated or still. WebP has no key frames, so all frames before a wanted
    one are decoded too."""

    def __init__(self, data: bytes, limits: ClipLimits) -> None:
        self._data = data
        self._limits = limits
        self._is_stopped = False
        size = webp_size(data)
        if size is None:
            raise UndecodableClip(f"the WebP file of {len(data)} bytes has no header that can be read")
        durations_ms = frame_durations_ms(data, CHUNKS_PER_FRAME * limits.max_source_frames)
        num_frames, total_s = max(1, len(durations_ms)), sum(durations_ms) / 1e3
        fps = num_frames / total_s if total_s else DEFAULT_SOURCE_FPS
        self.header = ClipHeader(num_frames, fps, *size)
        # Checked before Pillow opens the file, because its plugin allocates the canvas then.
        check_frame_size(size.width, size.height, limits)
        check_num_frames(num_frames, limits)
        check_duration(num_frames / fps, limits)

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        num_decoded = max(indices, default=-1) + 1
        check_decoded_pixels(num_decoded, self.header.width, self.header.height, self._limits)
        return self._decode(num_decoded, frozenset(indices))

    def _decode(self, num_decoded: int, wanted: frozenset[int]) -> Iterator[torch.Tensor]:
        with (
            decoder_errors(len(self._data), "WebP"),
            Image.open(io.BytesIO(self._data), formats=("WEBP",)) as image,
        ):
            for index in range(num_decoded):
                if self._is_stopped:
                    return
                image.seek(index)
                image.load()
                if index in wanted:
                    yield torch.from_numpy(np.array(image.convert("RGB"), dtype=np.uint8))

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        """Does nothing, because the file is open only during an iteration."""


def frame_durations_ms(data: bytes, max_chunks: int) -> list[int]:
    """The duration of each ANMF chunk (RFC 9649, section 2.7.1.1); empty for a still image. Raises
    ClipTooLarge for more than max_chunks chunks of any kind."""
    durations, start, num_chunks = [], 12, 0
    while start + 8 <= len(data):
        num_chunks += 1
        if num_chunks > max_chunks:
            raise ClipTooLarge(f"the clip has over {max_chunks} chunks, the limit", max_chunks=max_chunks)
        kind, size = data[start : start + 4], int.from_bytes(data[start + 4 : start + 8], "little")
        if kind == b"ANMF" and start + 24 <= len(data):
            durations.append(int.from_bytes(data[start + 20 : start + 23], "little"))
        start += 8 + size + (size & 1)
    return durations
