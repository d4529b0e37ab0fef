"""Decodes image files to upright RGB pixels, as the reference package loads them.

Owns the accepted formats, the limits that are checked before pixels are decoded, the conversion to RGB and
the translation of Pillow's exceptions. The families' preprocessors own sizes and grids.

Rules, and what each follows in the reference (``transformers``):

* Orientation from EXIF, or from XMP if EXIF has none, is applied (``load_image``: ``exif_transpose``).
  Metadata that cannot be read counts as upright, although the reference raises: the pixels are intact.
* Modes without transparency are converted by Pillow's ``convert("RGB")``: palettes are looked up, grey and
  1-bit replicated, CMYK and YCbCr converted without colour profile, 16-bit and float clipped or scaled.
* Transparent images (alpha, or a transparent colour) are composited over white, as in the reference's
  processors from 5.23 on (``image_transforms.convert_to_rgb``) and in vLLM. With ``transparent="drop"`` alpha
  is dropped, as in older releases and in SGLang.
* Of an animation or a multi-page file, the first frame is used.
* A file that ends early fails.

Limits are checked against the size in the header, in place of Pillow's own limit.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from encoder_service.errors import ImageTooLarge, UndecodableImage, VisionEncoderError
from encoder_service.ingest.headers import ImageSize, webp_size
from encoder_service.ingest.jpeg import decode_jpeg
from vision_encoder.layout.png import png_without_pixels

Transparent: TypeAlias = Literal["white", "drop"]

# Raster formats with a signature or a strict header. Excluded on purpose: formats that start another program
# (EPS), that contain other formats (PSD, PDF, FITS, HDF5, GRIB, WMF), that Pillow decodes while opening
# (ICO), and rare ones.
ALLOWED_FORMATS = (
    "JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF",
    "JPEG2000", "QOI", "PCX", "SGI", "TGA",
)  # fmt: skip

warnings.filterwarnings("ignore", module=r"PIL\.")  # failures are reported per item
Image.MAX_IMAGE_PIXELS = None
Image.init()  # registers every plugin now instead of in the first request's thread
_OPENABLE = tuple(name for name in ALLOWED_FORMATS if name in Image.OPEN)

# How to turn an image [H, W] upright, by EXIF orientation.
_TURNS: dict[object, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.T,
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].T,
    8: np.rot90,
}
_SIDES_SWAPPED = (5, 6, 7, 8)
_TIFF_WIDTH, _TIFF_LENGTH = 256, 257


@dataclass(frozen=True)
class DecodeLimits:
    """max_encoded_bytes: limit of the file's size. max_image_pixels: limit of width times height, as stated
    in the header."""

    max_encoded_bytes: int
    max_image_pixels: int


def _check_size(size: ImageSize, limits: DecodeLimits) -> None:
    num_pixels = size.width * size.height
    if num_pixels > limits.max_image_pixels:
        raise ImageTooLarge(
            f"the image is {size.width}x{size.height} = {num_pixels} pixels, "
            f"the limit is {limits.max_image_pixels}",
            found_pixels=num_pixels,
            max_image_pixels=limits.max_image_pixels,
        )


@contextlib.contextmanager
def _pillow_errors(data: bytes, name: str) -> Iterator[None]:
    """Translates every exception of Pillow. For hostile bytes its decoders raise almost anything (OSError,
    SyntaxError, struct.error, zlib.error, IndexError, ...), so the block must hold only calls of Pillow.
    name: the format's name, for messages."""
    try:
        yield
    except VisionEncoderError:
        raise
    except UnidentifiedImageError as error:
        raise UndecodableImage(
            f"the file of {len(data)} bytes, which starts with {bytes(data[:16])!r}, is no image that can be "
            f"read; readable formats are {', '.join(_OPENABLE)}",
            found_bytes=len(data),
        ) from error
    except Exception as error:
        cause = str(error) or type(error).__name__
        raise UndecodableImage(
            f"the {name} file of {len(data)} bytes is truncated or damaged: {cause}", found_bytes=len(data)
        ) from error


@contextlib.contextmanager
def _opened(data: bytes, limits: DecodeLimits, *, header_only: bool = False) -> Iterator[Image.Image]:
    """The opened image; its header is within the limits. Translates exceptions of Pillow in the block.
    header_only: the pixels will not be decoded. Raises UndecodableImage for an empty file, ImageTooLarge."""
    if not data:
        raise UndecodableImage("the image file has 0 bytes", found_bytes=0)
    if len(data) > limits.max_encoded_bytes:
        raise ImageTooLarge(
            f"the image file has {len(data)} bytes, the limit is {limits.max_encoded_bytes}",
            found_bytes=len(data),
            max_encoded_bytes=limits.max_encoded_bytes,
        )
    if size := webp_size(data):
        _check_size(size, limits)
    with _pillow_errors(data, "image"):
        file = io.BytesIO(png_without_pixels(data) if header_only else data)
        image = Image.open(file, formats=_OPENABLE)
    with image, _pillow_errors(data, image.format or "image"):
        _check_size(ImageSize(image.height, image.width), limits)
        yield image


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation, 1 to 8 in a valid file. Reads only metadata that is loaded already: PNG's own
    ``getexif`` would decode the pixels first."""
    try:
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata
        return 1


def read_size(data: bytes, limits: DecodeLimits) -> ImageSize:
    """The size of the upright image, from the header only. Takes tens of microseconds for a JPEG file.

    Raises UndecodableImage; ImageTooLarge with the number found and the number allowed.
    """
    with _opened(data, limits, header_only=True) as image:
        width, height = image.size
        tags = getattr(image, "tag_v2", None)
        if tags is not None:
            # Pillow's size of a TIFF accounts for its orientation tag, but not for an orientation in XMP.
            width, height = tags[_TIFF_WIDTH], tags[_TIFF_LENGTH]
        if _orientation(image) in _SIDES_SWAPPED:
            width, height = height, width
    return ImageSize(height, width)


def decode_rgb(data: bytes, limits: DecodeLimits, transparent: Transparent = "white") -> torch.Tensor:
    """The upright first frame as uint8 [H, W, 3], contiguous, owning its memory. transparent: how alpha is
    handled; see the module.

    Raises UndecodableImage; ImageTooLarge before pixels are decoded.
    """
    with _opened(data, limits) as image:
        pixels_HWC = decode_jpeg(data, image)
        if pixels_HWC is None:
            image.load()
            pixels_HWC = np.array(_to_rgb(image, transparent), dtype=np.uint8)
        pixels_HWC = upright(pixels_HWC, _orientation(image))
    return torch.from_numpy(pixels_HWC)


def upright(pixels_HWC: np.ndarray, orientation: object) -> np.ndarray:
    """Turns uint8 [H, W, 3] by the EXIF orientation; the result is contiguous. Uses numpy, which copies
    without the interpreter lock and, unlike torch, starts no threads for each worker that copies."""
    turn = _TURNS.get(orientation)
    if turn is None:
        return pixels_HWC
    # One element per pixel, which is copied twice as fast as byte by byte.
    turned = np.ascontiguousarray(turn(pixels_HWC.view("V3")[..., 0]))
    return turned.view(np.uint8).reshape(*turned.shape, 3)


def _to_rgb(image: Image.Image, transparent: Transparent) -> Image.Image:
    """The image in RGB. For ``white``, as ``transformers.image_transforms.convert_to_rgb``."""
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    if has_alpha and transparent == "white":
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, (255,) * 4), above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
