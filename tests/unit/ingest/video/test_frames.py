"""Any frames of a clip, by their index, are those of reading it from the first to the last."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import encode, moving, trimmed

# A rate that varies: the average counts, as for the reference.
PTS_MS = [0, 40, 50, 400, 420, 900, 1000, 1600, 1610, 1620, 2500, 2900]
TRIMS = ((0, 12), (3, 27), (7, 20), (10, 20), (13, 10), (25, 5))


# How a clip is written, its frames and its frames a second.
CLIPS: dict[str, tuple[Callable[[], bytes], int, float]] = {
    "sound beside the pictures": (lambda: encode(moving(15), audio=True), 15, 30),
    # Matroska counts milliseconds, so that frames of a faster clip share their times.
    "a fast clip": (lambda: encode(moving(45), "vp9.webm", fps=5000, key_every=10), 45, 5000),
    # The first frame shown is one that cannot be started at.
    "trimmed before it is whole": (lambda: trimmed(13, 10, "refreshed.mp4", 0), 10, 30),
}
for kind in clip_files.KINDS:
    for every in (None,) if kind == "gif.gif" else (1, 5, 12):
        written = partial(encode, moving(35), kind, key_every=every, fps=20)
        CLIPS[f"{kind}, {every}"] = written, 35, 20
for kind in ("h264.mp4", "h264.mkv"):
    CLIPS[f"variable, {kind}"] = partial(encode, moving(12), kind, pts=PTS_MS, fps=25), 12, 12 / 3
for kind in ("open.mp4", "open.mkv"):
    CLIPS[kind] = partial(encode, moving(60), kind, key_every=9), 60, 30
for kind in ("refreshed.mp4", "refreshed.mkv"):
    # A decoder that starts at a mark leaves out frames until the picture is whole.
    for count, every in ((90, 30), (140, 60), (130, 120)):
        written = partial(encode, moving(count, 48, 128), kind, key_every=every)
        CLIPS[f"{kind}, {every}"] = written, count, 30
for first, count in TRIMS:
    for b_frames in (0, 2):
        name = f"trimmed to {count} from {first}, {b_frames}"
        CLIPS[name] = partial(trimmed, first, count, "h264.mp4", b_frames), count, 30
for first, count in ((12, 18), (16, 5), (22, 8), (27, 1)):
    # It begins with a key frame whose followers, all hidden, lean on frames that were cut away.
    CLIPS[f"open, trimmed to {count}"] = partial(trimmed, first, count, "open.mp4"), count, 30


@pytest.mark.parametrize("name", CLIPS)
def test_any_frames_are_those_of_reading_it_through(name: str) -> None:
    write, count, fps = CLIPS[name]
    data = write()
    expected = clip_files.decoded(data)
    clip = open_source(data, ClipLimits(decode_threads=random.choice((1, 2, 8))))
    header = clip.header
    assert (header.num_frames, header.height, header.width) == expected.shape[:3]
    assert (header.num_frames, header.fps) == (count, pytest.approx(fps, rel=0.05))
    for number in (count, 1, *(random.randint(1, min(9, count)) for _ in range(4))):
        indices = sorted(random.sample(range(count), number))
        found = np.stack([frame.numpy() for frame in clip.frames(indices)])
        assert np.array_equal(found, expected[indices]), indices
    assert list(clip.frames([])) == []
    clip.close()
    clip.close()
