"""The chat requests of ``epd.py``: their pictures and clips, their bodies, and the times of their tokens.

New pictures and clips are copies of a few files with another comment, so they cost as much as any new one.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import av
import numpy as np
from PIL import Image

from bench.harness.processes import data_url

NUM_PICTURES, NUM_CLIPS = 8, 2
"""Number of different pictures or clips of a size. New ones are copies with another comment."""
CLIP_FPS = 24
JSON = {"content-type": "application/json"}
ROLE_ALONE = re.compile(rb'"role": ?"assistant", ?"content": ?""(?!.*"finish_reason": ?")')
"""The beginning of an answer, before its first token. LMDeploy's tokens have the role too."""


@dataclass(frozen=True)
class Timed:
    """One request. gaps_ms: times between its tokens. failure: empty if the request succeeded."""

    first_ms: float
    total_ms: float
    gaps_ms: tuple[float, ...]
    failure: str = ""


class Pictures:
    """JPEG files of one size, or MP4 files, each new."""

    def __init__(self, size: tuple[int, int], choice: random.Random, clip_s: int = 0) -> None:
        """size: width and height in pixels. clip_s: length of each clip; 0 for images."""
        self._choice = choice
        self._is_clip = bool(clip_s)
        if clip_s:
            self._files = [self._clip(*size, clip_s) for _ in range(NUM_CLIPS)]
        else:
            self._files = [self._photo(*size) for _ in range(NUM_PICTURES)]

    def _photo(self, width: int, height: int) -> bytes:
        generator = np.random.default_rng(self._choice.getrandbits(32))
        rows, columns = np.mgrid[0:height, 0:width]
        lengths = generator.uniform(20, 90, 6)
        waves = np.stack([np.sin(columns / lengths[n] + rows / lengths[n + 3]) for n in range(3)], axis=-1)
        coarse = generator.normal(0, 18, (height // 4 + 1, width // 4 + 1, 3))
        grain = np.repeat(np.repeat(coarse, 4, 0), 4, 1)[:height, :width]
        pixels = np.clip(waves * 80 + 128 + grain, 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=85)
        return out.getvalue()

    def _clip(self, width: int, height: int, seconds: int) -> bytes:
        """A part of a photo that moves by a pixel a frame."""
        frames = seconds * CLIP_FPS
        with Image.open(io.BytesIO(self._photo(width + frames, height + frames))) as photo:
            whole = np.asarray(photo)
        out = io.BytesIO()
        with av.open(out, "w", format="mp4") as file:
            stream = file.add_stream("libx264", rate=CLIP_FPS, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for at in range(frames):
                pixels = np.ascontiguousarray(whole[at : at + height, at : at + width])
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            file.mux(stream.encode(None))
        return out.getvalue()

    def take(self, choice: random.Random, mark: bytes) -> bytes:
        """mark: makes the file another one than the same choice without it."""
        comment = choice.randbytes(16) + mark
        file = choice.choice(self._files)
        if self._is_clip:
            return file + (len(comment) + 8).to_bytes(4, "big") + b"free" + comment
        return file[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + file[2:]


def message(number: int, files: Sequence[bytes], words: int = 0) -> dict[str, Any]:
    """A user's message: text with ``words`` further tokens, and files."""
    text = f"Request {number}: what do you see?" + " a" * words
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for file in files:
        kind = "image/jpeg" if file.startswith(b"\xff\xd8") else "video/mp4"
        name = f"{kind.partition('/')[0]}_url"
        parts.append({"type": name, name: {"url": data_url(file, kind)}})
    return {"role": "user", "content": parts}


def body_of(messages: Sequence[dict[str, Any]], tokens: int) -> bytes:
    """A streamed request of exactly ``tokens`` tokens."""
    request = {
        "model": "model",
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(request).encode()


async def send(client: aiohttp.ClientSession, server: str, request: bytes) -> Timed:
    sent = time.perf_counter()
    times, failure = [], ""
    async with client.post(f"{server}/v1/chat/completions", data=request, headers=JSON) as response:
        async for line in response.content:
            if response.status != 200 or b'"error"' in line:
                failure = failure or line.decode(errors="replace")[:300]
            elif b'"delta"' in line and not ROLE_ALONE.search(line):
                times.append(time.perf_counter())
    ended = time.perf_counter()
    first_ms = (times[0] - sent) * 1e3 if times else 0.0
    gaps_ms = tuple((later - earlier) * 1e3 for earlier, later in itertools.pairwise(times))
    return Timed(first_ms, (ended - sent) * 1e3, gaps_ms, failure or ("" if times else "no token"))
