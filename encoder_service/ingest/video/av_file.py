"""MP4, WebM, Matroska and GIF files to upright RGB frames, through PyAV.

Owns what FFmpeg may do with a caller's bytes, the count and rate of the frames, which packets have to be
decoded for the frames that are wanted, and their decoding.

Rules, and what each follows:

* Frames are counted by the packets of the first video stream and addressed in the order of display. The rate
  is the container's average rate, as in the reference's PyAV reader; where the frames' own times differ from
  that by more than a frame (variable rate), it is their number over the time they take, as in its default
  reader.
* Pixels are those of ``VideoFrame.to_ndarray(format="rgb24")``, the reference reader's.
* The display matrix is applied, to the nearest quarter turn, as players do.
* Damage, a frame of another size than the first, and a wanted frame that the decoder leaves out fail the
  clip: rows of a guessed picture would be cached as if they were its own.
* Decoding starts at the last key frame that is shown no later than a wanted frame. Frames behind a key frame
  may depend on frames before it (open groups of pictures, gradual refresh): where decoding from a key frame
  fails, the rest is decoded from the first packet on.
* Where two frames have the same time (fast clips in Matroska, which counts milliseconds), frames are taken in
  the order of decoding, which must agree with the order of the times.
"""

from __future__ import annotations

import bisect
import io
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
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
from encoder_service.ingest.video.container import CONTAINER_NAMES, Container
from encoder_service.ingest.video.source import (
    DEFAULT_SOURCE_FPS,
    ClipHeader,
    ClipLimits,
    check_decoded_pixels,
    check_frame_size,
    check_header,
    check_num_frames,
    decoder_errors,
)

# The decoders that may run.
CODECS = (
    "h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "gif",
)  # fmt: skip
# Those of them whose packets are always in the order of display.
IN_DISPLAY_ORDER = frozenset({"vp8", "vp9", "av1", "libdav1d", "mjpeg", "gif"})
# Before version 19 PyAV raises for metadata that is not UTF-8, unless told otherwise.
LENIENT_METADATA: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)
MAX_VIDEO_STREAMS = 8  # covers included: opening a file decodes frames of each
MAX_HIDDEN = 8192  # packets that an edit list hides: a seek takes time in their square
MAX_THREAD_PIXELS = 1 << 27  # of all frames that a decoder's threads hold
_VP8_SHOWN = 0x10  # bit of a frame's first byte, RFC 6386 section 9.1


class PacketFact(NamedTuple):
    """One packet. pts: when its frame is shown, in the stream's time base."""

    pts: int
    is_key: bool


class Run(NamedTuple):
    """Packets [first, last] in file order, to be decoded together. wanted: pts of the frames to keep."""

    first: int
    last: int
    wanted: frozenset[int]

    @property
    def num_packets(self) -> int:
        return self.last - self.first + 1


def plan_runs(packets: Sequence[PacketFact], wanted: Sequence[int]) -> list[Run]:
    """Runs for these frames. packets: in file order, with different pts; wanted: pts of some, ascending.

    A frame is decoded from the last key frame that is shown no later: frames between two key frames that are
    shown before the second may depend on frames before it.
    """
    places = {packet.pts: place for place, packet in enumerate(packets)}
    keys = sorted((packet.pts, place) for place, packet in enumerate(packets) if packet.is_key)
    runs: list[Run] = []
    for pts in wanted:
        at = bisect.bisect_right(keys, (pts, len(packets))) - 1
        place = places[pts]
        start = min(keys[at][1] if at >= 0 else 0, place)
        if runs and start <= runs[-1].last + 1:
            run = runs[-1]
            runs[-1] = Run(run.first, max(run.last, place), run.wanted | {pts})
        else:
            runs.append(Run(start, place, frozenset({pts})))
    return runs


class AvFile:
    """A ClipSource over a container that FFmpeg reads."""

    def __init__(self, data: bytes, container: Container, limits: ClipLimits) -> None:
        """Reads all packets and decodes the first frame, whose side data has the display matrix. Raises
        UndecodableClip, ClipTooLarge."""
        self._data = data
        self._container = container
        self._name = CONTAINER_NAMES[container]
        self._limits = limits
        self._is_stopped = self._has_frame = False
        with decoder_errors(len(data), self._name):
            width, height = self._check_streams()
            self._file = self._demuxer(CODECS)
            try:
                self._open(width, height)
            except BaseException:
                self._file.close()
                raise

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._file.close()

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        return self._upright_all(self._coded_frames(indices))

    # Opening

    def _demuxer(self, codecs: Sequence[str], **options: str) -> InputContainer:
        """The file, opened by the demuxer of its container, which may open nothing else. codecs: decoders
        that may run."""
        opened: InputContainer = av.open(
            io.BytesIO(self._data),
            "r",
            format=self._container,
            **LENIENT_METADATA,
            options={
                "protocol_whitelist": "",
                "codec_whitelist": ",".join(codecs) or "none",
                "max_pixels": str(self._limits.max_frame_pixels),  # opening decodes frames by itself
                "threads": "1",
                **options,
            },
        )
        return opened

    def _check_streams(self) -> tuple[int, int]:
        """Width and height that the container states, 0 where it states none; no decoder runs. Raises
        UndecodableClip, ClipTooLarge."""
        with self._demuxer((), probesize="32") as unread:
            count = len(unread.streams.video)
            if count > MAX_VIDEO_STREAMS:
                raise UndecodableClip(
                    f"the {self._name} file has {count} video streams, the limit is {MAX_VIDEO_STREAMS}",
                    found=count,
                    max_video_streams=MAX_VIDEO_STREAMS,
                )
            context = self._choose_stream(unread).codec_context
            stated = (context.width, context.height) if isinstance(context, VideoCodecContext) else (0, 0)
        if all(stated):
            check_frame_size(*stated, self._limits)
        return stated

    def _choose_stream(self, file: InputContainer) -> VideoStream:
        """The first video stream that is no cover. Raises UndecodableClip."""
        for stream in file.streams.video:
            if stream.disposition & Disposition.attached_pic:
                continue
            codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
            if codec not in CODECS:
                raise UndecodableClip(
                    f"the {self._name} file's video is {codec}, accepted are {', '.join(CODECS)}", codec=codec
                )
            return stream
        kinds = ", ".join(stream.type for stream in file.streams) or "none"
        raise UndecodableClip(
            f"the {self._name} file has 0 video streams, needs 1; its streams: {kinds}", streams=kinds
        )

    def _open(self, width: int, height: int) -> None:
        stream = self._stream = self._choose_stream(self._file)
        context = stream.codec_context
        width, height = context.width or width, context.height or height
        check_frame_size(width, height, self._limits)
        # By default FFmpeg conceals damage and goes on.
        context.options = {"max_pixels": str(self._limits.max_frame_pixels), "err_detect": "explode"}
        # Each thread holds a frame.
        context.thread_count = min(self._limits.decode_threads, max(1, MAX_THREAD_PIXELS // (width * height)))
        context.thread_type = "AUTO"
        self._read_packets()
        num_frames, fps = len(self._shown), self._rate()
        check_header(ClipHeader(num_frames, fps, height, width), self._limits)
        self._coded_size: tuple[int, int] = (width, height)  # as stated; the first frame decides
        first = next(self._coded_frames([0]))
        self._turn = _turn_of(first)
        height, width = (first.width, first.height) if self._turn.swaps_sides else (first.height, first.width)
        self.header = ClipHeader(num_frames, fps, height, width)

    def _read_packets(self) -> None:
        """Reads the facts of all packets. Raises UndecodableClip, ClipTooLarge."""
        codec = self._stream.codec_context.name
        packets: list[PacketFact] = []
        shown: list[int] = []
        end = 0
        for packet in self._file.demux(self._stream):
            if not packet.size:
                continue  # the end
            pts = _pts_of(packet)
            if packet.is_corrupt or pts is None:
                what = "is damaged" if packet.is_corrupt else "has no time"
                raise UndecodableClip(
                    f"packet {len(packets)} of the {self._name} file's video {what}", packet=len(packets)
                )
            # Every GIF frame is marked as a key frame and drawn over the one before it.
            packets.append(PacketFact(pts, packet.is_keyframe and (codec != "gif" or not packets)))
            end = max(end, pts + (packet.duration or 0))
            if not packet.is_discard and not (codec == "vp8" and not bytes(packet)[0] & _VP8_SHOWN):
                shown.append(pts)
            check_num_frames(len(packets), self._limits)
            if codec != "vp8" and len(packets) - len(shown) > MAX_HIDDEN:
                raise ClipTooLarge(
                    f"the {self._name} file has over {MAX_HIDDEN} frames that its edit list hides, the limit",
                    max_hidden=MAX_HIDDEN,
                )
        if not shown:
            raise UndecodableClip(f"the {self._name} file's video has 0 frames, needs 1", num_frames=0)
        if codec in IN_DISPLAY_ORDER and any(after < before for before, after in pairwise(shown)):
            raise UndecodableClip(
                f"the {self._name} file's {codec} frames are not in the order of their times"
            )
        self._check_promised(len(packets))
        self._packets = packets
        self._shown = sorted(shown)
        self._end = end
        self._places = {packet.pts: place for place, packet in enumerate(packets)}
        self._shares_times = len(self._places) < len(packets)

    def _check_promised(self, num_packets: int) -> None:
        """Raises UndecodableClip for an MP4 file with fewer samples than its tables name, counting those that
        an edit list leaves out."""
        promised = self._stream.frames
        if self._container != "mov" or promised <= num_packets:
            return
        with self._demuxer((), ignore_editlist="1") as unedited:
            stream = unedited.streams[self._stream.index]
            found = sum(1 for packet in unedited.demux(stream) if packet.size)
        if promised > found:
            raise UndecodableClip(
                f"the {self._name} file promises {promised} frames and has {found}",
                found=found,
                needed=promised,
            )

    def _rate(self) -> float:
        """Average frames per second."""
        shown, stated = self._shown, self._stream.average_rate
        unit_s = self._stream.time_base or Fraction(0)
        if stated and abs(stated * (shown[-1] - shown[0]) * unit_s - (len(shown) - 1)) <= 1:
            return float(stated)
        span_s = (self._end - shown[0]) * unit_s
        return float(len(shown) / span_s) if span_s > 0 else DEFAULT_SOURCE_FPS

    # Frames

    def _runs(self, indices: Sequence[int]) -> list[Run]:
        """What has to be decoded for these frames, in the order of display."""
        if not indices:
            return []
        wanted = [self._shown[index] for index in indices]
        if not self._shares_times:
            return plan_runs(self._packets, wanted)
        last = max(place for place, packet in enumerate(self._packets) if packet.pts <= wanted[-1])
        return [Run(0, last, frozenset(wanted))]

    def _coded_frames(self, indices: Sequence[int]) -> Iterator[VideoFrame]:
        """Raises ClipTooLarge at the call."""
        runs = self._runs(indices)
        self._check_cost(runs)
        return self._decode_by_order(indices, runs) if self._shares_times else self._decode_by_time(runs)

    def _check_cost(self, runs: Sequence[Run]) -> None:
        """Raises ClipTooLarge."""
        self._num_planned = sum(run.num_packets for run in runs)
        check_decoded_pixels(self._num_planned, *self._coded_size, self._limits)

    def _decode_by_time(self, runs: Sequence[Run]) -> Iterator[VideoFrame]:
        """The wanted frames of all runs. Where a run fails, the rest is decoded once more from the first
        packet; raises what that fails with."""
        missing = sorted(pts for run in runs for pts in run.wanted)
        num_done = 0
        try:
            for run in runs:
                for frame in self._decode_run(run):
                    num_done += 1
                    yield frame
            return
        except (av.error.FFmpegError, UndecodableClip):
            rest = Run(0, runs[-1].last, frozenset(missing[num_done:]))
            if rest == runs[0]:
                raise
        self._check_cost([*runs, rest])
        yield from self._decode_run(rest)

    def _decode_run(self, run: Run) -> Iterator[VideoFrame]:
        """The run's wanted frames in the order of display. Raises UndecodableClip when another frame comes in
        the place of one that is due."""
        start, due, num_done = self._packets[run.first].pts, sorted(run.wanted), 0

        def is_needed(packet: Packet[VideoStream]) -> bool:
            pts = _pts_of(packet)
            if packet.is_disposable and pts not in run.wanted:
                return False
            # Hidden frames before the first of an open group of pictures depend on frames that were cut away.
            return not (packet.is_discard and pts is not None and pts < start)

        for frame in self._decode(self._seek(run), is_needed, run.wanted):
            if (
                frame.pts is None
                or frame.pts not in run.wanted
                or (num_done and frame.pts <= due[num_done - 1])
            ):
                continue
            if frame.is_corrupt or frame.pts != due[num_done]:
                raise self._missing(due, num_done)
            num_done += 1
            yield frame
        if num_done < len(due):
            raise self._missing(due, num_done)

    def _decode_by_order(self, indices: Sequence[int], runs: Sequence[Run]) -> Iterator[VideoFrame]:
        """Frames at these places in the order of decoding, read from the first packet on. Every frame has to
        come at the time of its place. Frames of the last time are counted before the last one is yielded."""
        if not indices:
            return
        due = self._shown[: bisect.bisect_right(self._shown, self._shown[indices[-1]])]
        wanted, num_done = frozenset(indices), 0
        held: VideoFrame | None = None
        with self._demuxer(CODECS) as file:  # a seek could land on another packet of the same time
            stream = file.streams.video[self._stream_place()]
            packets = itertools.islice(file.demux(stream), runs[-1].last + 1)
            for frame in self._decode(packets, lambda _: True, None):
                if num_done == len(due):
                    continue
                if frame.is_corrupt or frame.pts != due[num_done]:
                    raise self._missing(due, num_done)
                if num_done in wanted:
                    if held is not None:
                        yield held
                    held = frame
                num_done += 1
        if held is None or num_done < len(due):
            raise self._missing(due, num_done)
        yield held

    def _stream_place(self) -> int:
        return self._file.streams.video.index(self._stream)

    def _decode(
        self,
        packets: Iterator[Packet[VideoStream]],
        is_needed: Callable[[Packet[VideoStream]], bool],
        wanted: frozenset[int] | None,
    ) -> Iterator[VideoFrame]:
        """Every frame that the decoder makes of these packets. wanted: frames that no other depends on are
        left out unless their pts is among these; None for all."""
        decoder = self._stream.codec_context
        decoder.flush_buffers()
        for packet in packets:
            if self._is_stopped or not packet.size:
                break
            if not is_needed(packet):
                continue
            decoder.skip_frame = "DEFAULT" if wanted is None or _pts_of(packet) in wanted else "NONREF"
            for frame in decoder.decode(packet):
                yield self._checked(frame)
        decoder.skip_frame = "DEFAULT"
        for frame in decoder.decode(None):
            yield self._checked(frame)

    def _seek(self, run: Run) -> Iterator[Packet[VideoStream]]:
        """The run's packets in file order. Raises UndecodableClip where a seek lands behind the first."""
        start, end = self._packets[run.first].pts, self._packets[run.last].pts
        self._file.seek(start, stream=self._stream)
        is_started = False
        for packet in self._file.demux(self._stream):
            pts = _pts_of(packet)
            if not is_started:
                if pts is None or self._places.get(pts, len(self._packets)) > run.first:
                    raise UndecodableClip(
                        f"the {self._name} file's index leads past its frame at packet {run.first}"
                    )
                is_started = pts == start
            if is_started:
                yield packet
            if pts == end:
                return

    def _missing(self, due: Sequence[int], num_done: int) -> UndecodableClip:
        return UndecodableClip(
            f"of {len(due)} frames due in one part of the {self._name} file, {num_done} come in their order",
            found=num_done,
            needed=len(due),
        )

    def _checked(self, frame: VideoFrame) -> VideoFrame:
        """The frame. Raises UndecodableClip for another size than the first one's, which is the size that all
        frames were counted with; ClipTooLarge where the first is larger than stated."""
        if not self._has_frame:
            self._has_frame, self._coded_size = True, (frame.width, frame.height)
            check_frame_size(*self._coded_size, self._limits)
            check_decoded_pixels(self._num_planned, *self._coded_size, self._limits)
        if (frame.width, frame.height) != self._coded_size:
            width, height = self._coded_size
            raise UndecodableClip(
                f"the frame at {frame.time} s is {frame.width}x{frame.height}, the clip's first is "
                f"{width}x{height}",
                found=f"{frame.width}x{frame.height}",
                needed=f"{width}x{height}",
            )
        return frame

    def _upright_all(self, frames: Iterator[VideoFrame]) -> Iterator[torch.Tensor]:
        with decoder_errors(len(self._data), self._name):
            for frame in frames:
                # One thread: by default the conversion starts as many as there are cores.
                yield torch.from_numpy(self._turn.apply(frame.to_ndarray(format="rgb24", threads=1)))


def _pts_of(packet: Packet[VideoStream]) -> int | None:
    """When the packet's frame is shown; its time of decoding where the file states no other."""
    return packet.dts if packet.pts is None else packet.pts


class _Turn(NamedTuple):
    """How coded pixels become upright: sides swapped first, then mirrored."""

    swaps_sides: bool = False
    mirrors_x: bool = False
    mirrors_y: bool = False

    def apply(self, image_HWC: np.ndarray) -> np.ndarray:
        """uint8 [H, W, 3], contiguous."""
        if self.swaps_sides:
            image_HWC = image_HWC.swapaxes(0, 1)
        return np.ascontiguousarray(image_HWC[:: -1 if self.mirrors_y else 1, :: -1 if self.mirrors_x else 1])


def _turn_of(frame: VideoFrame) -> _Turn:
    """The quarter turn and mirroring nearest to the display matrix [a b u; c d v; x y w], which shows (x, y)
    at (a x + c y, b x + d y), with y downwards (ISO/IEC 14496-12, section 6.2.2)."""
    side_data: Mapping[str, Any] = frame.side_data
    matrix = bytes(side_data.get("DISPLAYMATRIX", b""))
    if len(matrix) != 36:
        return _Turn()
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
    if abs(b) + abs(c) > abs(a) + abs(d):
        return _Turn(True, c < 0, b < 0)
    return _Turn(False, a < 0, d < 0)
