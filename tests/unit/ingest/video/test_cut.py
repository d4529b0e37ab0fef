"""Clips that were cut between two key frames: frames that depend on what was cut away are not shown."""

from __future__ import annotations

import random

import numpy as np
import pytest

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import frames_of

EVERY = "keyint=12:min-keyint=12:scenecut=0:b-adapt=0"
CODECS = {
    "H.264, open groups": ("libx264", {"x264-params": f"open-gop=1:bframes=2:b-pyramid=none:{EVERY}"}),
    "H.264, open groups with pyramids": (
        "libx264",
        {"x264-params": f"open-gop=1:bframes=3:b-pyramid=normal:{EVERY}"},
    ),
    "H.264, closed groups": ("libx264", {"x264-params": f"bframes=3:{EVERY}"}),
    "H.264, refreshed bit by bit": (
        "libx264",
        {"preset": "veryfast", "tune": "zerolatency", "intra-refresh": "1", "g": "12"},
    ),
    "H.265, RASL": (
        "libx265",
        {"preset": "ultrafast", "x265-params": f"log-level=none:open-gop=1:bframes=4:{EVERY}"},
    ),
    "H.265, RADL": (
        "libx265",
        {"preset": "ultrafast", "x265-params": f"log-level=none:open-gop=0:radl=2:bframes=4:{EVERY}"},
    ),
    "MPEG-2": ("mpeg2video", {"bf": "2", "g": "12"}),
}


def encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    codec, options = CODECS[name]
    monkeypatch.setitem(clip_files.CODECS, "whole.mkv", ("matroska", codec, options))
    return clip_files.encode(clip_files.moving(40), "whole.mkv")


@pytest.mark.parametrize("container", ["matroska", "mp4", "mov"])
@pytest.mark.parametrize("name", CODECS)
def test_p52_a_clip_that_starts_between_key_frames_shows_its_decodable_frames(
    name: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(name, monkeypatch)
    for num_packets in (2, 5, 9, 14):
        data = clip_files.cut(whole, num_packets, container)
        expected = clip_files.decoded(data)
        assert 12 < len(expected) < 40
        limits = ClipLimits(decode_threads=random.choice((1, 2, 8)))
        assert np.array_equal(frames_of(data, None, limits), expected), num_packets
        indices = sorted(random.sample(range(len(expected)), 4))
        assert np.array_equal(frames_of(data, indices, limits), expected[indices]), (num_packets, indices)


@pytest.mark.parametrize("kind", ["vp8.webm", "vp9.webm"])
def test_p52_codecs_without_reordering_start_at_their_first_key_frame(kind: str) -> None:
    data = clip_files.encode(clip_files.moving(30), kind, key_every=10)
    found = frames_of(clip_files.cut(data, 3, "webm"))
    assert np.array_equal(found, clip_files.decoded(data)[10:])


def test_p52_damage_behind_the_start_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip_files.cut(encoded("H.264, open groups", monkeypatch), 5, "mp4")
    packets = clip_files.packets(data)
    keys = [index for index, (_, is_key) in enumerate(packets) if is_key]
    for index in (keys[0] + 20, keys[1], keys[2], len(packets) - 1):
        at = packets[index][0] + 1  # within the length of a unit
        with pytest.raises(UndecodableClip):
            frames_of(data[:at] + b"\x7f" + data[at + 1 :])


def test_frames_that_are_tried_count_as_decoded_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip_files.cut(encoded("H.264, open groups", monkeypatch), 5, "matroska")
    with pytest.raises(ClipTooLarge, match="takes 3 frames = 9216 pixels, the limit is 9215"):
        open_source(data, ClipLimits(max_decoded_pixels=3 * 64 * 48 - 1))
