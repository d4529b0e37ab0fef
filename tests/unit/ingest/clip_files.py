"""Clip files for tests, made on the spot: every container and codec that is taken, of pictures that move.

Encoders are those of the PyAV wheel. Frames come back as the caller sees them after decoding by another way:
PyAV's own loop over all frames, without seeking or skipping.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from encoder_service.ingest.video.clip import open_source
from encoder_service.ingest.video.source import ClipLimits

CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "h264.mp4": ("mp4", "libx264", {"preset": "veryfast"}),
    "mpeg4.mp4": ("mp4", "mpeg4", {}),
    "vp9.webm": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "av1.webm": ("webm", "libsvtav1", {"preset": "12", "svtav1-params": "lp=1"}),
    "h264.mkv": ("matroska", "libx264", {"preset": "veryfast"}),
    "gif.gif": ("gif", "gif", {}),
}
KINDS = tuple(CODECS)
# H.264 with frames behind a key frame that lean on ones before it; and as cameras and streams send it: no
# whole picture after the first, a column of each frame is coded by itself, and frames where that begins are
# marked as ones to start at.
_OPEN = {"x264-params": "open-gop=1:b-pyramid=normal:bframes=5:b-adapt=0:scenecut=0"}
_REFRESHED = {
    "preset": "veryfast", "tune": "zerolatency", "intra-refresh": "1", "x264-params": "scenecut=0"
}  # fmt: skip
HARD: dict[str, tuple[str, str, dict[str, str]]] = {
    "open.mp4": ("mp4", "libx264", _OPEN),
    "open.mkv": ("matroska", "libx264", _OPEN),
    "refreshed.mp4": ("mp4", "libx264", _REFRESHED),
    "refreshed.mkv": ("matroska", "libx264", _REFRESHED),
    "vp8.webm": ("webm", "libvpx", {"deadline": "realtime"}),
}


def moving(
    num_frames: int, height: int = 48, width: int = 64, rng: np.random.Generator | None = None
) -> np.ndarray:
    """uint8 [T, H, W, 3]: a smooth random picture that drifts, each frame unlike every other."""
    rng = rng or np.random.default_rng()
    small = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    step = max(1, width // 16)
    return np.stack(
        [
            np.roll(picture, index * step, axis=1) // 2 + np.uint8(index * 7 % 128)
            for index in range(num_frames)
        ]
    )


@contextlib.contextmanager
def scheduling_kept() -> Iterator[None]:
    """Run by root, libsvtav1 makes the thread that encodes a real-time one, which starves other processes."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


@scheduling_kept()
def encode(
    frames: np.ndarray,
    kind: str = "h264.mp4",
    *,
    fps: int = 30,
    pts: Sequence[int] | None = None,
    key_every: int | None = None,
    b_frames: int | None = None,
    audio: bool = False,
    flags: str = "",
) -> bytes:
    """A file of ``kind``. pts: of each frame, in 1/1000 s, in place of even ones; key_every: frames
    between two key frames; flags: of the MP4 muxer, which writes to a real file then."""
    container, codec, options = (CODECS | HARD)[kind]
    file = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "clip") if flags else file
        with av.open(target, "w", format=container, options={"movflags": flags} if flags else {}) as out:
            options = dict(options)
            if key_every is not None:
                options |= {"g": str(key_every)}
                if codec == "libx264":  # adds key frames where it sees a cut
                    options |= {"sc_threshold": "0"}
            if b_frames is not None:
                options |= {"bf": str(b_frames)}
            stream = out.add_stream(codec, rate=fps, options=options)
            assert isinstance(stream, av.VideoStream)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
            time_base = Fraction(1, fps) if pts is None else Fraction(1, 1000)
            stream.codec_context.time_base = time_base
            if audio:
                _add_tone(out, frames.shape[0] / fps)
            for index, image in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(image, format="rgb24")
                frame.pts = index if pts is None else pts[index]
                frame.time_base = time_base
                for packet in stream.encode(frame):
                    out.mux(packet)
            for packet in stream.encode(None):
                out.mux(packet)
        return target.read_bytes() if isinstance(target, Path) else target.getvalue()


def audio_only(container: str = "mp4") -> bytes:
    """A file with a tone and no pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        _add_tone(out, 0.5)
    return file.getvalue()


def _add_tone(out: av.container.OutputContainer, seconds: float) -> None:
    stream = out.add_stream("aac", rate=16_000)
    for index in range(max(1, int(seconds * 16_000) // 1024)):
        samples = np.sin(np.arange(1024, dtype=np.float32) + index)[None]
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16_000, index * 1024
        for packet in stream.encode(frame):
            out.mux(packet)
    for packet in stream.encode(None):
        out.mux(packet)


def decoded(data: bytes) -> np.ndarray:
    """uint8 [T, H, W, 3]: every frame as it is coded, read from the first to the last."""
    with av.open(io.BytesIO(data), "r") as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def packets(data: bytes) -> list[tuple[int, bool]]:
    """Of each packet of the video: where it lies in the file, and whether it is a key frame's."""
    found = []
    with av.open(io.BytesIO(data), "r") as file:
        for packet in file.demux(video=0):
            if packet.size:
                assert packet.pos is not None
                found.append((packet.pos, packet.is_keyframe))
    return found


def frames_of(
    data: bytes, indices: Sequence[int] | None = None, limits: ClipLimits | None = None
) -> np.ndarray:
    """uint8 [T, H, W, 3]: these frames, or all, as the service reads them."""
    clip = open_source(data, limits or ClipLimits())
    try:
        wanted = range(clip.header.num_frames) if indices is None else indices
        return np.stack([frame.numpy() for frame in clip.frames(wanted)])
    finally:
        clip.close()


def patched_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose video track has the display matrix [a b; c d], whatever it had before."""
    index = data.index(b"tkhd")
    version = data[index + 4]
    start = index + 4 + (52 if version else 40)
    a, b, c, d = (value << 16 for value in matrix)
    packed = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return data[:start] + packed + data[start + 36 :]


def cut(data: bytes, num_packets: int, container: str) -> bytes:
    """The video of a file without its first packets, copied into another container."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(file, "w", format=container) as out:
        stream = source.streams.video[0]
        copied = out.add_stream_from_template(stream)
        for index, packet in enumerate(source.demux(stream)):
            if packet.size and index >= num_packets:
                packet.stream = copied
                out.mux(packet)
    return file.getvalue()


Change = Callable[[bytes, bytes], bytes]
TREE = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf")


def boxes(data: bytes, change: Change) -> bytes:
    """The MP4 with every box's body passed through ``change(kind, body)``."""
    out, start = b"", 0
    while start < len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        body = data[start + 8 : start + size]
        body = change(kind, boxes(body, change) if kind in TREE else body)
        out += struct.pack(">I4s", len(body) + 8, kind) + body
        start += size
    return out


def trimmed(first: int, count: int, kind: str = "h264.mp4", b_frames: int | None = None) -> bytes:
    """30 frames, a key frame every tenth, of which an edit list shows ``count`` from ``first`` on, as phones
    and editors trim: the file keeps all samples, of which some are decoded and never shown."""
    data = encode(moving(30), kind, key_every=10, b_frames=b_frames)
    found: dict[bytes, bytes] = {}

    def note(kind: bytes, body: bytes) -> bytes:
        found[kind] = body
        return body

    boxes(data, note)
    (ticks,), (movie_ticks,) = (struct.unpack_from(">I", found[kind], 12) for kind in (b"mdhd", b"mvhd"))
    (start,) = struct.unpack_from(">i", found[b"elst"], 12)
    edit = count * movie_ticks // 30, start + first * ticks // 30, 1 << 16
    edits = struct.pack(">IIIiI", 0, 1, *edit)
    return boxes(data, lambda kind, body: edits if kind == b"elst" else body)


def transparent(rgba_THWC: np.ndarray, codec: str = "libvpx-vp9", fps: int = 10) -> bytes:
    """A WebM file with alpha."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as out:
        stream = out.add_stream(codec, rate=fps, options={"auto-alt-ref": "0", "crf": "4", "b": "0"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = *rgba_THWC.shape[1:3], "yuva420p"
        for index, image in enumerate(rgba_THWC):
            frame = av.VideoFrame.from_ndarray(image, format="rgba")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()
