"""An image on its way through an engine: the undecoded file, and the facts of its header.

Owns which files are images, and how pixels become a file. Imports no torch.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_adapter.keys import content_digest
from vision_encoder.layout.png import png_without_pixels

ORIENTATION, TIFF_WIDTH, TIFF_LENGTH = 0x0112, 0x0100, 0x0101
TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""
TURNS: dict[object, str] = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""Pillow's name of the operation that turns an image upright, by EXIF orientation."""
FORMATS = (
    "JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF",
    "JPEG2000", "QOI", "PCX", "SGI", "TGA",
)  # fmt: skip
"""Formats that the encoder takes. Pillow decodes files of some other formats while it opens them."""


@dataclass(frozen=True, eq=False)
class ImageFile:
    """width and height: in pixels, upright. digest: BLAKE3 of the data. is_announced: the encoder has been
    sent the file. A file without data stands for the largest image while an engine measures its memory."""

    data: bytes = field(repr=False)
    width: int
    height: int
    digest: bytes = b""
    is_announced: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), as Pillow's images have it."""
        return self.width, self.height

    @classmethod
    def read(cls, data: bytes) -> ImageFile:
        """Decodes no pixels. Raises ValueError if it is not an image."""
        from PIL import Image

        Image.init()  # loads the plugins at the first call
        formats = [name for name in FORMATS if name in Image.OPEN]
        try:
            with Image.open(io.BytesIO(png_without_pixels(data)), formats=formats) as image:
                width, height = image.size
                tags = getattr(image, "tag_v2", None)
                if tags is not None:
                    # Pillow states a TIFF's size as turned by its tag, but not by an orientation in XMP.
                    width, height = tags[TIFF_WIDTH], tags[TIFF_LENGTH]
                if _orientation(image) in TURNED:
                    width, height = height, width
        except Exception as error:  # for a broken header, Pillow's plugins raise errors of any kind
            raise ValueError(f"Failed to load image: {error}") from error
        return cls(data, width, height, content_digest(data))

    @classmethod
    def of_pixels(cls, pixels: Any) -> ImageFile:
        """A file with the pixels of a Pillow image, or of a uint8 array or tensor, [height, width, channels]
        or [channels, height, width] with 1, 3 or 4 channels. Raises ValueError.

        A Pillow image that still has an EXIF orientation is turned by it, as the encoder turns its file and
        vLLM such an image; SGLang turns neither. Of an animation, the current frame is taken."""
        from PIL import Image

        if not isinstance(pixels, Image.Image):
            array = np.asarray(pixels)
            if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
                array = np.moveaxis(array, 0, -1)
            if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or array.dtype != np.uint8:
                raise ValueError(
                    f"an image is a {array.dtype} array of shape {list(np.shape(pixels))}, needs uint8 and "
                    "[height, width, channels] with 1, 3 or 4 channels"
                )
            pixels = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
        out = io.BytesIO()
        try:
            # Stored, not compressed: the file is read once, on the same host or the next.
            _bare(pixels).save(out, "PNG", compress_level=0)
        except Exception as error:  # Pillow decodes only here, and its plugins raise errors of any kind
            raise ValueError(f"Failed to load image: {error}") from error
        return cls.read(out.getvalue())


def _bare(image: Any) -> Any:
    """The upright pixels and the alpha of a Pillow image, in a mode that PNG has, without the metadata of its
    source. Pillow would write a colour profile, and a transparent colour even if it belongs to another mode;
    such a colour is ignored."""
    from PIL import Image

    image.load()  # before loading, a source may state another mode, transparency and orientation
    turn = TURNS.get(_orientation(image))
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


def _orientation(image: Any) -> object:
    """The EXIF orientation, or None. As for the encoder, an image with damaged metadata is upright."""
    from PIL import Image

    try:
        # A PNG's own method reads all pixels first.
        return Image.Image.getexif(image).get(ORIENTATION)
    except Exception:
        return None
