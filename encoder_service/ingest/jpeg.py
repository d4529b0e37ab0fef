"""Sequential JPEG files to RGB through simplejpeg, where it is installed.

Owns which files take this route: those on which all versions of libjpeg-turbo give the pixels that Pillow
gives, with the exact inverse transform and smooth chroma upsampling. Pillow opens every file first and
decodes the others.

simplejpeg needs half of Pillow's time and releases the interpreter's lock, so that worker threads decode side
by side.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

# Other ratios are rare, and versions of the library differ on some.
_SUBSAMPLINGS = frozenset({"444", "422", "420"})
# By EXIF orientation, of [H, W].
_TURNS: dict[object, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.T,
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].T,
    8: np.rot90,
}


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


def upright_pixels(pixels: np.ndarray, orientation: object) -> np.ndarray:
    """uint8 [H, W, 3] turned as the EXIF orientation says, contiguous. In numpy, which copies without the
    interpreter's lock and, unlike torch, starts no threads for each worker that copies."""
    turn = _TURNS.get(orientation)
    if turn is None:
        return pixels
    # A pixel as one element is copied at once, twice as fast as byte by byte.
    turned = np.ascontiguousarray(turn(pixels.view("V3")[..., 0]))
    return turned.view(np.uint8).reshape(*turned.shape, 3)
