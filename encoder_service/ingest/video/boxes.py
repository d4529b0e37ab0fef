"""The boxes of an MP4 or QuickTime file: limits on its sample tables before a demuxer opens it.

Boxes are walked as FFmpeg's demuxer walks them (``libavformat/mov.c``), so that what it would allocate is
counted and nothing else: text in metadata is not structure. It descends into the same boxes at any level,
also into a track's ``udta`` and ``meta``, cuts a box to its parent, and reads a table's counts even where the
box is too short for them. It never descends into ``mdat``, ``free``, ``skip``, ``uuid``, or into a box that
it does not know. Nothing here decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.headers import image_brand

MAX_BOXES = 1 << 21
MAX_DEPTH = 12  # FFmpeg fails below
MIN_ENTRIES = 1 << 20
ENTRIES_PER_FRAME = 4  # a video sample and the audio samples that belong to it

# Boxes whose contents are boxes.
_PARENTS = frozenset(
    b"moov hoov trak mdia minf stbl edts dinf mvex moof traf tref udta ilst wave sinf schi iprp ipco".split()
)
_TRACK_TABLES = frozenset((b"stsz", b"stz2", b"elst"))  # they change nothing outside of a track


class Box(NamedTuple):
    """kind: four letters. header: where its size stands. start, end: of its contents, within its parent.
    stated_end: what its size says."""

    kind: bytes
    header: int
    start: int
    end: int
    stated_end: int


def boxes(data: bytes, start: int, end: int) -> Iterator[Box]:
    """The boxes between two offsets, each cut to the end; stops at one whose size cannot be right."""
    while start + 8 <= end:
        header, size, kind = (
            start,
            int.from_bytes(data[start : start + 4], "big"),
            data[start + 4 : start + 8],
        )
        start += 8
        if size == 1 and start + 8 <= end:
            size = int.from_bytes(data[start : start + 8], "big") - 8
            start += 8
        if size == 0:
            size = end - start + 8
        if size < 8:
            return
        stated_end = start + size - 8
        stop = min(end, stated_end)
        yield Box(kind, header, start, stop, stated_end)
        start = stop


def outer_end(data: bytes) -> int:
    """The offset at which the last of the outermost boxes with pictures or their tables states that it ends.
    Raises ClipTooLarge for too many boxes."""
    end = 0
    for num_boxes, box in enumerate(boxes(data, 0, len(data))):
        _check_number(num_boxes)
        if box.kind in (b"mdat", b"moof", b"moov"):
            end = max(end, box.stated_end)
    return end


def _check_number(num_boxes: int) -> None:
    if num_boxes > MAX_BOXES:
        raise ClipTooLarge(f"the MP4 file has over {MAX_BOXES} boxes, the limit", max_boxes=MAX_BOXES)


def check_tables(data: bytes, max_source_frames: int) -> None:
    """Limits the sample tables of an MP4 file. The demuxer keeps up to 150 bytes per entry, and a few bytes
    can announce hundreds of millions of entries: one size for that many samples, a fragment with as many, or
    an edit list that repeats them.

    Raises ClipTooLarge; UndecodableClip for a compressed header (cmov), which would hide the tables, for a
    file of images, for one without a header, and for a segment index that leads into the middle of a box.
    """
    _Walk(data, max(MIN_ENTRIES, ENTRIES_PER_FRAME * max_source_frames)).run()


class _Walk:
    """One pass over a file's boxes, and what its tables add up to."""

    def __init__(self, data: bytes, max_entries: int) -> None:
        self._data = data
        self._max_entries = max_entries
        self._num_boxes = self._num_tables = self._num_samples = self._num_edits = self._num_plain_bytes = 0
        self._handler = b""  # of the latest track
        self._indices: list[Box] = []

    def run(self) -> None:
        outer = set()
        has_header = False
        for box in boxes(self._data, 0, len(self._data)):
            outer.add(box.header)
            has_header |= box.kind == b"moov"
            self._visit(box, ())
        if not has_header:
            # Without one, the demuxer would search the padding for it.
            raise UndecodableClip("the MP4 file has no header: among its outermost boxes is no moov")
        for index in self._indices:
            self._check_index(index, outer)

    def _visit(self, box: Box, parents: tuple[bytes, ...]) -> None:
        self._num_boxes += 1
        _check_number(self._num_boxes)
        if box.kind == b"cmov":
            raise UndecodableClip("the MP4 file's header is compressed, which is not supported")
        if box.kind == b"ftyp" and (name := image_brand(self._data, box.header)):
            raise UndecodableClip(f"the file is {name}, which is no clip")
        if box.kind == b"trun" or (box.kind in _TRACK_TABLES and b"trak" in parents):
            self._count(box)
        elif box.kind == b"hdlr":
            self._note_handler(box)
        elif box.kind == b"sidx":
            self._indices.append(box)
        elif len(parents) < MAX_DEPTH:
            for start, end in self._contents(box):
                for child in boxes(self._data, start, end):
                    self._visit(child, (*parents, box.kind))

    def _contents(self, box: Box) -> Iterator[tuple[int, int]]:
        """Where boxes may begin within a box, and where they end."""
        if box.kind in _PARENTS:
            yield box.start, box.end
        elif box.kind == b"meta":
            # In QuickTime files boxes follow at once, in others behind four bytes: the demuxer seeks hdlr.
            at = self._data.find(b"hdlr", box.start, box.end)
            while at >= 0 and (at - box.start) % 4:
                at = self._data.find(b"hdlr", at + 1, box.end)
            self._num_boxes += (max(at, box.end * (at < 0)) - box.start) >> 12  # time counts too
            if at >= 0:
                yield at - 4, box.end
        elif box.kind == b"stsd":
            yield from self._sample_entries(box)

    def _sample_entries(self, box: Box) -> Iterator[tuple[int, int]]:
        """As ``_contents``, of a track's sample descriptions: boxes follow the fields of each, whose length
        depends on the kind of the media. An entry may exceed the box."""
        data, start = self._data, box.start + 8
        for _ in range(int.from_bytes(data[box.start + 4 : start], "big")):
            size = int.from_bytes(data[start : start + 4], "big")
            if size < 16 or start + 16 > len(data):
                return
            end = min(start + size, len(data))
            fields = [86 + _palette_bytes(data, start + 82)]
            if self._handler != b"vide":
                fields += [36, 52, 72]  # sound, in its three versions
            yield from ((start + length, end) for length in fields)
            start = end

    def _note_handler(self, box: Box) -> None:
        kind = self._data[box.start + 8 : box.start + 12]
        if kind == b"pict":
            raise UndecodableClip("the file is a sequence of images (HEIF or AVIF), which is no clip")
        if kind in (b"vide", b"soun"):
            self._handler = kind

    def _count(self, table: Box) -> None:
        data, at = self._data, table.start
        first, second = (int.from_bytes(data[offset : offset + 4], "big") for offset in (at + 4, at + 8))
        self._num_tables += 1
        match table.kind:
            case b"elst":
                self._num_edits += max(0, first - 1)
            case b"trun":
                self._num_samples += first
            case _:
                # Samples of equal size that are all in the file are uncompressed audio. The demuxer keeps one
                # entry per chunk for them.
                self._num_plain_bytes += first * second
                self._num_samples += 0 if first and self._num_plain_bytes <= len(data) else second
        found = max(self._num_tables, self._num_samples * (1 + self._num_edits))
        if found > self._max_entries:
            raise ClipTooLarge(
                f"the MP4 file's tables name {found} samples, with repeats; the limit is {self._max_entries}",
                found=found,
                max_entries=self._max_entries,
            )

    def _check_index(self, index: Box, outer: set[int]) -> None:
        """Raises UndecodableClip if a segment index that covers the file leads to an offset at which no box
        begins. The demuxer reads boxes from there (ISO/IEC 14496-12, section 8.16.3)."""
        data, start = self._data, index.start
        width = 8 if data[start : start + 1] > b"\0" else 4
        start += 12 + width
        at = index.end + int.from_bytes(data[start : start + width], "big")
        start += width + 4
        offsets = []
        for entry in range(start, start + 12 * int.from_bytes(data[start - 2 : start], "big"), 12):
            offsets.append(at)
            at += int.from_bytes(data[entry : entry + 4], "big") & 0x7FFFFFFF
        if (at == len(data) or data[at + 4 : at + 8] == b"mfra") and not outer.issuperset(offsets):
            raise UndecodableClip("the MP4 file's segment index leads to offsets at which no box begins")


def _palette_bytes(data: bytes, start: int) -> int:
    """The bytes of a QuickTime palette, which follows the fields of pictures of up to 8 bits. start: of the
    number of bits and the palette's number."""
    bits, palette = data[start + 1 : start + 2], data[start + 2 : start + 4]
    if not bits or bits[0] & 31 not in (1, 2, 4, 8) or bits[0] & 32 or palette != b"\0\0":
        return 0
    first, last = (
        int.from_bytes(data[at : at + size], "big") for at, size in ((start + 4, 4), (start + 10, 2))
    )
    return 8 + 8 * max(0, last - first + 1) if first <= 255 and last <= 255 else 8
