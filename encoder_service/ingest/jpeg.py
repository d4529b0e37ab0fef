"""Sequential JPEG files to RGB through simplejpeg.

Owns which files are decoded this way: those for which all versions of libjpeg-turbo give the same pixels as
Pillow, with the exact inverse transform and smooth chroma upsampling. Pillow reads the header of every file
and decodes the others.

simplejpeg takes half of Pillow's time and releases the interpreter lock, so that worker threads decode in
parallel.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from PIL import Image

from encoder_service.ingest.headers import ImageSize

# Other ratios are rare, and versions of libjpeg-turbo differ on some.
_SUBSAMPLINGS = frozenset({"444", "422", "420"})


def is_sequential_rgb(opened: Image.Image) -> bool:
    """Whether the file may be decoded by simplejpeg. opened: the file as opened by Pillow."""
    # Versions of libjpeg-turbo smooth incomplete progressive files differently.
    return opened.format in ("JPEG", "MPO") and opened.mode == "RGB" and "progressive" not in opened.info


def decode_jpeg(data: bytes, size: ImageSize) -> np.ndarray | None:
    """uint8 [H, W, 3] before any rotation, of a file that ``is_sequential_rgb``. size: as Pillow reads it.
    None for a file that Pillow has to decode or refuse, because it is of another kind or damaged."""
    try:
        header = simplejpeg.decode_jpeg_header(data, strict=True)
        if header[:3] != (*size, "YCbCr") or header[3] not in _SUBSAMPLINGS:
            return None
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, strict=True
        )
    except ValueError:  # also for damage that libjpeg only warns about, and that Pillow may accept
        return None
    return pixels


def coefficient_bytes(data: bytes, opened: Image.Image) -> int:
    """What libjpeg keeps of a file of several scans, progressive or not, beside its pixels: all coefficients,
    16 bits each. opened: the file as opened by Pillow, which stops at the first scan."""
    # (identity, horizontal and vertical factor, table) of each component
    layers: list[tuple[int, int, int, int]] = getattr(opened, "layer", [])
    fp = getattr(opened, "fp", None)
    if not layers or fp is None:
        return 0
    # The first scan's header ends where Pillow stopped: it counts its components, then lists them.
    start = fp.tell() - 2 * len(layers) - 4
    if start >= 0 and data[start] == len(layers) and "progressive" not in opened.info:
        return 0
    most = max(layer[1] for layer in layers) * max(layer[2] for layer in layers)
    sampled = sum(layer[1] * layer[2] for layer in layers)
    return 2 * opened.width * opened.height * sampled // max(1, most)
