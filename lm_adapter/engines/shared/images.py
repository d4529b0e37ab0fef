"""An image on its way through an engine: the undecoded file, and the facts of its header.

Owns which files are images. Imports no torch.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from lm_adapter.keys import content_digest
from lm_adapter.pixels import orientation_of, png_file
from vision_encoder.layout.png import png_without_pixels

TIFF_WIDTH, TIFF_LENGTH = 0x0100, 0x0101
TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""
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
                if orientation_of(image) in TURNED:
                    width, height = height, width
        except Exception as error:  # for a broken header, Pillow's plugins raise errors of any kind
            raise ValueError(f"Failed to load image: {error}") from error
        return cls(data, width, height, content_digest(data))

    @classmethod
    def of_pixels(cls, pixels: Any) -> ImageFile:
        """A file with the pixels, as of ``png_file``. Raises ValueError."""
        return cls.read(png_file(pixels))
