"""Pictures and conversations for the engines, each test with content of its own."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from lm_adapter.engines.vllm_rewrite import GRID_FIELDS
from lm_adapter.items import Grid


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


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


@dataclass(frozen=True)
class Case:
    """One user turn: texts, and indices of pictures."""

    name: str
    parts: tuple[str | int, ...]


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


def with_pixels(case: Case, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """The ordinary OpenAI request."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(images[part])}}
        for part in case.parts
    ]
    return [{"role": "user", "content": content}]


def with_rows(
    case: Case, rows: Sequence[tuple[bytes, Grid]], family: str
) -> tuple[list[dict[str, Any]], list[tuple[bytes, Grid]]]:
    """The metadata-only request, and key and grid of each of its images."""
    field = GRID_FIELDS.get(family, "image_grid_thw")
    content: list[dict[str, Any]] = []
    used = []
    for part in case.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        key, grid = rows[part]
        used.append(rows[part])
        content.append({"type": "image_embeds", "image_embeds": {field: list(grid)}, "uuid": key.hex()})
    return [{"role": "user", "content": content}], used
