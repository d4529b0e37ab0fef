"""MP4, WebM, Matroska and GIF to upright RGB frames, through PyAV.

Owns the choice of the stream, the count and the rate of its frames, and their decoding. Which frames are
wanted is ``video_rules``', which packets that takes ``video_plan``'s, the limits ``video_file``'s.

The rules, and what each follows:

* Frames are counted by the stream's packets and addressed in the order in which they are shown. The rate is
  the container's average rate, as the reference's PyAV reader takes it; where the frames' own times differ
  from that by more than a frame, as in files of variable rate, it is their number over the time they take, as
  of its default reader (torchcodec).
* Pixels are those of ``VideoFrame.to_ndarray(format="rgb24")``, the reference reader's.
* A display matrix is applied, to a quarter turn, as players do; the reference's PyAV reader leaves it.
* A file that is cut off, a frame that cannot be decoded, or one of another size than the first fail the clip:
  rows of a picture that is partly guessed would be cached as if they were its own.
* Frames that follow a key frame may lean on ones before it (an open group of pictures): where decoding from
  one fails, the rest is decoded from the first packet on. What fails there too is damage.
"""

from __future__ import annotations

import contextlib
import functools
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video_container import CONTAINER_NAMES, Container
from encoder_service.ingest.video_file import ClipHeader, check_frame_size, decoder_errors
from encoder_service.ingest.video_plan import PacketFact, Run, plan_runs
from encoder_service.ingest.video_rules import DEFAULT_SOURCE_FPS
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
_VP8_SHOWN = 0x10  # of a frame's first byte, RFC 6386 section 9.1


class StreamClip:
    """A clip in a container of FFmpeg's. See ``video_file.ClipSource``."""

    def __init__(self, data: bytes, container: Container, limits: ClipLimits) -> None:
        self._data = data
        self._container = container
        self._name = CONTAINER_NAMES[container]
        self._limits = limits
        self._file: InputContainer | None = None
        try:
            with self._errors():
                self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        with self._errors():
            shown = self._index.shown
            wanted = [shown[index] for index in indices]
            runs = plan_runs(self._index.packets, wanted)
            num_done = 0
            try:
                for run in runs:
                    for frame in self._decode(run):
                        num_done += 1
                        yield self._upright(frame)
                return
            except (av.error.FFmpegError, UndecodableClip):
                last = max((run.last for run in runs if run.wanted & {*wanted[num_done:]}), default=0)
                if not last:
                    raise
            self._stream.codec_context.flush_buffers()
            for frame in self._decode(Run(0, last, frozenset(wanted[num_done:]))):
                yield self._upright(frame)

    # -- the header ------------------------------------------------------------------------------------

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return decoder_errors(len(self._data), self._name)

    def _open(self) -> None:
        """Raises UndecodableClip, ClipTooLarge."""
        file = self._file = self._demuxer(CODECS)
        self._stream = self._chosen_stream(file)
        context = self._stream.codec_context
        width, height = context.width, context.height
        if not width * height:
            # Looking at frames above the limit failed, which loses the size that the container states.
            with self._demuxer(()) as unread:
                stated = unread.streams[self._stream.index].codec_context
                width, height = (
                    (stated.width, stated.height) if isinstance(stated, VideoCodecContext) else (0, 0)
                )
        check_frame_size(width, height, self._limits)
        # Damage that a decoder finds ends it; by default it makes up what is missing and goes on.
        context.options = {"max_pixels": str(self._limits.max_frame_pixels), "err_detect": "explode"}
        context.thread_count = self._limits.decode_threads
        context.thread_type = "AUTO"
        self._index = self._read_index(file)
        # How a clip is turned is told with its frames only.
        first = next(iter(self._decode(Run(0, 0, frozenset({self._index.packets[0].pts})))))
        self._coded_size = first.width, first.height
        self.header = self._read_header(first)

    def _demuxer(self, codecs: Sequence[str]) -> InputContainer:
        """That of what the first bytes announce alone, which opens nothing else. codecs: of the decoders that
        may look at frames."""
        return av.open(
            io.BytesIO(self._data),
            "r",
            format=self._container,
            options={
                "protocol_whitelist": "",
                "codec_whitelist": ",".join(codecs) or "none",
                # Opening looks at frames with decoders of its own.
                "max_pixels": str(self._limits.max_frame_pixels),
                "threads": "1",
            },
        )

    def _chosen_stream(self, file: InputContainer) -> VideoStream:
        """The first stream of moving pictures. Raises UndecodableClip."""
        for stream in file.streams.video:
            if stream.disposition & Disposition.attached_pic:
                continue
            codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
            if codec not in CODECS:
                raise UndecodableClip(
                    f"the {self._name} file's video is {codec}, taken are {', '.join(CODECS)}", codec=codec
                )
            return stream
        kinds = ", ".join(stream.type for stream in file.streams) or "none"
        raise UndecodableClip(
            f"the {self._name} file has 0 video streams, needs 1; its streams: {kinds}", streams=kinds
        )

    def _read_index(self, file: InputContainer) -> PacketIndex:
        """Raises UndecodableClip for a stream without frames or whose frames cannot be told apart,
        ClipTooLarge
        for too many."""
        stream, most = self._stream, self._limits.max_source_frames
        packets: list[PacketFact] = []
        shown: list[int] = []
        end = 0
        is_vp8 = stream.codec_context.name == "vp8"
        for packet in file.demux(stream):
            if not packet.size:
                continue  # the end
            pts = _pts_of(packet)
            if packet.is_corrupt or pts is None:
                what = "is damaged" if packet.is_corrupt else "has no time"
                raise UndecodableClip(
                    f"packet {len(packets)} of the {self._name} file's video {what}", packet=len(packets)
                )
            # Each picture of a GIF is marked as a key frame and drawn over the one before it.
            packets.append(PacketFact(pts, packet.is_keyframe and (self._container != "gif" or not packets)))
            end = max(end, pts + (packet.duration or 0))
            if not packet.is_discard and not (is_vp8 and not bytes(packet)[0] & _VP8_SHOWN):
                shown.append(pts)
            if len(packets) > most:
                raise ClipTooLarge(f"the clip has over {most} frames, which is the limit", max_frames=most)
        if not shown:
            raise UndecodableClip(f"the {self._name} file's video has 0 frames, needs 1", num_frames=0)
        if len({packet.pts for packet in packets}) < len(packets):
            raise UndecodableClip(f"the {self._name} file's video shows two frames at one time")
        if stream.frames > len(packets) and self._container == "mov":
            raise UndecodableClip(
                f"the {self._name} file promises {stream.frames} frames and has {len(packets)}",
                found=len(packets),
                needed=stream.frames,
            )
        return PacketIndex(packets, sorted(shown), end)

    def _read_header(self, first: VideoFrame) -> ClipHeader:
        """Raises ClipTooLarge."""
        num_frames, fps, most_s = len(self._index.shown), self._rate(), self._limits.max_duration_s
        duration_s = num_frames / fps
        if duration_s > most_s:
            raise ClipTooLarge(
                f"the clip lasts {duration_s:.1f} s, the limit is {most_s:.1f} s",
                found_s=round(duration_s, 1),
                max_duration_s=most_s,
            )
        width, height = first.width, first.height
        check_frame_size(width, height, self._limits)
        self._turn = turn_of(first)
        if self._turn.swaps_sides:
            width, height = height, width
        return ClipHeader(num_frames, fps, height, width, duration_s, self._name)

    def _rate(self) -> float:
        """Frames a second, on average."""
        shown, stated = self._index.shown, self._stream.average_rate
        unit_s = self._stream.time_base or Fraction(0)
        if stated and abs(stated * (shown[-1] - shown[0]) * unit_s - (len(shown) - 1)) <= 1:
            return float(stated)
        span_s = (self._index.end - shown[0]) * unit_s
        return float(len(shown) / span_s) if span_s > 0 else DEFAULT_SOURCE_FPS

    # -- frames ----------------------------------------------------------------------------------------

    def _decode(self, run: Run) -> Iterator[VideoFrame]:
        """The run's frames in the order they are shown, as they come. Raises UndecodableClip when one does
        not."""
        decoder = self._stream.codec_context
        left = len(run.wanted)
        last_pts: int | None = None
        for packet in self._packets(run):
            wanted = packet is not None and _pts_of(packet) in run.wanted
            if packet is not None:
                if packet.is_disposable and not wanted:
                    continue
                # A frame that no other is predicted from is not decoded for nothing.
                decoder.skip_frame = "DEFAULT" if wanted else "NONREF"
            for frame in decoder.decode(packet):
                if frame.pts not in run.wanted or (last_pts is not None and frame.pts <= last_pts):
                    continue
                if frame.is_corrupt:
                    raise UndecodableClip(f"the frame at {frame.time} s of the {self._name} file is damaged")
                last_pts, left = frame.pts, left - 1
                yield frame
        decoder.flush_buffers()
        if left:
            raise UndecodableClip(
                f"of {len(run.wanted)} frames wanted of one part of the {self._name} file, "
                f"{len(run.wanted) - left} can be decoded",
                found=len(run.wanted) - left,
                needed=len(run.wanted),
            )

    def _packets(self, run: Run) -> Iterator[Packet[VideoStream] | None]:
        """The run's packets in the file's order, then None, which empties the decoder."""
        assert self._file is not None
        facts = self._index.packets
        start, end = facts[run.first].pts, facts[run.last].pts
        places = self._index.places
        self._file.seek(start, stream=self._stream)
        is_started = False
        for packet in self._file.demux(self._stream):
            if not packet.size:
                break
            pts = _pts_of(packet)
            if not is_started:
                if pts is None or places.get(pts, len(facts)) > run.first:
                    raise UndecodableClip(
                        f"the {self._name} file's index leads past its frame at packet {run.first}"
                    )
                is_started = pts == start
            if is_started:
                yield packet
            if pts == end:
                break
        yield None

    def _upright(self, frame: VideoFrame) -> torch.Tensor:
        """uint8 [H, W, 3]. Raises UndecodableClip for another size than the first frame's."""
        if (frame.width, frame.height) != self._coded_size:
            width, height = self._coded_size
            raise UndecodableClip(
                f"the frame at {frame.time} s is {frame.width}x{frame.height}, the clip's first is "
                f"{width}x{height}",
                found=f"{frame.width}x{frame.height}",
                needed=f"{width}x{height}",
            )
        return torch.from_numpy(self._turn.apply(frame.to_ndarray(format="rgb24")))


@dataclass(frozen=True)
class PacketIndex:
    """packets: in the file's order; shown: pts of the frames, ascending; end: when the last one's time is
    over,
    in the stream's time base."""

    packets: list[PacketFact]
    shown: list[int]
    end: int

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """A packet's place in the file's order by its pts."""
        return {packet.pts: place for place, packet in enumerate(self.packets)}


class Turn(NamedTuple):
    """How coded pixels become upright ones: sides swapped first, then mirrored."""

    swaps_sides: bool = False
    mirrors_x: bool = False
    mirrors_y: bool = False

    def apply(self, image_HWC: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3], contiguous."""
        if self.swaps_sides:
            image_HWC = image_HWC.swapaxes(0, 1)
        if self.mirrors_x:
            image_HWC = image_HWC[:, ::-1]
        if self.mirrors_y:
            image_HWC = image_HWC[::-1]
        return np.ascontiguousarray(image_HWC)


def turn_of(frame: VideoFrame) -> Turn:
    """The quarter turn and mirroring nearest to the frame's display matrix: [a b u; c d v; x y w], by which
    (x, y) is shown at (a x + c y, b x + d y), with y downwards (ISO/IEC 14496-12, section 6.2.2)."""
    side_data: Mapping[str, Any] = frame.side_data
    matrix = bytes(side_data.get("DISPLAYMATRIX", b""))
    if len(matrix) != 36:
        return Turn()
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(True, c < 0, b < 0)
    return Turn(False, a < 0, d < 0)


def _pts_of(packet: Packet[VideoStream]) -> int | None:
    """When the packet's frame is shown; where only the order of decoding is told, that."""
    return packet.dts if packet.pts is None else packet.pts
