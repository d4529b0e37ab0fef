"""Pixels as an image file, without loss. Needs Pillow, and imports no torch.

Owns how pixels become a file; ``engines.shared.images`` reads headers of files that engines have."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from lm_adapter.errors import InvalidRequest, MissingDependency

ORIENTATION = 0x0112
TURNS: dict[object, str] = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""Pillow's name of the operation that turns an image upright, by EXIF orientation."""


def png_file(pixels: Any) -> bytes:
    """A PNG file with the pixels of a Pillow image, or of a uint8 array or tensor on the host:
    [height, width, channels] or [channels, height, width], with 1, 3 or 4 channels. Raises InvalidRequest;
    MissingDependency without Pillow.

    A Pillow image that still has an EXIF orientation is turned by it, as the encoder turns its file and vLLM
    such an image; SGLang turns neither. Of an animation, the current frame is taken."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("pillow", "an image from pixels") from error

    if not isinstance(pixels, Image.Image):
        array = np.asarray(pixels)
        if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
            array = np.moveaxis(array, 0, -1)
        if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or array.dtype != np.uint8:
            raise InvalidRequest(
                f"an image is a {array.dtype} array of shape {list(np.shape(pixels))}, needs uint8 and "
                "[height, width, channels] with 1, 3 or 4 channels"
            )
        pixels = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    out = io.BytesIO()
    try:
        # Stored, not compressed: the file is read once, on the same host or the next.
        _bare(pixels).save(out, "PNG", compress_level=0)
    except Exception as error:  # Pillow decodes only here, and its plugins raise errors of any kind
        raise InvalidRequest(f"Failed to load image: {error}") from error
    return out.getvalue()


def _bare(image: Any) -> Any:
    """The upright pixels and the alpha of a Pillow image, in a mode that PNG has, without the metadata of its
    source. Pillow would write a colour profile, and a transparent colour even if it belongs to another mode;
    such a colour is ignored."""
    from PIL import Image

    image.load()  # before loading, a source may state another mode, transparency and orientation
    turn = TURNS.get(orientation_of(image))
    if turn is not None:
        image = image.transpose(getattr(Image.Transpose, turn))
    if image.mode == "La":
        image = image.convert("LA")
    has_alpha = image.has_transparency_data
    if image.mode in ("LA", "RGBA") or (image.mode in ("1", "L", "RGB", "I;16") and not has_alpha):
        bare = image.copy()
    else:
        try:
            bare = image.convert("RGBA" if has_alpha else "RGB")
        except (TypeError, ValueError):
            image = image.copy()
            if "transparency" not in image.info:
                raise
            del image.info["transparency"]
            bare = image.convert("RGBA" if image.has_transparency_data else "RGB")
    bare.info = {}
    return bare


def orientation_of(image: Any) -> object:
    """The EXIF orientation, or None. As for the encoder, an image with damaged metadata is upright."""
    from PIL import Image

    try:
        # A PNG's own method reads all pixels first.
        return Image.Image.getexif(image).get(ORIENTATION)
    except Exception:
        return None
