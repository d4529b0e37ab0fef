"""Pictures, clips and conversations for the engines, each test with content of its own."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

from bench.harness.processes import data_url


def picture(seed: int, width: int = 200, height: int = 260) -> bytes:
    """A PNG of waves whose lengths, directions and colours follow from the seed."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [
        127
        + 120
        * np.sin(columns / random.uniform(5, 40) + random.uniform(0, 6))
        * np.cos(rows / random.uniform(5, 40) + random.uniform(0, 6))
        for _ in range(3)
    ]
    out = io.BytesIO()
    Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def clip(
    seed: int, num_frames: int = 30, fps: Fraction | int = 6, *, width: int = 96, height: int = 64
) -> bytes:
    """An MP4 of waves that move, in lossless RGB: every decoder gives the same pixels."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    lengths, speeds = random.uniform(4, 30, (3, 2)), random.uniform(-2, 2, (3, 2))
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264rgb", rate=fps, options={"qp": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        for place in range(num_frames):
            planes = [
                127 + 120 * np.sin(columns / across + place * right) * np.cos(rows / along + place * down)
                for (across, along), (right, down) in zip(lengths, speeds, strict=True)
            ]
            image = np.stack(planes, axis=-1).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return out.getvalue()


def with_damaged_end(data: bytes) -> bytes:
    """The clip whose last frame, which is taken of every clip, begins with a wrong length."""
    with av.open(io.BytesIO(data), "r") as file:
        *_, place = (packet.pos for packet in file.demux(video=0) if packet.size)
    assert place is not None
    return data[:place] + b"\xff" * 4 + data[place + 4 :]


@dataclass(frozen=True)
class Clip:
    """index: of a clip, as images have theirs."""

    index: int


@dataclass(frozen=True)
class Case:
    """One user turn: texts, indices of pictures, and clips."""

    name: str
    parts: tuple[str | int | Clip, ...]

    @property
    def clips(self) -> list[Clip]:
        return [part for part in self.parts if isinstance(part, Clip)]


CASES = (
    Case("one image", (0, "What is in the picture?")),
    Case("text first", ("Look at this picture and describe it.", 1)),
    Case("two images", (0, 1, "Compare the two.")),
    Case("three sizes in text", ("First", 2, "then", 0, "and at last", 1, "which is the largest?")),
    Case("the same image twice", (1, "and again", 1)),
    Case("text alone", ("Say something about waves.",)),
    Case("ends in vision", ("Here it comes:", 2)),
)
TEXT = [{"role": "user", "content": "Say something about waves."}]
SIZES = ((200, 260), (330, 180), (410, 300))
CLIP_CASES = (
    Case("one clip", (Clip(0), "What happens?")),
    Case("two clips", ("First", Clip(1), "then", Clip(0), "which is longer?")),
    Case("an image and a clip", (Clip(1), "Is the picture from the clip?", 0)),
    Case("the same clip twice", (Clip(0), "and again", Clip(0))),
)
# Number of frames and rate. Of the first 9 are taken, an odd number; of the second the least, 4.
CLIP_LENGTHS = ((29, 6), (9, 5))


def with_pixels(case: Case, images: Sequence[bytes], clips: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """The ordinary OpenAI request."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(images[part])}}
        if isinstance(part, int)
        else {"type": "video_url", "video_url": {"url": data_url(clips[part.index], "video/mp4")}}
        for part in case.parts
    ]
    return [{"role": "user", "content": content}]
