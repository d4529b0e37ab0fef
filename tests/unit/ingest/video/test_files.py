"""Clip files: which frames come, what is refused, and with which reason."""

from __future__ import annotations

import contextlib
import random
import re

import numpy as np
import pytest

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits
from tests.unit.ingest import clip_files
from tests.unit.ingest.clip_files import frames_of

LIMITS = ClipLimits()


# What is refused


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "of 0 bytes"),
        (
            b"just some text, and more of it",
            "starts with b'just .*no clip that can be read; accepted are MP4",
        ),
        (b"\x00\x00\x00\x08ftyp", "file of 8 bytes is an MP4 or other ISO file of brand ''"),
        (b"GIF89a;", "GIF file is truncated"),
    ],
)
def test_other_files_are_refused_with_what_they_are(data: bytes, text: str) -> None:
    with pytest.raises(UndecodableClip, match=text):
        open_source(data, LIMITS)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_files_without_pictures_are_refused(container: str) -> None:
    with pytest.raises(UndecodableClip, match=r"0 video streams, needs 1; its streams: audio"):
        open_source(clip_files.audio_only(container), LIMITS)


@pytest.mark.parametrize("kind", clip_files.KINDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_files_that_were_cut_off_are_refused(kind: str, share: float) -> None:
    data = clip_files.encode(clip_files.moving(20), kind)
    cut = data[: int(len(data) * share)]
    with pytest.raises(UndecodableClip) as raised:
        frames_of(cut)
    assert "truncated: it has" in str(raised.value)
    assert raised.value.details["found_bytes"] == str(len(cut))


@pytest.mark.parametrize("flags", ["faststart", "frag_keyframe+empty_moov"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_streamed_mp4_that_was_cut_off_is_refused(flags: str, share: float) -> None:
    """The header comes first."""
    frames = clip_files.moving(40, 96, 128, np.random.default_rng(7))
    data = clip_files.encode(frames, key_every=10, b_frames=0, flags=flags)
    assert np.array_equal(frames_of(data), clip_files.decoded(data))
    with pytest.raises(UndecodableClip, match="truncated"):
        frames_of(data[: int(len(data) * share)])


def test_no_part_of_a_gif_passes_for_the_whole() -> None:
    """Its last byte may stand anywhere in a picture; a broken download may leave zeros for the rest. A file
    that ends between two blocks is whole, as for browsers."""
    gif = clip_files.encode(clip_files.moving(12, 40, 56, np.random.default_rng(5)), "gif.gif", fps=10)
    assert 0x3B in gif[:-1]
    ends = ends_of_blocks(gif)
    assert len(ends) > 20
    for length in range(14, len(gif)):
        if length not in ends and (gif[length - 1] == 0x3B or length % 97 == 0):
            with pytest.raises(UndecodableClip, match=r"truncated|damaged"):
                open_source(gif[:length], LIMITS)
            with pytest.raises(UndecodableClip, match=r"truncated|damaged"):
                open_source(gif[:length] + bytes(len(gif) - length), LIMITS)
    for rest in (bytes(7), b"and, more; of it"):
        assert open_source(gif + rest, LIMITS).header.num_frames == 12
    for length in sorted(ends)[-6:]:
        assert np.array_equal(frames_of(gif[:length]), clip_files.decoded(gif[:length] + b";"))


def ends_of_blocks(gif: bytes) -> set[int]:
    """The offsets behind each picture and extension."""
    ends, at = set(), 13 + (3 << (gif[10] & 7) + 1 if gif[10] & 128 else 0)
    while gif[at] != 0x3B:
        at += 2 if gif[at] == 0x21 else 11 + (3 << (gif[at + 9] & 7) + 1 if gif[at + 9] & 128 else 0)
        while gif[at]:
            at += 1 + gif[at]
        at += 1
        ends.add(at)
    return ends


@pytest.mark.parametrize("kind", clip_files.KINDS)
def test_damage_fails_the_clip_or_leaves_whole_frames(kind: str) -> None:
    """Nothing but our own errors leaves, whatever bytes are flipped."""
    data = clip_files.encode(clip_files.moving(12), kind)
    rng = random.Random()
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 12)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(UndecodableClip, ClipTooLarge):
            frames = frames_of(bytes(damaged))
            assert frames.dtype == np.uint8
            assert frames.ndim == 4
    with pytest.raises(UndecodableClip):
        frames_of(bytes(len(data)))


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_encoded_bytes": 100}, r"has \d+ bytes, the limit is 100"),
        ({"max_frame_pixels": 64 * 48 - 1}, r"64x48 = 3072 pixels, the limit is 3071"),
        ({"max_duration_s": 1.5}, r"lasts 2\.0 s, the limit is 1\.5 s"),
        ({"max_source_frames": 59}, r"at least (59|60) frames.*limit"),
    ],
)
@pytest.mark.parametrize("kind", ["h264.mp4", "vp9.webm", "gif.gif"])
def test_limits_name_both_numbers(kind: str, limit: dict[str, float], text: str) -> None:
    data = clip_files.encode(clip_files.moving(60), kind, fps=30)
    with pytest.raises(ClipTooLarge) as raised:
        open_source(data, ClipLimits(**limit))  # type: ignore[arg-type]
    assert re.search(text, str(raised.value)), raised.value
    assert "file" in str(raised.value) or "clip" in str(raised.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(1, "Operation not permitted"), "depends on frames that the file does not have"),
        (ValueError(22, "Invalid argument"), "a field has a value that is not allowed"),
        (OSError(22, "Invalid argument"), "a field has a value that is not allowed"),
        (OSError(0, "Invalid data found when processing input"), "its data cannot be decoded"),
        (EOFError(0, "End of file"), "it ends too early"),
        (OSError(0, "Not yet implemented in FFmpeg, patches welcome"), "a feature that the decoder lacks"),
        (OSError(0, "Internal bug, should not have happened"), r"the decoder failed \(OSError\)"),
        (MemoryError(12, "Cannot allocate memory"), "more memory than a decoder may use"),
    ],
)
def test_errors_of_ffmpeg_are_put_into_words(error: Exception, text: str) -> None:
    from encoder_service.ingest.video.source import decoder_errors

    if not isinstance(error, OSError):  # PyAV's own classes have both fields
        error.errno, error.strerror = error.args  # type: ignore[attr-defined]
    with (
        pytest.raises(UndecodableClip, match=f"MP4 file of 7 bytes is damaged or of an unsup.*{text}"),
        decoder_errors(7, "MP4"),
    ):
        raise error
