"""GIF files that were cut off or lost a part: found by their blocks, whatever byte they end in."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from encoder_service.errors import UndecodableClip
from encoder_service.ingest import video_gif
from encoder_service.ingest.video_file import open_clip
from encoder_service.ingest.video_gif import gif_blocks
from encoder_service.ingest.video_settings import ClipLimits
from tests.unit.ingest import clip_files

LIMITS = ClipLimits()
COUNT = 12


@pytest.fixture(scope="module")
def gif() -> bytes:
    frames = clip_files.moving(COUNT, 40, 56, np.random.default_rng(5))
    return clip_files.encode(frames, "gif.gif", fps=10)


def test_no_beginning_of_a_file_passes_for_the_whole(gif: bytes) -> None:
    """Many end in the very byte that ends a file, which may stand anywhere in a picture."""
    assert 0x3B in gif[:-1]
    for length in range(6, len(gif)):
        if gif[length - 1] == 0x3B or length % 97 == 0:
            with pytest.raises(UndecodableClip, match="GIF file is truncated") as raised:
                open_clip(gif[:length], LIMITS)
            assert (
                int(raised.value.details["found_bytes"]) == length < int(raised.value.details["needed_bytes"])
            )


def test_a_file_whose_rest_is_zeros_is_refused(gif: bytes) -> None:
    """As a download that was broken off leaves it, where room was made for all of it before."""
    for length in [*(place + 1 for place, byte in enumerate(gif[:-1]) if byte == 0x3B), len(gif) // 2]:
        with pytest.raises(UndecodableClip, match=r"truncated|damaged"):
            open_clip(gif[:length] + bytes(len(gif) - length), LIMITS)


def test_a_hole_between_pictures_is_refused(gif: bytes) -> None:
    start = gif.index(b"\x21\xf9\x04", len(gif) // 2)
    holed = gif[:start] + bytes(64) + gif[start + 64 :]
    with pytest.raises(UndecodableClip, match=r"damaged: byte \d+ is 0x00, where a block begins"):
        open_clip(holed, LIMITS)


def test_whole_files_are_taken_with_as_many_frames_as_blocks(gif: bytes) -> None:
    for data in (gif, gif + bytes(7), pillow_gif(optimize=False), pillow_gif(optimize=True)):
        clip = open_clip(data, LIMITS)
        assert clip.header.num_frames == COUNT == gif_blocks(data).num_pictures
        assert len(list(clip.frames(range(COUNT)))) == COUNT
        clip.close()


def pillow_gif(*, optimize: bool) -> bytes:
    """With tables of colours of each picture, comments and a count of repetitions."""
    rng = np.random.default_rng(2)
    first, *others = (
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)) for _ in range(COUNT)
    )
    file = io.BytesIO()
    first.save(
        file,
        "GIF",
        save_all=True,
        append_images=others,
        duration=80,
        loop=3,
        comment=b"; a;",
        optimize=optimize,
    )
    return file.getvalue()


def test_what_follows_the_end_is_no_part_of_it(gif: bytes) -> None:
    for rest in (b"and, more; of it", gif[gif.index(b"\x21\xf9\x04") :]):
        assert open_clip(gif + rest, LIMITS).header.num_frames == COUNT
    with pytest.raises(UndecodableClip, match=f"has {COUNT} pictures, of which {2 * COUNT} can be read"):
        open_clip(gif + gif, LIMITS)


def test_small_blocks_are_counted(gif: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_gif, "MAX_BLOCKS", 10)
    with pytest.raises(UndecodableClip, match="over 10 blocks, which is the limit"):
        open_clip(gif, LIMITS)
