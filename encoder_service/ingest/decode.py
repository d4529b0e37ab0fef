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
* With ``transparent="keep"`` the alpha channel is kept where there is one, for processors that resize it
  (``kimi_k3``). A transparent colour of an RGB image is no alpha channel there.
* Of an animation or a multi-page file, the first frame is used.
* A file that ends early fails. Metadata that no pixel depends on does not: a PNG is decoded without its texts
  and colour profile, which Pillow refuses above 1 MiB or with a wrong checksum.

A file's signature decides its format. Limits are checked against the size in the header, in place of
Pillow's own limit.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image

from encoder_service.errors import ImageTooLarge, UndecodableImage, VisionEncoderError
from encoder_service.ingest.headers import ImageSize, format_name, image_brand, is_tga, webp_size
from encoder_service.ingest.jpeg import coefficient_bytes, decode_jpeg, is_sequential_rgb
from vision_encoder.layout.png import png_without_metadata, png_without_pixels

Transparent: TypeAlias = Literal["white", "drop", "keep"]

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
_ROWS_PER_STRIP = 278
STRIP_PIXELS = 1 << 18  # converted to RGB at once
STRIP_BYTES = 24  # a pixel of a strip: alpha over white takes six copies
_FIXED_BYTES = 1 << 18  # tables and states of a decoder
_FILE_COPIES = {"PNG": 1, "WEBP": 2, "AVIF": 1, "TIFF": 1}  # copies of the file's bytes
_PYTHON_CODECS = frozenset({"ppm", "ppm_plain", "bmp_rle", "qoi", "SGI16"})


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
    except Exception as error:
        raise UndecodableImage(
            f"the {name} file of {len(data)} bytes is truncated or damaged: {_cause(error)}",
            found_bytes=len(data),
        ) from error


def _cause(error: Exception) -> str:
    """What is wrong with a file, in words."""
    text = str(error)
    if checksum := re.search(r"bad header checksum in b'(.+)'", text):
        return f"its chunk {checksum[1]} has a wrong checksum"
    if chunk := re.search(r"broken PNG file \(chunk b(.+)\)", text):
        return f"a chunk begins with {chunk[1]}, which is no chunk's name"
    if isinstance(error, MemoryError):
        return "decoding it takes more memory than the decoder may use"
    # Plugins raise these texts about the file. Other types of exceptions name variables and functions.
    if type(error) in (OSError, SyntaxError, ValueError, EOFError) and " " in text and "literal" not in text:
        return text
    return f"its contents are invalid ({type(error).__name__})"


def _format_of(data: bytes) -> str:
    """Pillow's name of the accepted format whose signature the data have. Raises UndecodableImage."""
    prefix = data[:16]
    for name in _OPENABLE:
        accepts = Image.OPEN[name][1]
        has_signature = name not in ("TGA", "DIB", "PCX") and accepts is not None and accepts(prefix) is True
        # Pillow takes all HEIF files for AVIF.
        if has_signature and (name != "AVIF" or "AVIF" in (image_brand(data) or "")):
            return name
    described = format_name(data)
    if described is None:
        # Formats without a signature of their own.
        for name in ("PCX", "DIB"):
            accepts = Image.OPEN[name][1]
            if accepts is not None and len(data) > 16 and accepts(prefix):
                return name
        if is_tga(data):
            return "TGA"
    what = f"is {described}" if described else "is no image that can be read"
    raise UndecodableImage(
        f"the file of {len(data)} bytes, which starts with {bytes(prefix)!r}, {what}; readable formats are "
        f"{', '.join(_OPENABLE)}",
        found_bytes=len(data),
    )


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
    name = _format_of(data)
    with _pillow_errors(data, name):
        file = io.BytesIO(png_without_pixels(data) if header_only else png_without_metadata(data))
        # The plugin itself, because ``Image.open`` drops the text of what a plugin raises.
        image = Image.OPEN[name][0](file, "")
    with image, _pillow_errors(data, image.format or name):
        _check_size(ImageSize(image.height, image.width), limits)
        yield image


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation, 1 to 8 in a valid file. Reads only metadata that is loaded already: PNG's own
    ``getexif`` would decode the pixels first."""
    try:
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata
        return 1


def _decoded_bytes(data: bytes, image: Image.Image) -> int:
    """What decoding allocates at most. image: opened, its pixels not loaded. The numbers of bytes per
    pixel are those of the decoders' own buffers; ``tests/unit/ingest/test_memory.py`` measures them."""
    num_pixels = image.width * image.height
    stored = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}.get(image.mode, 4)
    tiles = getattr(image, "tile", [])
    codec, kind = tiles[0][0] if tiles else "", image.format or ""
    match kind:
        case "JPEG" | "MPO":
            decoder = coefficient_bytes(data, image)
        case "WEBP":  # two canvases, and the frame as bytes
            decoder = 12 * num_pixels
        case "AVIF":  # planes, RGBA, and the frame as bytes
            decoder = 9 * num_pixels
        case "JPEG2000":  # 32 bits a component
            decoder = (4 * len(image.getbands()) + 3) * num_pixels
        case "TIFF" if codec == "libtiff":  # one strip or tile
            decoder = 8 * image.width * _rows_per_strip(image)
        case _:  # decoders written in Python collect all pixels, in memory that grows, and copy them
            decoder = (3 * stored if codec in _PYTHON_CODECS else 1) * num_pixels
    if is_sequential_rgb(image):
        loaded = 3 * num_pixels + decoder
    else:
        strip = STRIP_BYTES * max(image.width, min(num_pixels, STRIP_PIXELS))
        loaded = (stored + 3) * num_pixels + decoder + strip
    turned = 6 * num_pixels  # by an orientation
    return max(loaded + _FIXED_BYTES, turned) + _FILE_COPIES.get(kind, 0) * len(data)


def _rows_per_strip(image: Image.Image) -> int:
    tags = getattr(image, "tag_v2", {})
    return min(image.height, int(tags.get(_ROWS_PER_STRIP, image.height)))


@dataclass(frozen=True)
class OpenImage:
    """An image file whose header was read. Holds the file's bytes and what its header states, but no decoder:
    Pillow's keep a canvas (WebP), metadata or a copy of the file, and an image may wait for its turn.

    size: of the upright image. decoded_bytes: what ``decode`` takes at most, with all copies that live at the
    same time; the result itself is 3 bytes a pixel of it.
    """

    size: ImageSize
    decoded_bytes: int
    _data: bytes
    _limits: DecodeLimits
    _orientation: object
    _sequential_jpeg: ImageSize | None  # its size as stored; None for other files

    def decode(self, transparent: Transparent = "white") -> torch.Tensor:
        """The upright first frame as uint8 [H, W, 3], or [H, W, 4] with kept alpha, contiguous, owning its
        memory. transparent: how alpha is handled; see the module. Raises UndecodableImage."""
        if self._sequential_jpeg is not None:
            with _pillow_errors(self._data, "JPEG"):
                pixels_HWC = decode_jpeg(self._data, self._sequential_jpeg)
            if pixels_HWC is not None:
                return torch.from_numpy(upright(pixels_HWC, self._orientation))
        with _opened(self._data, self._limits) as image:
            image.load()
            pixels_HWC = to_rgb(image, transparent)
            orientation = _orientation(image)  # Pillow has turned a TIFF by now
        return torch.from_numpy(upright(pixels_HWC, orientation))


def open_image(data: bytes, limits: DecodeLimits) -> OpenImage:
    """Reads an image file's header. Takes tens of microseconds for a JPEG file.

    Raises UndecodableImage; ImageTooLarge with the number found and the number allowed.
    """
    with _opened(data, limits, header_only=True) as image:
        width, height = image.size
        stored = ImageSize(height, width) if is_sequential_rgb(image) else None
        num_bytes, orientation = _decoded_bytes(data, image), _orientation(image)
        tags = getattr(image, "tag_v2", None)
        if tags is not None:
            # Pillow's size of a TIFF accounts for its orientation tag, but not for an orientation in XMP.
            width, height = tags[_TIFF_WIDTH], tags[_TIFF_LENGTH]
        if orientation in _SIDES_SWAPPED:
            width, height = height, width
    return OpenImage(ImageSize(height, width), num_bytes, data, limits, orientation, stored)


def upright(pixels_HWC: np.ndarray, orientation: object) -> np.ndarray:
    """Turns uint8 [H, W, C] by the EXIF orientation; the result is contiguous. Uses numpy, which copies
    without the interpreter lock and, unlike torch, starts no threads for each worker that copies."""
    turn = _TURNS.get(orientation)
    if turn is None:
        return pixels_HWC
    # One element per pixel, which is copied twice as fast as byte by byte.
    num_channels = pixels_HWC.shape[2]
    turned = np.ascontiguousarray(turn(pixels_HWC.view(f"V{num_channels}")[..., 0]))
    return turned.view(np.uint8).reshape(*turned.shape, num_channels)


def to_rgb(image: Image.Image, transparent: Transparent) -> np.ndarray:
    """A loaded image as uint8 [H, W, 3], or [H, W, 4] with kept alpha. Converted in strips of rows, so that
    the only further memory is that of a strip: alpha over white takes three copies of an image at once, each
    of 4 bytes a pixel."""
    width, height = image.size
    num_rows = max(1, STRIP_PIXELS // max(1, width))
    if num_rows >= height:
        return np.array(_strip_to_rgb(image, transparent), dtype=np.uint8)
    keeps_alpha = transparent == "keep" and image.mode != "RGB" and _has_alpha(image)
    pixels_HWC = np.empty((height, width, 4 if keeps_alpha else 3), np.uint8)
    for top in range(0, height, num_rows):
        strip = image.crop((0, top, width, min(height, top + num_rows)))
        pixels_HWC[top : top + num_rows] = np.asarray(_strip_to_rgb(strip, transparent))
    return pixels_HWC


def _strip_to_rgb(image: Image.Image, transparent: Transparent) -> Image.Image:
    """The image in RGB, or in RGBA with kept alpha. For ``white``, as
    ``transformers.image_transforms.convert_to_rgb``."""
    if transparent == "keep" and image.mode != "RGB" and _has_alpha(image):
        return image.convert("RGBA")
    if transparent == "white" and _has_alpha(image):
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, (255,) * 4), above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None
