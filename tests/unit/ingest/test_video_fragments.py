"""Fragmented MP4 files that were cut between two fragments, and whole ones."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from encoder_service.errors import UndecodableClip
from encoder_service.ingest import video_fragments
from encoder_service.ingest.video_file import open_clip
from encoder_service.ingest.video_settings import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.test_video_hostile import boxes

LIMITS = ClipLimits()
COUNT, FPS = 30, 10
EMPTY = "frag_keyframe+empty_moov+default_base_moof"


def fragmented(flags: str = EMPTY, b_frames: int = 0, audio: bool = False) -> bytes:
    """COUNT frames, a fragment of each 5."""
    with tempfile.TemporaryDirectory() as folder:
        return _written(Path(folder) / "clip.mp4", flags, b_frames, audio)


def _written(path: Path, flags: str, b_frames: int, audio: bool) -> bytes:
    """By its name: an index in front is written by reading the file again."""
    with av.open(str(path), "w", format="mp4", options={"movflags": flags}) as out:
        options = {"preset": "veryfast", "g": "5", "bf": str(b_frames), "x264-params": "scenecut=0"}
        stream = out.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        if audio:
            clip_files._add_tone(out, COUNT / FPS)
        for image in clip_files.moving(COUNT):
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)
    return path.read_bytes()


def cuts(data: bytes) -> list[int]:
    """Where fragments but the first begin."""
    found, start = [], 0
    while start < len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        if kind == b"moof":
            found.append(start)
        start += size
    return found[1:]


def with_mehd(data: bytes, ticks: int) -> bytes:
    box = struct.pack(">I4sII", 16, b"mehd", 0, ticks)
    return boxes(data, lambda kind, body: box + body if kind == b"mvex" else body)


def with_mvhd(data: bytes, ticks: int) -> bytes:
    def stated(kind: bytes, body: bytes) -> bytes:
        return body[:16] + struct.pack(">I", ticks) + body[20:] if kind == b"mvhd" else body

    return boxes(data, stated)


MOVIE_TICKS = 1000 * COUNT // FPS  # FFmpeg's movies count milliseconds
SAYING: dict[str, Callable[[], bytes]] = {
    "mehd": lambda: with_mehd(fragmented(), MOVIE_TICKS),
    "mvhd": lambda: with_mvhd(fragmented(), MOVIE_TICKS),
    "sidx": lambda: fragmented(EMPTY + "+global_sidx"),
}


@pytest.mark.parametrize("name", SAYING)
def test_a_file_that_says_more_is_refused_at_every_cut(name: str) -> None:
    data = SAYING[name]()
    assert open_clip(data, LIMITS).header.num_frames == COUNT
    assert len(cuts(data)) == COUNT // 5 - 1
    for cut in cuts(data):
        with pytest.raises(UndecodableClip, match="MP4 file is truncated"):
            open_clip(data[:cut], LIMITS)


def test_a_table_of_fragments_names_one_that_is_gone() -> None:
    data = fragmented()
    second, third = cuts(data)[1:3]
    with pytest.raises(UndecodableClip, match="names 6 fragments and has 5"):
        open_clip(data[:second] + data[third:], LIMITS)


def test_a_file_that_says_nothing_is_the_shorter_clip() -> None:
    """As a recording that was broken off: every part of it is whole."""
    data = fragmented()
    for num_fragments, cut in enumerate(cuts(data), 1):
        assert open_clip(data[:cut], LIMITS).header.num_frames == 5 * num_fragments


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        "frag_keyframe",
        EMPTY,
        EMPTY + "+global_sidx",
        "dash+global_sidx",
        "cmaf",
        "frag_keyframe+separate_moof",
    ],
)
def test_whole_files_are_taken(flags: str, audio: bool, b_frames: int) -> None:
    data = fragmented(flags, b_frames, audio)
    expected = clip_files.decoded(data)
    for file in (data, with_mehd(data, MOVIE_TICKS)) if flags == EMPTY else (data,):
        clip = open_clip(file, LIMITS)
        assert clip.header.num_frames == COUNT
        found = np.stack([frame.numpy() for frame in clip.frames(range(COUNT))])
        assert np.array_equal(found, expected)
        clip.close()


def test_an_unknown_duration_says_nothing() -> None:
    assert open_clip(with_mvhd(fragmented(), (1 << 32) - 1), LIMITS).header.num_frames == COUNT


def test_small_boxes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fragmented()
    monkeypatch.setattr(video_fragments, "MAX_INNER_BOXES", 20)
    with pytest.raises(UndecodableClip, match="over 20 boxes"):
        open_clip(data, LIMITS)
