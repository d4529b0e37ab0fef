"""Image files made on the spot."""

from __future__ import annotations

import io
import itertools

import numpy as np
from PIL import Image

_SEEDS = itertools.count(1000)


def photo(width: int = 96, height: int = 64, image_format: str = "PNG", seed: int | None = None) -> bytes:
    """A file of random smooth colours; every call without a seed gives other content."""
    rng = np.random.default_rng(next(_SEEDS) if seed is None else seed)
    small = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(out, image_format)
    return out.getvalue()
