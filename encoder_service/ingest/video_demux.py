"""The demuxer of a clip, and which of its streams is the clip.

Owns what FFmpeg may do with a caller's bytes: the one demuxer that the first bytes announce, the decoders
that may look at frames, and how many streams are let near them. Packets and frames are ``video_stream``'s.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from encoder_service.errors import UndecodableClip
from encoder_service.ingest.video_container import CONTAINER_NAMES, Container
from encoder_service.ingest.video_settings import ClipLimits

# Decoders that are let near a caller's bytes.
CODECS = (
    "h264",
    "hevc",
    "vp8",
    "vp9",
    "av1",
    "libdav1d",
    "mpeg4",
    "mpeg1video",
    "mpeg2video",
    "mjpeg",
    "gif",
)
PYAV_MAJOR = int(av.__version__.partition(".")[0])
# Those of them that never show frames in another order than a file has them.
UNORDERED = frozenset({"vp8", "vp9", "av1", "libdav1d", "mjpeg", "gif"})
# Names that nobody reads come in whatever encoding a camera has. PyAV 19 takes any, and no word of it.
LENIENT_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if PYAV_MAJOR < 19 else {}
MAX_VIDEO_STREAMS = 8  # covers included: opening a file decodes pictures of each


def open_demuxer(
    data: bytes, container: Container, limits: ClipLimits, codecs: Sequence[str], **options: str
) -> InputContainer:
    """That of what the first bytes announce alone, which opens nothing else. codecs: of the decoders that
    may look at frames; options: FFmpeg's, further ones."""
    opened: InputContainer = av.open(
        io.BytesIO(data),
        "r",
        format=container,
        **LENIENT_METADATA,
        options={
            "protocol_whitelist": "",
            "codec_whitelist": ",".join(codecs) or "none",
            # Opening looks at frames with decoders of its own.
            "max_pixels": str(limits.max_frame_pixels),
            "threads": "1",
            **options,
        },
    )
    return opened


def check_streams(data: bytes, container: Container, limits: ClipLimits) -> None:
    """Raises UndecodableClip for more streams of pictures than a clip and its covers are."""
    with open_demuxer(data, container, limits, (), probesize="32") as unread:
        count = len(unread.streams.video)
    if count > MAX_VIDEO_STREAMS:
        raise UndecodableClip(
            f"the {CONTAINER_NAMES[container]} file has {count} video streams, the limit is "
            f"{MAX_VIDEO_STREAMS}",
            found=count,
            max_video_streams=MAX_VIDEO_STREAMS,
        )


def chosen_stream(file: InputContainer, name: str) -> VideoStream:
    """The first stream of moving pictures. name: of the container, for people. Raises UndecodableClip."""
    for stream in file.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
        if codec not in CODECS:
            raise UndecodableClip(
                f"the {name} file's video is {codec}, taken are {', '.join(CODECS)}", codec=codec
            )
        return stream
    kinds = ", ".join(stream.type for stream in file.streams) or "none"
    raise UndecodableClip(
        f"the {name} file has 0 video streams, needs 1; its streams: {kinds}", streams=kinds
    )
