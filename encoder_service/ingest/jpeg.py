"""Sequential JPEG files to RGB through simplejpeg, where it is installed.

Owns which files take this route: those on which all versions of libjpeg-turbo give the pixels that Pillow
gives, with the exact inverse transform and smooth chroma upsampling. Pillow opens every file first and
decodes the others.

simplejpeg needs half of Pillow's time and releases the interpreter's lock, so that worker threads decode side
by side.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

# Other ratios are rare, and versions of the library differ on some.
_SUBSAMPLINGS = frozenset({"444", "422", "420"})


def decode_jpeg(data: bytes, opened: Image.Image) -> np.ndarray | None:
    """uint8 [H, W, 3] before any rotation, or None for a file that Pillow has to decode or refuse: of another
    kind, or damaged. opened: the file as Pillow opened it, its pixels not loaded."""
    if simplejpeg is None or opened.format not in ("JPEG", "MPO") or opened.mode != "RGB":
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
    except ValueError:  # also for what libjpeg only warns of, and Pillow may accept
        return None
    return pixels
