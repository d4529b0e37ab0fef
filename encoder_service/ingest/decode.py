"""File bytes to upright RGB pixels, as the reference package loads an image file.

Owns the formats that are opened, the limits that hold before a pixel is decoded, the conversion to RGB and
the one place where Pillow's exceptions become ours. Leaves sizes and grids to the family's preprocessor.

The rules, and the reference behaviour that each follows (``transformers.image_utils.load_image``:
``exif_transpose``, then ``convert("RGB")``):

* Orientation from EXIF, or from XMP where EXIF has none, is applied. Metadata that cannot be read counts as
  upright, where the reference raises: the pixels are intact.
* Every mode goes through Pillow's plain ``convert("RGB")``: palettes are looked up, grey and 1-bit
  replicated, CMYK and YCbCr converted without colour profile, 16-bit and float clipped or scaled as the
  installed Pillow does.
* Alpha and transparent colours are dropped, never composited, as in the reference's two file loaders
  (``load_image``, ``load_image_as_tensor``) in every release. Its processors differ by release only for a
  caller who hands them a Pillow object with alpha: plain conversion up to 5.17, white below by 5.23.
* Of an animation or a multi-page file the first frame counts.
* A file that ends early fails, as long as nobody sets Pillow's LOAD_TRUNCATED_IMAGES; nothing here does.

Limits are checked against the header's size, and no global setting of Pillow is changed. Pillow's own
decompression-bomb error (above 178,956,970 pixels unless the process changed it) is reported as ours.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from encoder_service.errors import ImageTooLarge, UndecodableImage, VisionEncoderError
from encoder_service.ingest.headers import (
    UNKNOWN_FORMAT,
    Canvas,
    format_name,
    ico_canvas,
    png_metadata_first,
    webp_canvas,
)
from encoder_service.ingest.jpeg import JpegHead, decode_jpeg, read_jpeg_head, upright_pixels

# Raster formats with a signature or a strict header. Left out on purpose: formats that start another
# program (EPS), that are containers of anything (PSD, PDF, FITS, HDF5, GRIB, WMF), and rarities.
ALLOWED_FORMATS = (
    "JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "ICO",
    "AVIF", "JPEG2000", "QOI", "PCX", "SGI", "TGA",
)  # fmt: skip

Image.init()  # registers every plugin once, here, instead of in the first request's thread
_OPENABLE = tuple(name for name in ALLOWED_FORMATS if name in Image.OPEN)

_ORIENTATIONS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED = (5, 6, 7, 8)
_TIFF_WIDTH, _TIFF_LENGTH = 256, 257


@dataclass(frozen=True)
class DecodeLimits:
    """What a file may ask for. max_encoded_bytes: length of the file; max_image_pixels: width times height
    in its header. Raises ValueError for a limit below 1."""

    max_encoded_bytes: int
    max_image_pixels: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, needs at least 1")


class ImageSize(NamedTuple):
    """Pixels of the upright image."""

    height: int
    width: int


def _keep_pillow_quiet() -> None:
    """Pillow's warnings concern single files, whose failures are reported per item: they are ignored for
    modules of Pillow only. ``warnings.catch_warnings`` is no way out, as it swaps the filters of all threads;
    one filter that stays is safe, and adding it again is harmless."""
    quiet = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
    if quiet not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")


def check_encoded(data: bytes, limits: DecodeLimits) -> None:
    """Raises UndecodableImage for an empty file, ImageTooLarge for one over max_encoded_bytes."""
    if not data:
        raise UndecodableImage("the image file has 0 bytes", found_bytes=0)
    if len(data) > limits.max_encoded_bytes:
        raise ImageTooLarge(
            f"the image file has {len(data)} bytes, the limit is {limits.max_encoded_bytes}",
            found_bytes=len(data),
            max_encoded_bytes=limits.max_encoded_bytes,
        )


def _check_canvas(canvas: Canvas, limits: DecodeLimits) -> None:
    num_pixels = canvas.width * canvas.height
    if num_pixels > limits.max_image_pixels:
        raise ImageTooLarge(
            f"the image is {canvas.width}x{canvas.height} = {num_pixels} pixels, "
            f"the limit is {limits.max_image_pixels}",
            found_pixels=num_pixels,
            max_image_pixels=limits.max_image_pixels,
        )


@contextlib.contextmanager
def _pillow_errors(data: bytes, limits: DecodeLimits, name: str) -> Iterator[None]:
    """The one place where what Pillow raises becomes an error of ours. Decoders that are fed hostile bytes
    raise almost anything (OSError, SyntaxError, ValueError, struct.error, EOFError, zlib.error, TypeError,
    IndexError, ...): inside, all of it is the file's fault, so keep the block to Pillow's calls.
    name: the format, for error texts."""
    try:
        yield
    except VisionEncoderError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        numbers = [int(number) for number in re.findall(r"\d+", str(error))]
        found, allowed = (numbers + [0, limits.max_image_pixels])[:2]
        allowed = min(allowed, limits.max_image_pixels)
        raise ImageTooLarge(
            f"the {name} image has {found} pixels, the limit is {allowed}",
            found_pixels=found,
            max_image_pixels=allowed,
        ) from error
    except MemoryError as error:
        raise UndecodableImage(
            f"the {name} file of {len(data)} bytes asks its decoder for more memory than it gets",
            format=name,
            found_bytes=len(data),
        ) from error
    except UnidentifiedImageError as error:
        start = (
            f"the {name} file of {len(data)} bytes is truncated, damaged or of an unsupported kind"
            if name != UNKNOWN_FORMAT
            else f"the {len(data)} bytes start with {bytes(data[:8]).hex(' ')}, which no image format does"
        )
        raise UndecodableImage(
            f"{start}; readable formats are {', '.join(_OPENABLE)}", format=name, found_bytes=len(data)
        ) from error
    except Exception as error:
        raise UndecodableImage(
            f"the {name} file of {len(data)} bytes is truncated or damaged: {error or type(error).__name__}",
            format=name,
            found_bytes=len(data),
        ) from error


def _check_before_opening(data: bytes, limits: DecodeLimits) -> None:
    _keep_pillow_quiet()
    check_encoded(data, limits)
    if canvas := webp_canvas(data) or ico_canvas(data):
        _check_canvas(canvas, limits)


@contextlib.contextmanager
def _opened(data: bytes, limits: DecodeLimits, header: bytes | None = None) -> Iterator[Image.Image]:
    """The opened image, its header within the limits; what Pillow raises in the block is translated.
    header: bytes to open in the file's place, when no pixel is wanted."""
    with _pillow_errors(data, limits, format_name(data)):
        image = Image.open(io.BytesIO(data if header is None else header), formats=_OPENABLE)
    with image, _pillow_errors(data, limits, image.format or format_name(data)):
        _check_canvas(Canvas(*image.size), limits)
        yield image


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation, 1 to 8 in a sound file. Reads what is in memory: PNG's own ``getexif`` would
    decode the pixels first."""
    try:
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # metadata of any kind of damage: the image counts as upright
        return 1


def glance_at_size(data: bytes, limits: DecodeLimits) -> ImageSize | None:
    """As ``read_size``, for a plain JPEG file within the limits; None for any other, which has to be opened:
    in some ten microseconds, so that an event loop may ask."""
    if not data or len(data) > limits.max_encoded_bytes:
        return None
    head = read_jpeg_head(data)
    if head is None or head.height * head.width > limits.max_image_pixels:
        return None
    return _upright(head)


def _upright(head: JpegHead) -> ImageSize:
    turned = head.orientation in _TURNED
    return ImageSize(head.width, head.height) if turned else ImageSize(head.height, head.width)


def read_size(data: bytes, limits: DecodeLimits) -> ImageSize:
    """Height and width of the upright image, from the header alone.

    Raises UndecodableImage, and ImageTooLarge with the number found and the number allowed.
    """
    size = glance_at_size(data, limits)
    if size is not None:
        return size
    _check_before_opening(data, limits)
    if canvas := ico_canvas(data):
        return ImageSize(canvas.height, canvas.width)
    with _opened(data, limits, header=png_metadata_first(data)) as image:
        width, height = image.size
        tags = getattr(image, "tag_v2", None)
        if tags is not None:
            # Pillow states a TIFF's size as already turned by its tag, but not by an orientation in XMP.
            width, height = tags[_TIFF_WIDTH], tags[_TIFF_LENGTH]
        if _orientation(image) in _TURNED:
            width, height = height, width
    return ImageSize(height, width)


def decode_rgb(
    data: bytes,
    limits: DecodeLimits,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The upright first frame as uint8 [H, W, 3], contiguous, owning its memory. out: memory of the image's
    size, contiguous, which is returned where the decoder could fill it itself; else it may have anything.

    Raises UndecodableImage, and ImageTooLarge before a pixel is decoded.
    """
    plain = _decode_plain_jpeg(data, limits, out)
    if plain is not None:
        return plain
    _check_before_opening(data, limits)
    with _opened(data, limits) as image:
        fast = _decode_jpeg(image, data)
        if fast is not None:
            pixels = torch.from_numpy(upright_pixels(fast, _orientation(image)))
        else:
            image.load()
            upright = image
            if (method := _ORIENTATIONS.get(_orientation(image))) is not None:
                upright = image.transpose(method)
            rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
            pixels = torch.from_numpy(np.array(rgb, dtype=np.uint8))
    _check_canvas(Canvas(pixels.shape[1], pixels.shape[0]), limits)
    return pixels


def _decode_plain_jpeg(data: bytes, limits: DecodeLimits, out: torch.Tensor | None) -> torch.Tensor | None:
    """Upright pixels of a plain JPEG file that the faster decoder takes, without opening it twice. out: as
    ``decode_rgb``'s."""
    if glance_at_size(data, limits) is None:
        return None
    head = read_jpeg_head(data)
    if head is None or not head.is_sequential:
        return None
    if out is not None and head.orientation == 1 and out.shape == (head.height, head.width, 3):
        return None if decode_jpeg(data, head.height, head.width, out.numpy()) is None else out
    pixels = decode_jpeg(data, head.height, head.width)
    return None if pixels is None else torch.from_numpy(upright_pixels(pixels, head.orientation))


def _decode_jpeg(image: Image.Image, data: bytes) -> np.ndarray | None:
    """The file's own pixels [H, W, 3], not yet turned, where the faster decoder takes it."""
    if image.format not in ("JPEG", "MPO") or image.mode != "RGB":
        return None
    width, height = image.size
    return decode_jpeg(data, height, width)
