"""Checks of a clip file's bytes before a demuxer opens it.

Owns the accepted containers and the check that a file was not truncated. FFmpeg does neither: it would try
all its demuxers (among them playlists, which name other files), and it stops without an error where a
truncated file ends. ``boxes`` owns the limits on an MP4 file's tables. Nothing here decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from encoder_service.errors import UndecodableClip
from encoder_service.ingest.headers import brands_of, format_name, image_brand
from encoder_service.ingest.video.boxes import outer_end

Container: TypeAlias = Literal["mov", "matroska", "gif"]
# From FFmpeg's name of the demuxer to the name in error messages.
CONTAINER_NAMES: dict[Container, str] = {"mov": "MP4", "matroska": "Matroska", "gif": "GIF"}
ACCEPTED = "MP4 and QuickTime, WebM, Matroska and GIF"

# Boxes that begin an ISO or QuickTime file. Old files have no ftyp.
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
# Brands of films: one has to be among a file's major and compatible brands (registered by MP4RA; the last
# line has brands of cameras and players that name no other one).
_FILM_BRANDS = frozenset(
    brand.ljust(4)
    for brand in (
        b"isom iso2 iso3 iso4 iso5 iso6 iso7 iso8 iso9 isoa isob isoc mp41 mp42 mp71 mp21 avc1 avc2 avc3 "
        b"avc4 hvc1 hev1 av01 vp08 vp09 qt M4V M4VH M4VP M4A M4P F4V F4P f4v dash msdh msix cmfc cmf2 cmfs "
        b"cmff cmfl piff isml dby1 XAVC MSNV mmp4 CAEP niko pana kddi NDSC NDSH NDSM NDSP NDSS NDXC NDXH "
        b"NDXM NDXP NDXS"
    ).split()
)
_EBML, _SEGMENT, _DOC_TYPE = 0x1A45DFA3, 0x18538067, 0x4282
_3GPP = (b"3gp", b"3gg", b"3ge", b"3gs", b"3gr", b"3gh", b"3gm", b"3gt", b"3gf", b"3g2")


def container_of(data: bytes) -> Container:
    """The container that the first bytes indicate. Raises UndecodableClip for any other file."""
    if data[4:8] in _FIRST_BOXES and _holds_film(data):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3" and _doc_type(data) in (b"matroska", b"webm", None):
        return "matroska"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    name = format_name(data)
    if name == "a Matroska or WebM file":
        name = f"an EBML file of type {_doc_type(data)!r}"
    what = f"is {name}, which" if name else f"starts with {bytes(data[:16])!r}, which"
    raise UndecodableClip(
        f"the file of {len(data)} bytes {what} is no clip that can be read; accepted are {ACCEPTED}",
        found_bytes=len(data),
    )


def _holds_film(data: bytes) -> bool:
    """Whether an ISO file's brands are those of a film. A file without ftyp is an old QuickTime one."""
    brands = brands_of(data)
    if data[4:8] != b"ftyp" or len(brands) < 1:
        return True
    is_known = any(brand in _FILM_BRANDS or brand.startswith(_3GPP) for brand in brands)
    return is_known and image_brand(data) is None


def check_whole(data: bytes, container: Container) -> None:
    """Raises UndecodableClip for a file that is shorter than it states, ClipTooLarge for an MP4 file with too
    many boxes."""
    match container:
        case "mov":
            needed = outer_end(data)
        case "matroska":
            needed = _matroska_end(data)
        case "gif":
            needed, _ = _gif_ends(data)
    if needed > len(data):
        raise UndecodableClip(
            f"the {CONTAINER_NAMES[container]} file is truncated: it has {len(data)} bytes, needs at least "
            f"{needed}",
            found_bytes=len(data),
            needed_bytes=needed,
        )


def gif_pictures(data: bytes) -> bytes:
    """A whole GIF up to its last picture, with a trailer. FFmpeg takes extensions behind it for a picture."""
    _, end = _gif_ends(data)
    return data if data[end : end + 1] == b";" else data[:end] + b";"


def _gif_ends(data: bytes) -> tuple[int, int]:
    """The offsets after a GIF's last block and after its last picture. A file that ends between two blocks is
    whole, as for browsers; of one that ends within a block, the first offset is beyond the data (GIF89a,
    sections 15 and 18 to 27)."""

    def table_bytes(offset: int) -> int:
        flags = data[offset] if offset < len(data) else 0
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    at = pictures_end = 13 + table_bytes(10)
    while at < len(data) and data[at] != 0x3B:
        if data[at] not in (0x21, 0x2C):
            raise UndecodableClip(
                f"the GIF file is damaged: byte {at} is 0x{data[at]:02x}, which begins no block", byte=at
            )
        is_picture = data[at] == 0x2C
        at += 2 if data[at] == 0x21 else 11 + table_bytes(at + 9)
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
        if is_picture:
            pictures_end = at
    has_pictures = pictures_end > 13 + table_bytes(10)
    return at if has_pictures else at + 1, pictures_end


class _Element(NamedTuple):
    """An EBML element. end: None if it does not state its length."""

    identity: int
    start: int
    end: int | None


def _elements(data: bytes, start: int, end: int) -> Iterator[_Element]:
    """The EBML elements between two offsets (RFC 8794, sections 4 and 5). Ends at one that is cut off within
    its identity or length, and after one without a length."""
    while start < end:
        numbers = []
        for _ in range(2):
            width = 9 - data[start].bit_length() if start < end and data[start] else 9
            if start + width > end:
                return
            numbers.append((int.from_bytes(data[start : start + width], "big"), width))
            start += width
        (identity, _), (raw, width) = numbers
        size = raw & ((1 << 7 * width) - 1)
        stop = None if size == (1 << 7 * width) - 1 else start + size
        yield _Element(identity, start, stop)
        if stop is None:
            return
        start = stop


def _doc_type(data: bytes) -> bytes | None:
    """The document type in an EBML file's header; None if it states none."""
    for header in _elements(data, 0, len(data)):
        for element in _elements(data, header.start, min(header.end or 0, len(data), header.start + 4096)):
            if element.identity == _DOC_TYPE:
                return bytes(data[element.start : element.end][:64]).rstrip(b"\0")
        break
    return None


def _matroska_end(data: bytes) -> int:
    """The offset at which the segment states that it ends; 0 if it does not state this, as in a live
    recording."""
    found = list(itertools.islice(_elements(data, 0, len(data)), 2))
    if len(found) < 2 and not (found and found[0].end is None):
        return len(data) + 1
    is_known = [element.identity for element in found] == [_EBML, _SEGMENT]
    return (found[1].end or 0) if is_known else 0
