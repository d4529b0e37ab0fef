"""Clip files that ask for far more than they have, and files that are sound but hard to seek in."""

from __future__ import annotations

import struct
from typing import Any

import av
import numpy as np
import pytest

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video import av_file
from encoder_service.ingest.video.boxes import check_tables
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import boxes, frames_of, trimmed

LIMITS = ClipLimits()
MANY = 4_000_001


def replaced(bodies: dict[bytes, bytes], data: bytes | None = None) -> bytes:
    data = data or clip_files.encode(clip_files.moving(10), "mpeg4.mp4")
    return boxes(data, lambda kind, body: bodies.get(kind, body))


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", len(body) + 8, kind) + body


SIZES = box(b"stsz", struct.pack(">III", 0, 1, MANY))


def with_box(parent: bytes, child: bytes) -> bytes:
    """A file of 10 frames in which every box of one kind has a further child."""
    data = clip_files.encode(clip_files.moving(10), "mpeg4.mp4")
    return boxes(data, lambda kind, body: body + child if kind == parent else body)


def fragment_of(count: int) -> bytes:
    """A file whose one fragment says that it has so many samples, and spends no byte on any."""
    trun = struct.pack(">8sIIi", struct.pack(">I4s", 20, b"trun"), 1, count, 100)
    traf = struct.pack(">I4s", 8 + len(trun), b"traf") + trun
    moof = struct.pack(">I4s", 8 + len(traf), b"moof") + traf
    return clip_files.encode(clip_files.moving(3), "mpeg4.mp4") + moof


BOMBS = {
    "one size for all": lambda: replaced(
        {
            b"stsz": struct.pack(">III", 0, 1, MANY),
            b"stsc": struct.pack(">IIIII", 0, 1, 1, MANY, 1),
            b"stts": struct.pack(">IIII", 0, 1, MANY, 512),
        }
    ),
    "a fragment": lambda: fragment_of(MANY),
    "edits": lambda: replaced(
        {b"elst": struct.pack(">II", 0, 500_000) + struct.pack(">IiI", 1000, 0, 1 << 16) * 500_000}
    ),
    "in a track's user data": lambda: with_box(b"trak", box(b"udta", SIZES)),
    "in a track's metadata": lambda: with_box(
        b"trak", box(b"meta", bytes(4) + box(b"hdlr", bytes(25)) + SIZES)
    ),
    "in a track's QuickTime metadata": lambda: with_box(
        b"trak", box(b"meta", box(b"hdlr", bytes(25)) + SIZES)
    ),
    "behind the fields of a sample description": lambda: with_box(
        b"stbl", box(b"stsd", struct.pack(">II", 0, 1) + box(b"mp4v", bytes(78) + SIZES))
    ),
    "behind a palette": lambda: with_box(
        b"stbl",
        box(
            b"stsd",
            struct.pack(">II", 0, 1)
            + box(b"mp4v", bytes(74) + struct.pack(">HHIHH", 8, 0, 0, 0, 1) + bytes(16) + SIZES),
        ),
    ),
    "larger than its parent": lambda: with_box(b"stbl", struct.pack(">I", 0x7FFFFFFF) + SIZES[4:]),
    "too short for its counts": lambda: with_box(b"stbl", struct.pack(">I", 8) + SIZES[4:]),
    "a fragment in the user data behind a fragment": lambda: (
        fragment_of(1) + box(b"udta", box(b"trun", struct.pack(">II", 0, MANY)))
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_tables_that_ask_for_millions_are_refused_before_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = BOMBS[name]()

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("the demuxer was let near it")

    monkeypatch.setattr(av, "open", opened)
    with pytest.raises(ClipTooLarge, match=r"tables name \d+ samples.*limit is 4000000") as raised:
        open_source(data, LIMITS)
    assert int(raised.value.details["found"]) > int(raised.value.details["max_entries"]) == 4_000_000


@pytest.mark.parametrize("parent", [b"moov", b"udta", b"hoov"])
def test_a_compressed_header_is_refused(parent: bytes) -> None:
    data = replaced({}) + box(b"hoov", b"") + box(b"udta", b"")
    packed = boxes(data, lambda kind, body: body + box(b"cmov", bytes(20)) if kind == parent else body)
    with pytest.raises(UndecodableClip, match="header is compressed"):
        open_source(packed, LIMITS)


def test_padding_is_not_searched_for_a_header() -> None:
    data = replaced({})
    hidden = boxes(data, lambda kind, body: box(b"free", body) if kind == b"moov" else body)
    hidden = hidden.replace(b"moov", b"skip", 1)
    with pytest.raises(UndecodableClip, match="no header: among its outermost boxes is no moov"):
        open_source(hidden, LIMITS)


INDEXED = "frag_keyframe+empty_moov+default_base_moof+global_sidx"
WORDS = (b"trun", b"cmov", b"stsz", b"stz2", b"elst")
TEXTS = {
    "title": lambda word: with_box(
        b"moov", box(b"udta", box(b"\xa9nam", b"\0\x0a\0\0a " + word + b"k of a tree"))
    ),
    "iTunes comment": lambda word: with_box(
        b"moov",
        box(
            b"udta",
            box(
                b"meta",
                bytes(4)
                + box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
                + box(b"ilst", box(b"\xa9cmt", box(b"data", bytes(7) + b"\1" + word * 9))),
            ),
        ),
    ),
    "XMP": lambda word: with_box(b"moov", box(b"uuid", bytes(16) + b"<x>" + word * 8 + b"</x>")),
    "XMP in user data": lambda word: with_box(b"moov", box(b"udta", box(b"XMP_", b"<x>" + word * 8))),
    "XMP behind all": lambda word: replaced({}) + box(b"uuid", bytes(16) + word * 8),
    "free": lambda word: with_box(b"trak", box(b"free", shaped(word))),
    "skip": lambda word: with_box(b"stbl", box(b"skip", shaped(word))),
    "free behind all": lambda word: replaced({}) + box(b"free", shaped(word)),
    "pictures": lambda word: replaced({}) + box(b"mdat", shaped(word)),
    "unknown box": lambda word: with_box(b"moov", box(b"wxyz", shaped(word))),
    "unknown box of a track": lambda word: with_box(b"minf", box(b"wxyz", shaped(word))),
    "handler's name": lambda word: replaced({}).replace(b"VideoHandler", word * 3),
}


def shaped(word: bytes) -> bytes:
    """A box of this name that announces billions of entries."""
    return box(word, struct.pack(">III", 0, 1, 0xFFFFFFFF))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", TEXTS)
def test_p49_text_in_metadata_is_not_structure(name: str, word: bytes) -> None:
    """Titles with "trunk" and padding of any bytes."""
    data = TEXTS[name](word)
    assert word in data
    assert np.array_equal(frames_of(data), clip_files.decoded(data))


@pytest.mark.parametrize("word", [b"stsz", b"stz2", b"elst"])
@pytest.mark.parametrize("kind", [b"udta", b"meta"])
def test_p49_tables_in_a_films_metadata_are_none(kind: bytes, word: bytes) -> None:
    """Those of a track's metadata are: the demuxer reads them."""
    body = bytes(4) + box(b"hdlr", bytes(25)) if kind == b"meta" else b""
    data = with_box(b"moov", box(kind, body + shaped(word)))
    assert np.array_equal(frames_of(data), clip_files.decoded(data))


def test_p49_a_name_of_a_compressor_is_no_table() -> None:
    data = replaced({})
    at = data.index(b"mp4v") + 46
    data = data[:at] + b"\x0fx264 trunk buil" + data[at + 16 :]
    assert np.array_equal(frames_of(data), clip_files.decoded(data))


def test_an_index_that_leads_into_the_middle_of_a_box_is_refused() -> None:
    """The demuxer reads boxes from wherever an index of segments leads, also among the pictures."""
    data = clip_files.encode(clip_files.moving(40), key_every=10, b_frames=0, flags=INDEXED)
    assert np.array_equal(frames_of(data), clip_files.decoded(data))
    at = data.index(b"sidx") + 36
    first, second = (int.from_bytes(data[index : index + 4], "big") for index in (at, at + 12))
    moved = bytearray(data)
    moved[at : at + 4], moved[at + 12 : at + 16] = (
        size.to_bytes(4, "big") for size in (first - 16, second + 16)
    )
    with pytest.raises(UndecodableClip, match="segment index leads to offsets at which no box begins"):
        open_source(bytes(moved), LIMITS)


def test_letters_within_the_pictures_are_no_tables() -> None:
    """Media may hold any bytes; so many values of plain sound, whose bytes are all there, are none either."""
    bomb = b"stsz" + struct.pack(">III", 0, 0, MANY) + b"cmov"
    data = clip_files.encode(clip_files.moving(5), "mpeg4.mp4")
    data += struct.pack(">I4s", 8 + len(bomb), b"mdat") + bomb
    assert open_source(data, LIMITS).header.num_frames == 5

    sound = box(b"moov", box(b"trak", SIZES))
    check_tables(struct.pack(">I4s", 8 + MANY, b"mdat") + bytes(MANY) + sound, 1000)
    with pytest.raises(ClipTooLarge):
        check_tables(sound, 1000)


def test_small_boxes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.ingest.video.boxes.MAX_BOXES", 100)
    for data in (box(b"free", b"") * 101, box(b"moov", box(b"free", b"") * 101)):
        with pytest.raises(ClipTooLarge, match="over 100 boxes"):
            open_source(data, LIMITS)


@pytest.mark.parametrize("kind", ["h264.mp4", "vp9.webm", "av1.webm", "gif.gif"])
def test_frames_above_the_limit_are_not_decoded_to_learn_of_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default FFmpeg decodes the first frames of every track to open a file."""
    data, opened, inner = clip_files.encode(clip_files.moving(3), kind), [], av.open

    def noted(*args: Any, **kwargs: Any) -> Any:
        opened.append(kwargs["options"]["codec_whitelist"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(av, "open", noted)
    monkeypatch.setattr(av_file.AvFile, "_decode", lambda *_: pytest.fail("was decoded"))
    with pytest.raises(ClipTooLarge, match="64x48 = 3072 pixels, the limit is 3071"):
        open_source(data, ClipLimits(max_frame_pixels=3071))
    assert opened == ["none"]


def test_a_clip_that_hides_most_of_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg seeks among hidden frames in quadratic time: minutes, for a million of a byte each."""
    data = trimmed(7, 3, b_frames=0)
    open_source(data, LIMITS).close()
    monkeypatch.setattr(av_file, "MAX_HIDDEN", 5)
    with pytest.raises(ClipTooLarge, match="over 5 frames that its edit list hides"):
        open_source(data, LIMITS)
