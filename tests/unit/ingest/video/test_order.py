"""Every frame at its own index: where a decoder leaves some out, and where times do not tell them apart."""

from __future__ import annotations

import numpy as np
import pytest

from encoder_service.errors import UndecodableClip
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import frames_of

LIMITS = ClipLimits(decode_threads=2)


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


def test_times_that_do_not_tell_the_order_are_refused() -> None:
    """A codec that reorders frames, with shared times; one that does not, with a time that runs backwards."""
    data = clip_files.encode(clip_files.moving(45), "h264.mkv", fps=5000, b_frames=2)
    with pytest.raises(UndecodableClip, match="h264 frames do not tell their order"):
        open_source(data, LIMITS)
    data = clip_files.encode(clip_files.moving(20), "vp9.webm", fps=10)
    offsets = [offset + 1 for offset, _ in clip_files.packets(data)]
    with pytest.raises(UndecodableClip, match="vp9 frames do not tell their order"):
        open_source(data[: offsets[13]] + bytes([0, 250]) + data[offsets[13] + 2 :], LIMITS)


@pytest.mark.parametrize("kind", ["h264.mp4", "h264.mkv"])
def test_a_file_whose_names_are_no_utf_8_is_read(kind: str) -> None:
    """Cameras write them in their own encoding; nobody here reads them."""
    data = clip_files.encode(clip_files.moving(10), kind)
    expected = clip_files.decoded(data)
    for name in (b"VideoHandler", b"Lavf", b"Lavc"):
        data = data.replace(name, b"Cam\xe9ra"[: len(name)].ljust(len(name), b"\xff"))
    assert np.array_equal(frames_of(data, None, LIMITS), expected)
