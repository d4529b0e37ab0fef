"""How many pixels of a clip may be decoded, and that what is counted is what is decoded."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from encoder_service.config import Settings
from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video import av_file
from encoder_service.ingest.video.av_file import AvFile, PacketFact
from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits, clip_limits
from tests.unit.ingest import clip_files

FRAME_PIXELS = 64 * 48


def within(num_frames: int, less: int = 0) -> ClipLimits:
    """Limits that so many frames keep, or miss by ``less`` pixels."""
    return ClipLimits(max_decoded_pixels=num_frames * FRAME_PIXELS - less)


def opened(data: bytes, limits: ClipLimits) -> AvFile:
    clip = open_source(data, limits)
    assert isinstance(clip, AvFile)
    return clip


@pytest.mark.parametrize("kind", ["h264.mp4", "vp9.webm", "gif.gif"])
def test_a_clip_that_takes_more_pixels_is_refused_before_they_are_decoded(kind: str) -> None:
    data = clip_files.encode(clip_files.moving(60), kind, key_every=60, b_frames=0)
    clip = open_source(data, within(60, less=1))
    with pytest.raises(ClipTooLarge, match=r"takes 60 frames = 184320 pixels.*limit is 184319") as raised:
        clip.frames(range(60))  # the call, before a frame is asked for
    assert raised.value.details["found_pixels"] == "184320"
    assert raised.value.details["max_decoded_pixels"] == "184319"
    clip.close()

    clip = open_source(data, within(60))
    assert len(list(clip.frames(range(60)))) == 60
    clip.close()


@pytest.mark.parametrize(
    ("kind", "width", "every", "indices", "counted"),
    [
        ("h264.mp4", 64, 10, [0, 55, 110], 1 + 6 + 1),  # what is skipped by seeking does not count
        # Of a file whose marks are none to start at, 6 are planned, and all are read from the beginning.
        ("refreshed.mp4", 128, 60, [125], 6 + 126),
    ],
)
def test_what_is_decoded_counts(kind: str, width: int, every: int, indices: list[int], counted: int) -> None:
    data = clip_files.encode(clip_files.moving(140, 48, width), kind, key_every=every, b_frames=0)
    for less in (0, 1):
        clip = opened(data, ClipLimits(max_decoded_pixels=counted * 48 * width - less))
        if less:
            with pytest.raises(ClipTooLarge, match=f"takes {counted} frames"):
                list(clip.frames(indices))
        else:
            assert len(list(clip.frames(indices))) == len(indices)
        clip.close()


def test_frames_between_that_are_larger_than_counted_fail_the_clip() -> None:
    """A stream may change its size as it goes: frames that nobody wanted would cost what was not counted."""
    parts = [clip_files.moving(4, *size) for size in [(48, 64), (96, 128), (48, 64)]]
    clip = opened(one_stream(parts), ClipLimits())
    assert clip.header.num_frames == 12
    # Such a picture is always marked as one to start at, which a codec's that leans on others is not.
    clip._packets[1:] = [PacketFact(packet.pts, False) for packet in clip._packets[1:]]
    with pytest.raises(UndecodableClip, match="is 128x96, the clip's first is 64x48"):
        list(clip.frames([0, 11]))
    clip.close()


def one_stream(parts: list[np.ndarray]) -> bytes:
    """Motion JPEG of each part's frames, one after another."""
    file = io.BytesIO()
    at = 0
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mjpeg", rate=30)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuvj420p"
        out.start_encoding()
        assert stream.time_base is not None
        for images in parts:
            encoder = av.CodecContext.create("mjpeg", "w")
            encoder.height, encoder.width = images.shape[1:3]
            encoder.pix_fmt, encoder.time_base = "yuvj420p", stream.time_base
            for image in images:
                frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuvj420p")
                for packet in encoder.encode(frame):
                    packet.stream, packet.pts, packet.dts = stream, at * 33, at * 33
                    out.mux(packet)
                    at += 1
    return file.getvalue()


@pytest.mark.parametrize(("workers", "threads"), [(1, 2), (11, 2), (12, 3), (32, 8), (128, 8)])
def test_threads_of_a_decoder_are_a_quarter_of_the_workers(workers: int, threads: int) -> None:
    assert clip_limits(Settings(model="m"), 1, workers).decode_threads == threads


@pytest.mark.parametrize(("frames", "threads"), [(0.5, 1), (1, 1), (3, 3), (9, 8)])
def test_threads_hold_so_many_pixels_at_most(
    frames: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    height, width = clip_files.moving(1).shape[1:3]
    monkeypatch.setattr(av_file, "MAX_THREAD_PIXELS", int(frames * height * width))
    clip = opened(clip_files.encode(clip_files.moving(10)), ClipLimits(decode_threads=8))
    assert clip._decoder.thread_count == threads
    assert len(list(clip.frames(range(10)))) == 10
    clip.close()
