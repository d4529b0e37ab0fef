"""Image files of every format and mode, made in memory: what the ingest tests feed the decoder.

A format or mode that the installed Pillow cannot write is absent, which ``test_decode`` counts.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

WIDTH, HEIGHT = 29, 22


def pixels(height: int = HEIGHT, width: int = WIDTH, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, channels]: a gradient with noise, so that neither rows nor columns repeat."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    planes = [(rows * (3 + c) + columns * (5 + 2 * c)) % 256 for c in range(channels)]
    noise = rng.integers(0, 40, (height, width, channels))
    return ((np.stack(planes, axis=-1) + noise) % 256).astype(np.uint8)


def image(mode: str, seed: int = 0) -> Image.Image:
    """A WIDTH x HEIGHT image of a mode, with values over the mode's whole range."""
    match mode:
        case "L":
            return Image.fromarray(pixels(channels=1, seed=seed)[:, :, 0])
        case "1" | "P":
            return Image.fromarray(pixels(seed=seed)).convert(mode)
        case "I;16":
            return Image.fromarray(pixels(channels=1, seed=seed)[:, :, 0].astype(np.uint16) * 257 + seed)
        case "I":
            return Image.fromarray(pixels(channels=1, seed=seed)[:, :, 0].astype(np.int32) * 300 - 2000)
        case "F":
            return Image.fromarray(pixels(channels=1, seed=seed)[:, :, 0].astype(np.float32) * 1.25 - 20.3)
        case "LA" | "RGBA":
            return Image.fromarray(pixels(channels=len(mode), seed=seed))
        case "CMYK" | "YCbCr" | "LAB" | "HSV":
            return Image.frombytes(
                mode,
                (WIDTH, HEIGHT),
                pixels(channels=len(mode.rstrip("br")) if mode == "CMYK" else 3, seed=seed).tobytes(),
            )
        case _:
            return Image.fromarray(pixels(seed=seed))


def encode(picture: Image.Image, name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return buffer.getvalue()


def ppm(array: np.ndarray) -> bytes:
    """A binary PPM of uint8 [H, W, 3]: lossless and nearly free to write."""
    height, width, _ = array.shape
    return b"P6 %d %d 255\n" % (width, height) + array.tobytes()


def _palette_with_alphas() -> Image.Image:
    picture = image("P")
    picture.info["transparency"] = bytes(range(0, 250, 5))
    return picture


def _variants() -> dict[str, tuple[Image.Image, str, dict[str, Any]]]:
    variants: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "jpeg-rgb": (image("RGB"), "JPEG", {"quality": 90}),
        "jpeg-444": (image("RGB"), "JPEG", {"quality": 95, "subsampling": 0}),
        "jpeg-progressive": (image("RGB"), "JPEG", {"progressive": True}),
        "jpeg-grey": (image("L"), "JPEG", {}),
        "jpeg-cmyk": (image("CMYK"), "JPEG", {}),
        "mpo": (image("RGB"), "MPO", {"save_all": True, "append_images": [image("RGB", seed=1)]}),
        "png-palette-transparent-index": (image("P"), "PNG", {"transparency": 3}),
        "png-palette-alphas": (_palette_with_alphas(), "PNG", {"transparency": bytes(range(0, 250, 5))}),
        "png-rgb-transparent-colour": (image("RGB"), "PNG", {"transparency": (3, 5, 7)}),
        "png-animated": (image("RGB"), "PNG", {"save_all": True, "append_images": [image("RGB", seed=1)]}),
        "webp-lossy": (image("RGB"), "WEBP", {"quality": 80}),
        "webp-lossless": (image("RGB"), "WEBP", {"lossless": True}),
        "webp-alpha": (image("RGBA"), "WEBP", {"lossless": True, "exact": True}),
        "webp-animated": (image("RGB"), "WEBP", {"save_all": True, "append_images": [image("RGB", seed=1)]}),
        "gif-palette": (image("P"), "GIF", {}),
        "gif-transparent": (image("P"), "GIF", {"transparency": 2}),
        "gif-animated": (image("P"), "GIF", {"save_all": True, "append_images": [image("P", seed=1)]}),
        "bmp-1": (image("1"), "BMP", {}),
        "bmp-rgb": (image("RGB"), "BMP", {}),
        "bmp-rgba": (image("RGBA"), "BMP", {}),
        "tiff-pages": (image("RGB"), "TIFF", {"save_all": True, "append_images": [image("RGB", seed=1)]}),
        "tiff-lzw": (image("RGB"), "TIFF", {"compression": "tiff_lzw"}),
        "tiff-ycbcr": (image("YCbCr"), "TIFF", {"compression": "tiff_lzw"}),
        "tiff-jpeg": (image("RGB"), "TIFF", {"compression": "jpeg"}),
        "tiff-group4": (image("1"), "TIFF", {"compression": "group4"}),
        "ppm-1": (image("1"), "PPM", {}),
        "ppm-rgb": (image("RGB"), "PPM", {}),
        "ppm-16": (image("I;16"), "PPM", {}),
        "ppm-float": (image("F"), "PPM", {}),
        "jpeg2000-rgb": (image("RGB"), "JPEG2000", {}),
        "jpeg2000-alpha": (image("RGBA"), "JPEG2000", {}),
        "jpeg2000-codestream": (image("RGB"), "JPEG2000", {"no_jp2": True}),
        "pcx": (image("RGB"), "PCX", {}),
        "sgi": (image("RGBA"), "SGI", {}),
        "tga": (image("RGBA"), "TGA", {}),
    }
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        variants[f"png-{mode}"] = (image(mode), "PNG", {})
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"):
        variants[f"tiff-{mode}"] = (image(mode), "TIFF", {})
    if "AVIF" in Image.SAVE:
        variants["avif"] = (image("RGB"), "AVIF", {"quality": 80})
        variants["avif-alpha"] = (image("RGBA"), "AVIF", {"quality": 80})
        variants["avif-animated"] = (
            image("RGB"),
            "AVIF",
            {"save_all": True, "append_images": [image("RGB", seed=1)]},
        )
    if "QOI" in Image.SAVE:
        variants["qoi"] = (image("RGB"), "QOI", {})
        variants["qoi-alpha"] = (image("RGBA"), "QOI", {})
    return variants


def every_file() -> dict[str, bytes]:
    """One sound file of every format and mode, by name."""
    Image.init()
    return {name: encode(picture, kind, **options) for name, (picture, kind, options) in _variants().items()}


def exif(orientation: int) -> bytes:
    """An EXIF block with nothing but an orientation."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def xmp(orientation: int) -> str:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with_late_chunk(data: bytes, chunk: bytes) -> bytes:
    """The PNG with a chunk put behind the pixels, right before IEND."""
    end = data.rindex(b"IEND") - 4
    return data[:end] + chunk + data[end:]


def odd_pngs(width: int, height: int) -> dict[str, tuple[bytes, bool]]:
    """PNG files with an orientation behind their pixels, and whether it turns the image on its side."""
    picture = Image.new("RGB", (width, height))
    plain = encode(picture, "PNG")
    animated = encode(picture, "PNG", save_all=True, append_images=[Image.new("RGB", (width, height), "red")])
    turned = png_chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0"))
    other_header = png_chunk(b"IHDR", struct.pack(">II", 5, 7) + b"\x08\x02\0\0\0")
    return {
        "late": (png_with_late_chunk(plain, turned), True),
        "before a text of IDAT": (
            png_with_late_chunk(plain, turned + png_chunk(b"tEXt", b"Comment\0IDAT")),
            True,
        ),
        "after another header": (png_with_late_chunk(plain, other_header + turned), True),
        "after IEND": (plain + turned, False),
        "after a chunk without a name": (
            png_with_late_chunk(plain, png_chunk(b"\0" * 4, b"") + turned),
            False,
        ),
        "after a second frame": (png_with_late_chunk(animated, turned), False),
    }


def _oriented(orientation: int) -> dict[str, bytes]:
    picture, block = image("RGB"), exif(orientation)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp(orientation))
    plain = encode(picture, "PNG")
    files = {
        "jpeg": encode(picture, "JPEG", exif=block),
        "png": encode(picture, "PNG", exif=block),
        "png-late-exif": png_with_late_chunk(plain, png_chunk(b"eXIf", block.removeprefix(b"Exif\0\0"))),
        "png-xmp": encode(picture, "PNG", pnginfo=text),
        "png-late-xmp": png_with_late_chunk(
            plain, png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(orientation).encode())
        ),
        "webp": encode(picture, "WEBP", lossless=True, exif=block),
        "tiff": encode(picture, "TIFF", tiffinfo={0x0112: orientation}),
        "mpo": encode(picture, "MPO", exif=block, save_all=True, append_images=[image("RGB", seed=1)]),
    }
    if 1 <= orientation <= 8:  # libtiff writes no other value
        files["tiff-lzw"] = encode(picture, "TIFF", tiffinfo={0x0112: orientation}, compression="tiff_lzw")
    if "AVIF" in Image.SAVE:
        files["avif"] = encode(picture, "AVIF", exif=block)
    return files


def every_orientation() -> dict[str, bytes]:
    """Files of every format that holds an orientation, for the eight valid values and two invalid ones."""
    Image.init()
    return {
        f"{name}-{orientation}": data
        for orientation in range(10)
        for name, data in _oriented(orientation).items()
    }


def bombs(width: int, height: int) -> dict[str, bytes]:
    """Tiny files whose headers promise width x height pixels (sides under 16384)."""
    size = struct.pack(">II", width, height)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", size + b"\x08\x02\0\0\0")
        + png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + png_chunk(b"IEND", b"")
    )
    jpeg = bytearray(encode(image("RGB"), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    gif = bytearray(encode(image("P"), "GIF"))
    gif[6:10] = struct.pack("<HH", width, height)
    bmp = bytearray(encode(image("RGB"), "BMP"))
    bmp[18:26] = struct.pack("<ii", width, height)
    vp8x = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    plain_webp = encode(image("RGB"), "WEBP", lossless=True)
    body = b"WEBPVP8X" + struct.pack("<I", 10) + vp8x + plain_webp[12:]
    tiff = encode(Image.new("1", (8, 8)), "TIFF")
    tiff = tiff.replace(struct.pack("<HHIHH", 256, 4, 1, 8, 0), struct.pack("<HHII", 256, 4, 1, width))
    tiff = tiff.replace(struct.pack("<HHIHH", 257, 4, 1, 8, 0), struct.pack("<HHII", 257, 4, 1, height))
    tga = bytearray(encode(image("RGB"), "TGA"))
    tga[12:16] = struct.pack("<HH", width, height)
    return {
        "png": png,
        "jpeg": bytes(jpeg),
        "gif": bytes(gif),
        "bmp": bytes(bmp),
        "webp": b"RIFF" + struct.pack("<I", len(body)) + body,
        "tiff": tiff,
        "tga": bytes(tga),
        "ppm": b"P6 %d %d 255\nshort" % (width, height),
        "qoi": b"qoif" + size + b"\3\0" + b"\0" * 32,
    }
