"""Sequential JPEG files to RGB through simplejpeg.

Owns which files are decoded this way: those for which all versions of libjpeg-turbo give the same pixels as
Pillow, with the exact inverse transform and smooth chroma upsampling. Pillow opens every file first and
decodes the others.

simplejpeg takes half of Pillow's time and releases the interpreter lock, so that worker threads decode in
parallel.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from PIL import Image

# Other ratios are rare, and versions of libjpeg-turbo differ on some.
_SUBSAMPLINGS = frozenset({"444", "422", "420"})


def decode_jpeg(data: bytes, opened: Image.Image) -> np.ndarray | None:
    """uint8 [H, W, 3] before any rotation. None for a file that Pillow has to decode or refuse, because it is
    of another kind or damaged. opened: the file as opened by Pillow, with its pixels not loaded."""
    if opened.format not in ("JPEG", "MPO") or opened.mode != "RGB":
        return None
    # Versions of libjpeg-turbo smooth incomplete progressive files differently.
    if "progressive" in opened.info:
        return None
    try:
        header = simplejpeg.decode_jpeg_header(data, strict=True)
        if header[:3] != (opened.height, opened.width, "YCbCr") or header[3] not in _SUBSAMPLINGS:
            return None
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, "RGB", fastdct=False, fastupsample=False, strict=True
        )
    except ValueError:  # also for damage that libjpeg only warns about, and that Pillow may accept
        return None
    return pixels
