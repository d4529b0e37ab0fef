"""An image on its way through an engine: the undecoded file, and its header's facts.

Owns the file's checks. Imports no torch.
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
"""Pillow's names of what turns an image of an EXIF orientation upright."""
FORMATS = (
    "JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF",
    "JPEG2000", "QOI", "PCX", "SGI", "TGA",
)  # fmt: skip
"""What the encoder takes. Pillow decodes some of the others while it opens them."""


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
    def read(cls, data: bytes, max_pixels: int = 0) -> ImageFile:
        """Decodes no pixels. max_pixels: 0 for no limit. Raises ValueError, with both figures for an image
        that is too large."""
        from PIL import Image

        Image.init()  # only the first call does something
        formats = [name for name in FORMATS if name in Image.OPEN]
        try:
            with Image.open(io.BytesIO(png_without_pixels(data)), formats=formats) as image:
                width, height = image.size
                tags = getattr(image, "tag_v2", None)
                if tags is not None:
                    # Pillow states a TIFF's size as turned by its tag, but not by an orientation in XMP.
                    width, height = tags[TIFF_WIDTH], tags[TIFF_LENGTH]
                is_too_large = 0 < max_pixels < width * height
                if _orientation(image) in TURNED:
                    width, height = height, width
        except Exception as error:  # Pillow's plugins raise whatever a broken header makes them raise
            raise ValueError(f"Failed to load image: {error}") from error
        if is_too_large:
            raise ValueError(
                f"Image dimensions {width}x{height} ({width * height} pixels) exceed the maximum of "
                f"{max_pixels} pixels. Set VLLM_MAX_IMAGE_PIXELS to increase this limit."
            )
        return cls(data, width, height, content_digest(data))

    @classmethod
    def of_pixels(cls, pixels: Any) -> ImageFile:
        """Of a Pillow image, or a uint8 array or tensor, [height, width, channels] or [channels, height,
        width] with 1, 3 or 4 channels. Raises ValueError.

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
            # Stored, not compressed: it is read once, on the same host or the next.
            _bare(pixels).save(out, "PNG", compress_level=0)
        except Exception as error:  # Pillow decodes only now, and raises whatever broken bytes make it raise
            raise ValueError(f"Failed to load image: {error}") from error
        return cls.read(out.getvalue())


def _bare(image: Any) -> Any:
    """The upright pixels and the alpha of a Pillow image, in a mode that PNG has, without the metadata of its
    source. Pillow would write a colour profile, and a transparent colour even if it is of another mode; such
    a colour counts as none."""
    from PIL import Image

    image.load()  # before that a source may state another mode, transparency and orientation
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
    """As the encoder has it: an image with damaged metadata is upright."""
    from PIL import Image

    try:
        # A PNG's own method reads all pixels first.
        return Image.Image.getexif(image).get(ORIENTATION)
    except Exception:
        return None
