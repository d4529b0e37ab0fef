"""Every frame at its own index: where a decoder leaves some out, and where times do not tell them apart."""

from __future__ import annotations

import io
import random

import av
import numpy as np
import pytest

from encoder_service.errors import UndecodableClip
from encoder_service.ingest.qwen_vl import qwen_indices
from encoder_service.ingest.video.av_file import LENIENT_METADATA
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import frames_of

LIMITS = ClipLimits(decode_threads=2)


def refreshed(monkeypatch: pytest.MonkeyPatch, container: str, count: int, every: int, fps: int) -> bytes:
    """H.264 as cameras and live streams send it: no whole picture after the first, a column of each frame is
    coded by itself instead, and frames where that begins are marked as ones to start at."""
    options = {"preset": "veryfast", "tune": "zerolatency", "intra-refresh": "1"}
    monkeypatch.setitem(clip_files.CODECS, "refresh", (container, "libx264", options))
    return clip_files.encode(clip_files.moving(count, 48, 128), "refresh", fps=fps, key_every=every)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("count", "every", "fps"), [(90, 30, 25), (150, 50, 30), (150, 30, 25), (140, 60, 30), (130, 120, 25)]
)
def test_frames_of_a_clip_that_is_refreshed_bit_by_bit(
    container: str, count: int, every: int, fps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that starts at such a mark leaves out frames until the picture is whole; the frames behind
    them are not those that were asked for."""
    data = refreshed(monkeypatch, container, count, every, fps)
    expected = clip_files.decoded(data)
    assert len(expected) == count
    for rate in (0.5, 1, 2, 4):
        indices = qwen_indices(count, fps, fps=rate, min_frames=4, max_frames=768)
        assert np.array_equal(frames_of(data, indices, LIMITS), expected[indices]), rate
    for _ in range(4):
        indices = sorted(random.sample(range(count), random.randint(1, 6)))
        assert np.array_equal(frames_of(data, indices, LIMITS), expected[indices]), indices


def test_the_first_frame_may_be_one_that_cannot_be_started_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimmed to where the picture is not whole yet."""
    from tests.unit.ingest.video.test_hostile import trimmed

    options = {"preset": "veryfast", "tune": "zerolatency", "intra-refresh": "1", "x264-params": "scenecut=0"}
    monkeypatch.setitem(clip_files.CODECS, "refresh.mp4", ("mp4", "libx264", options))
    data = trimmed(13, 10, 0, "refresh.mp4")
    expected = clip_files.decoded(data)
    assert np.array_equal(frames_of(data, None, LIMITS), expected)
    assert np.array_equal(frames_of(data, [0, 5], LIMITS), expected[[0, 5]])


def test_a_frame_that_damage_takes_away_fails_the_clip() -> None:
    """A key frame whose header says that it is none is skipped in silence, and frames behind it as well."""
    frames = clip_files.moving(40, 48, 64, np.random.default_rng(3))
    data = clip_files.encode(frames, fps=10, key_every=10, b_frames=0)
    offsets = [offset for offset, is_key in clip_files.packets(data) if is_key]
    damaged = bytearray(data)
    assert damaged[offsets[1] + 4] & 31 == 5
    damaged[offsets[1] + 4] = 42  # "end of sequence"
    for indices in ([0, 1, 2, 8, 9, 11, 15, 18, 19, 22, 24, 25, 31, 34], [10], [11, 25], list(range(40))):
        with pytest.raises(UndecodableClip):
            frames_of(bytes(damaged), indices, LIMITS)


@pytest.mark.parametrize("kind", ["h264.mp4", "h264.mkv"])
def test_a_file_whose_names_are_no_utf_8_is_read(kind: str) -> None:
    """Cameras write them in their own encoding; nobody here reads them."""
    data = clip_files.encode(clip_files.moving(10), kind, audio=False)
    expected = clip_files.decoded(data)
    for name in (b"VideoHandler", b"Lavf", b"Lavc"):
        data = data.replace(name, b"Cam\xe9ra"[: len(name)].ljust(len(name), b"\xff"))
    if LENIENT_METADATA:
        with pytest.raises(UnicodeDecodeError):
            av.open(io.BytesIO(data))
    assert np.array_equal(frames_of(data, None, LIMITS), expected)


@pytest.mark.parametrize("threads", [1, 8])
def test_frames_within_one_millisecond_are_taken_by_their_order(threads: int) -> None:
    """Matroska counts milliseconds, so that frames of a faster clip share their times."""
    data = clip_files.encode(clip_files.moving(45), "vp9.webm", fps=5000, key_every=10)
    expected = clip_files.decoded(data)
    assert len(expected) == 45
    clip = open_source(data, ClipLimits(decode_threads=threads))
    assert clip.header.num_frames == 45
    for _ in range(6):
        indices = sorted(random.sample(range(45), random.randint(1, 9)))
        found = np.stack([frame.numpy() for frame in clip.frames(indices)])
        assert np.array_equal(found, expected[indices]), indices
    assert list(clip.frames([])) == []
    clip.close()


def test_times_that_do_not_tell_the_order_are_refused() -> None:
    """A codec that reorders frames, with shared times; one that does not, with a time that runs backwards."""
    data = clip_files.encode(clip_files.moving(45), "h264.mkv", fps=5000, b_frames=2)
    with pytest.raises(UndecodableClip, match="h264 frames do not tell their order"):
        open_source(data, LIMITS)
    data = clip_files.encode(clip_files.moving(20), "vp9.webm", fps=10)
    offsets = [offset + 1 for offset, _ in clip_files.packets(data)]
    with pytest.raises(UndecodableClip, match="vp9 frames do not tell their order"):
        open_source(data[: offsets[13]] + bytes([0, 250]) + data[offsets[13] + 2 :], LIMITS)
