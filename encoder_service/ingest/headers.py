"""What the first bytes of a file state, read before a decoder opens it.

Owns the names of formats by their signatures, the brands of ISO files, the canvas size of WebP, and which
headers are those of a TGA file. Damage is reported by the decoder.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class ImageSize(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


# Signatures at the start of a file, and the format in the words of an error message.
_SIGNATURES = (
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"icns", "an Apple icon (ICNS)"),
    (b"8BPS", "a Photoshop image (PSD)"),
    (b"%!PS", "a PostScript file (EPS)"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file (EPS)"),
    (b"%PDF", "a PDF document"),
    (b"DDS ", "a DirectDraw surface (DDS)"),
    (b"SIMPLE  =", "a FITS image"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GRIB", "a GRIB file"),
    (b"\xd7\xcd\xc6\x9a", "a Windows metafile (WMF)"),
    (b"/* XPM */", "an XPM image"),
    (b"#define", "an XBM image"),
    (b"v/1\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance image (HDR)"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 file"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
    (b"FLV", "a Flash video (FLV)"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a Windows Media file (ASF, WMV)"),
    (b"OggS", "an Ogg file"),
    (b"\0\0\1\xba", "an MPEG program stream"),
    (b"\0\0\1\xb3", "an MPEG video stream"),
    (b"\x06\x0e\x2b\x34", "an MXF file"),
    (b".RMF", "a RealMedia file"),
    (b"#EXTM3U", "a playlist"),
    (b"ID3", "an MP3 file"),
    (b"fLaC", "a FLAC file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
)
_ICONS = {b"\0\0\1\0": "a Windows icon (ICO)", b"\0\0\2\0": "a Windows cursor (CUR)"}
_RIFF = {b"WEBP": "a WebP image", b"AVI ": "an AVI file", b"WAVE": "a WAV file"}
# Brands of ISO files that hold images or sequences of images (ISO/IEC 23008-12, AV1 Image File Format,
# registered by MP4RA).
_IMAGE_BRANDS = {
    **dict.fromkeys((b"avif", b"avis", b"avio", b"MA1A", b"MA1B"), "an AVIF image or image sequence"),
    **dict.fromkeys(
        (
            b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"mif2", b"mif3",
            b"msf1", b"miaf", b"MiHE", b"MiHA", b"MiHB", b"MiHM", b"MiAn", b"MiPr", b"avci", b"avcs", b"vvic",
            b"vvis", b"j2ki", b"j2is", b"jpeg", b"jpgs", b"unif", b"evbi", b"evbs", b"1pic",
        ),
        "a HEIF or HEIC image or image sequence",
    ),
    b"crx ": "a Canon raw image (CR3)",
    **dict.fromkeys((b"jp2 ", b"jpx ", b"jpm ", b"jph ", b"mjp2", b"mj2s"), "a JPEG 2000 file"),
    b"jxl ": "a JPEG XL image",
}  # fmt: skip


def brands_of(data: bytes, start: int = 0) -> tuple[bytes, ...]:
    """The major brand and the compatible brands of the ``ftyp`` box at ``start``; empty for another box."""
    size = int.from_bytes(data[start : start + 4], "big")
    if data[start + 4 : start + 8] != b"ftyp":
        return ()
    end = min(start + size, len(data), start + 4096)
    return data[start + 8 : start + 12], *(data[at : at + 4] for at in range(start + 16, end - 3, 4))


def image_brand(data: bytes, start: int = 0) -> str | None:
    """What an ISO file whose major brand is that of images holds, in words; None for another brand."""
    brands = brands_of(data, start)
    name = _IMAGE_BRANDS.get(brands[0]) if brands else None
    # The brands of all HEIF files; another one tells the coding.
    if name and brands[0] in (b"mif1", b"mif2", b"mif3", b"msf1", b"miaf"):
        name = next(
            (_IMAGE_BRANDS[brand] for brand in brands if _IMAGE_BRANDS.get(brand, name) != name), name
        )
    return name


def format_name(data: bytes) -> str | None:
    """What the file's signature says that it is, in words, with an article; None for an unknown one."""
    if data[:4] == b"RIFF" and len(data) >= 12:
        return _RIFF.get(bytes(data[8:12]), "a RIFF file")
    if data[4:8] == b"ftyp":
        brand = bytes(data[8:12]).decode("latin-1")
        return f"{image_brand(data) or 'an MP4 or other ISO file'} of brand {brand!r}"
    if data[4:8] in (b"moov", b"mdat", b"wide"):
        return "a QuickTime file"
    if data[:1] == b"G" and data[188:189] == b"G" and data[376:377] == b"G":
        return "an MPEG transport stream"
    if data[:4] in _ICONS and data[4:6] not in (b"\0\0", b""):  # the number of its images; 0 in a TGA file
        return _ICONS[bytes(data[:4])]
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    text = bytes(data[:256]).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in data[:4096].lower()):
        return "an SVG drawing"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<")):
        return "HTML or XML text"
    return None


def is_tga(data: bytes) -> bool:
    """Whether the data may be a TGA file, which has no signature: every field of its header has a value that
    the others allow (Truevision TGA specification 2.0)."""
    if len(data) < 18:
        return False
    has_map, kind, map_start, map_length, map_bits = struct.unpack_from("<xBBHHB", data)
    width, height, bits, flags = struct.unpack_from("<4xHHBB", data, 8)
    if not (width and height) or has_map > 1 or flags >> 6:
        return False
    alpha_bits = flags & 15
    if has_map:
        if not map_length or map_start + map_length > 1 << 16 or map_bits not in (15, 16, 24, 32):
            return False
    elif map_start or map_length or map_bits:
        return False
    match kind:
        case 1 | 9:
            return bool(has_map) and bits == 8 and alpha_bits in (0, 8)
        case 2 | 10:
            return (bits, alpha_bits) in ((16, 0), (16, 1), (24, 0), (32, 0), (32, 8))
        case 3 | 11:
            return (bits, alpha_bits) in ((1, 0), (8, 0), (8, 8), (16, 0), (16, 8))
    return False


def webp_size(data: bytes) -> ImageSize | None:
    """The canvas size of a WebP file (RFC 9649, sections 2.5 to 2.7); None for other data. Pillow's plugin
    allocates the canvas while it opens the file."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return ImageSize(height & 0x3FFF, width & 0x3FFF)
        case b"VP8L" if data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return ImageSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
        case b"VP8X":
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
            return ImageSize(height, width)
    return None
