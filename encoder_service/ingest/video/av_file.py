"""Decodes MP4, WebM, Matroska and GIF files to upright RGB frames, through PyAV.

Owns what FFmpeg may do with a caller's bytes, the number and rate of the frames, the choice of the packets
that have to be decoded for the wanted frames, and the decoding.

Rules, and what each follows:

* Frames are counted by the packets of the first video stream and indexed in display order. The rate is the
  container's average rate, as in the reference's PyAV reader. If the frames' own times differ from it by more
  than a frame (variable rate), it is the number of frames divided by their duration, as in the reference's
  default reader.
* Pixels are those of ``VideoFrame.to_ndarray(format="rgb24")``, as in the reference's reader. Frames with
  alpha are composited over white, unless alpha is dropped, as images are (``decode``). FFmpeg's own decoders
  ignore the alpha of VP8 and VP9 in WebM, so that files that state to have it are decoded by libvpx.
* Frames that the standards do not show do not count. A file that was cut between two key frames has such
  frames at its start: those before the first key frame in file order; those behind it that are shown before
  it and cannot be decoded, because they depend on frames that were cut away (open groups of pictures, RASL
  pictures); and behind an H.264 recovery point those of an incomplete picture.
* The display matrix is applied, rounded to the nearest quarter turn, as players do.
* Damage, a frame whose size differs from the first, and a wanted frame that the decoder leaves out fail the
  clip. Otherwise the rows of a concealed picture would be cached as if they were correct.
* Decoding starts at the last key frame that is shown no later than a wanted frame. Frames after a key frame
  may depend on frames before it (open groups of pictures, gradual refresh). If decoding from a key frame
  fails, the remaining frames are decoded from the first packet on.

Packets are numbered in file order. A packet passes through the decoder with its number as its timestamp, so
that each frame carries the number of its packet. For codecs that do not reorder frames, the numbers also
distinguish frames with equal times; files whose frames are not in the order of their times are refused.
For other codecs, files with equal times are refused (more than 1000 frames per second in Matroska, whose
times are in milliseconds).
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from av.packet import Packet
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.decode import STRIP_BYTES, STRIP_PIXELS, Transparent, to_rgb
from encoder_service.ingest.video.container import CONTAINER_NAMES, Container
from encoder_service.ingest.video.source import (
    DEFAULT_SOURCE_FPS,
    ClipHeader,
    ClipLimits,
    check_decoded_pixels,
    check_duration,
    check_frame_size,
    check_num_frames,
    decoder_errors,
)

# The decoders that are allowed to run.
CODECS = (
    "h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "gif",
)  # fmt: skip
# The decoders whose packets are always in display order.
IN_DISPLAY_ORDER = frozenset({"vp8", "vp9", "av1", "libdav1d", "mjpeg", "gif"})
# The decoders that also decode alpha, which WebM files keep beside each frame.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# Before version 19, PyAV raises by default for metadata that is not UTF-8.
LENIENT_METADATA: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)
MAX_HIDDEN = 8192  # packets hidden by an edit list; the time of a seek is quadratic in their number
MAX_THREAD_PIXELS = 1 << 27  # pixels of all frames that a decoder's threads hold
_BEGINNING = -(1 << 40)  # in units of any time base
MAX_LEADING = 256  # frames that are decoded to learn whether they can be
H264_FRAMES = 16  # that a decoder keeps at most
# Frames that a decoder keeps to predict others from, beside the one that it decodes; levels up to 5.2 of
# H.264 and H.265 allow so many pixels of them.
_REFERENCES = {"h264": 16, "hevc": 16, "vp8": 4, "vp9": 8, "av1": 8, "libdav1d": 8, "gif": 2, "mjpeg": 0}
_REFERENCE_PIXELS = 184_320 * 256
_VP8_SHOWN = 0x10  # bit of a frame's first byte, RFC 6386 section 9.1


class Turn(NamedTuple):
    """How coded pixels are turned upright: sides are swapped, then an axis with step -1 is mirrored."""

    swaps_sides: bool
    step_y: int
    step_x: int


class PacketFact(NamedTuple):
    """One packet. pts: when its frame is shown, in the stream's time base."""

    pts: int
    is_key: bool


class Run(NamedTuple):
    """Packets [first, last], by number, that are decoded together. wanted: packets of the frames to keep, in
    display order."""

    first: int
    last: int
    wanted: tuple[int, ...]


def plan_runs(packets: Sequence[PacketFact], wanted: Sequence[int]) -> list[Run]:
    """The runs that yield the frames of the wanted packets. wanted: numbers of packets, in display order.
    packets: in file order.

    A frame is decoded from the last key frame that is shown no later than it, because a frame shown between
    two key frames may depend on frames before the second one, even if it is stored after that one.
    """
    keys = sorted((packet.pts, number) for number, packet in enumerate(packets) if packet.is_key)
    first = min((number for _, number in keys), default=0)
    runs: list[Run] = []
    for number in wanted:
        at = bisect.bisect_right(keys, (packets[number].pts, number)) - 1
        start = min(keys[at][1] if at >= 0 else first, number)
        if runs and start <= runs[-1].last + 1:
            run = runs[-1]
            runs[-1] = Run(run.first, max(run.last, number), (*run.wanted, number))
        else:
            runs.append(Run(start, number, (number,)))
    return runs


class AvFile:
    """A ClipSource for a container that FFmpeg reads."""

    def __init__(
        self, data: bytes, container: Container, limits: ClipLimits, transparent: Transparent = "white"
    ) -> None:
        """Reads all packets and decodes the first frame, which gives the size and the display matrix. Raises
        UndecodableClip, ClipTooLarge."""
        self._num_bytes = len(data)
        self._name = CONTAINER_NAMES[container]
        self._limits = limits
        self._transparent = transparent
        self._is_stopped = False
        self._coded_size: tuple[int, int] | None = None  # (width, height) of the first decoded frame
        self._num_planned = 0
        self._packets: list[PacketFact] = []
        self._shown: list[int] = []  # numbers of packets, in display order
        self._first: int | None = None  # packet of the first key frame
        self._starts_at_recovery_point = False
        self._doubtful: frozenset[int] = frozenset()  # packets whose errors are those of a cut
        self._numbers: dict[tuple[int | None, int | None], int] = {}
        with decoder_errors(self._num_bytes, self._name):
            # The demuxer must not open other files, and no decoder may run before the limits are checked.
            self._file = av.open(
                io.BytesIO(data),
                "r",
                format=container,
                options={"protocol_whitelist": "", "codec_whitelist": "none"},
                **LENIENT_METADATA,
            )
            try:
                self._stream = self._choose_stream()
                self._decoder = self._choose_decoder()
                self.header = self._read_header()
            except BaseException:
                self._file.close()
                raise

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._file.close()

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        return self._upright(self._coded_frames(indices))

    # Opening

    def _choose_stream(self) -> VideoStream:
        """The first video stream that is not a cover picture. Raises UndecodableClip."""
        for stream in self._file.streams.video:
            if stream.disposition & Disposition.attached_pic:
                continue
            codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
            if codec not in CODECS:
                raise UndecodableClip(
                    f"the {self._name} file's video is {codec}, accepted are {', '.join(CODECS)}", codec=codec
                )
            found: VideoStream = stream
            return found
        kinds = ", ".join(stream.type for stream in self._file.streams) or "none"
        raise UndecodableClip(
            f"the {self._name} file has 0 video streams, needs 1; its streams: {kinds}", streams=kinds
        )

    def _choose_decoder(self) -> VideoCodecContext:
        own = self._stream.codec_context
        name = _ALPHA_DECODERS.get(own.name)
        if name is None or self._transparent == "drop" or self._stream.metadata.get("alpha_mode") != "1":
            return own
        decoder = av.CodecContext.create(name, "r")
        assert isinstance(decoder, VideoCodecContext)
        return decoder

    def _read_header(self) -> ClipHeader:
        decoder, limits = self._decoder, self._limits
        # Some files state no size. Then the decoder finds it in the first packet, limited by max_pixels.
        width, height = self._stream.codec_context.width, self._stream.codec_context.height
        num_pixels = width * height or limits.max_frame_pixels
        if width and height:
            check_frame_size(width, height, limits)
        # By default FFmpeg conceals damage and continues.
        decoder.options = {"max_pixels": str(limits.max_frame_pixels), "err_detect": "explode"}
        # Each decoder thread holds a frame.
        decoder.thread_count = min(limits.decode_threads, max(1, MAX_THREAD_PIXELS // num_pixels))
        decoder.thread_type = "AUTO"
        fps = self._read_packets()
        check_duration(len(self._shown) / fps, limits)
        first = next(self._coded_frames([0]))
        self._turn = _turn_of(first)
        self.held_bytes = self._held_bytes(first)
        height, width = first.height, first.width
        if self._turn.swaps_sides:
            height, width = width, height
        return ClipHeader(len(self._shown), fps, height, width)

    def _read_packets(self) -> float:
        """Records all packets and returns the average number of frames per second. Raises UndecodableClip,
        ClipTooLarge."""
        codec = self._stream.codec_context.name
        end = 0
        for packet in self._file.demux(self._stream):
            if not packet.size:
                continue  # the flush packet at the end
            number, pts = len(self._packets), _pts_of(packet)
            if packet.is_corrupt or pts is None:
                what = "is damaged" if packet.is_corrupt else "has no time"
                raise UndecodableClip(
                    f"packet {number} of the {self._name} file's video {what}", packet=number
                )
            self._packets.append(PacketFact(pts, _is_key(packet, codec, number)))
            self._numbers[packet.pts, packet.pos] = number
            end = max(end, pts + (packet.duration or 0))
            if not packet.is_discard and not (codec == "vp8" and not bytes(packet)[0] & _VP8_SHOWN):
                self._shown.append(number)
            if self._first is None and self._packets[number].is_key:
                self._first = number
                self._starts_at_recovery_point = codec == "h264" and _is_recovery_point(packet, self._stream)
            check_num_frames(number + 1, self._limits)
            if codec != "vp8" and number + 1 - len(self._shown) > MAX_HIDDEN:
                raise ClipTooLarge(
                    f"the {self._name} file has over {MAX_HIDDEN} frames that its edit list hides, the limit",
                    max_hidden=MAX_HIDDEN,
                )
        if self._first is not None:
            self._skip_undecodable(self._first)
        if not self._shown:
            raise UndecodableClip(f"the {self._name} file's video has 0 frames, needs 1", num_frames=0)
        shown_at = [self._packets[number].pts for number in self._shown]
        if shown_at != sorted(shown_at) if codec in IN_DISPLAY_ORDER else len({*shown_at}) < len(shown_at):
            raise UndecodableClip(
                f"the times of the {self._name} file's {codec} frames do not tell their order"
            )
        self._shown.sort(key=lambda number: self._packets[number].pts)
        return self._rate(min(shown_at), max(shown_at), end)

    def _skip_undecodable(self, first: int) -> None:
        """Takes frames that are not shown, because frames that they depend on were cut away, from the list of
        shown ones. Decodes the frames that follow the first key frame and are shown before it, and from an
        H.264 recovery point on until a frame comes."""
        codec, start = self._stream.codec_context.name, self._packets[first].pts
        self._shown = [number for number in self._shown if number >= first]
        near = range(first + 1, min(len(self._packets), first + 1 + MAX_LEADING))
        early = frozenset(number for number in near if self._packets[number].pts < start)
        leading = early.intersection(self._shown)
        if codec in IN_DISPLAY_ORDER or not (leading or self._starts_at_recovery_point):
            return
        if leading:
            decoded = self._try(Run(first, max(leading), ()), early)
            undecodable = leading - decoded
            self._shown = [number for number in self._shown if number not in undecodable]
            # The frames behind them may tell the decoder to release frames that were cut away.
            num_behind = H264_FRAMES if undecodable and codec == "h264" else 0
            self._doubtful = undecodable.union(range(max(leading) + 1, max(leading) + 1 + num_behind))
        else:
            decoded = self._try(Run(first, near[-1] if near else first, ()), early, until_frame=True)
            start = min((self._packets[number].pts for number in decoded), default=start)
            self._shown = [number for number in self._shown if self._packets[number].pts >= start]

    def _try(self, run: Run, doubtful: frozenset[int], *, until_frame: bool = False) -> set[int]:
        """The packets in the run whose frames the decoder gives, or that of its first frame. Raises
        UndecodableClip for damage outside of the doubtful packets."""
        self._check_cost([run])
        self._decoder.thread_count = 1  # so that an error is that of the packet just given
        decoded: set[int] = set()
        for packet, number in self._seek(run):
            packet.pts = number
            try:
                decoded |= set(_sound_packets(self._decoder.decode(packet)))
            except av.error.FFmpegError:
                if number not in doubtful:
                    raise
            if decoded and until_frame:
                break
        return decoded | set(_sound_packets(self._decoder.decode(None)))

    def _held_bytes(self, frame: VideoFrame) -> int:
        """Memory of the decoder and of converting one frame at most: frames to predict from, one for each
        thread, and the copies in RGB. Pictures of a level above 5.2 may exceed it."""
        num_pixels = frame.width * frame.height
        planes = sum(plane.buffer_size for plane in frame.planes)
        most = _REFERENCES.get(self._stream.codec_context.name, 3)
        references = min(most, max(6, _REFERENCE_PIXELS // num_pixels))
        converted = 9  # two copies, and the frame before; with alpha also RGBA twice, and a strip
        if self._has_alpha(frame):
            converted = 14 + STRIP_BYTES * min(num_pixels, STRIP_PIXELS) // num_pixels
        return planes * (references + 1 + (self._decoder.thread_count or 1)) + converted * num_pixels

    def _rate(self, first: int, last: int, end: int) -> float:
        """The frame rate. first, last: pts of the frames shown first and last. end: pts after the last."""
        num_frames, stated = len(self._shown), self._stream.average_rate
        unit_s = self._stream.time_base or Fraction(0)
        if stated and abs(stated * (last - first) * unit_s - (num_frames - 1)) <= 1:
            return float(stated)
        span_s = (end - first) * unit_s
        return float(num_frames / span_s) if span_s > 0 else DEFAULT_SOURCE_FPS

    # Frames

    def _coded_frames(self, indices: Sequence[int]) -> Iterator[VideoFrame]:
        """Decodes the frames at these indices. Raises ClipTooLarge at the call, not during iteration."""
        runs = plan_runs(self._packets, [self._shown[index] for index in indices])
        self._check_cost(runs)
        return self._decode_runs(runs)

    def _check_cost(self, runs: Sequence[Run]) -> None:
        """Raises ClipTooLarge if decoding these runs would exceed the limit of decoded pixels."""
        self._num_planned = sum(run.last - run.first + 1 for run in runs)
        stated = self._stream.codec_context
        check_decoded_pixels(
            self._num_planned, *(self._coded_size or (stated.width, stated.height)), self._limits
        )

    def _decode_runs(self, runs: Sequence[Run]) -> Iterator[VideoFrame]:
        """The wanted frames of all runs. If a run fails, decodes the remaining frames once more from the
        first key frame on, and raises what that raises."""
        num_done = 0
        try:
            for run in runs:
                for frame in self._decode_run(run):
                    num_done += 1
                    yield frame
            return
        except (av.error.FFmpegError, UndecodableClip):
            wanted = [number for run in runs for number in run.wanted]
            rest = Run(self._first or 0, max(run.last for run in runs), tuple(wanted[num_done:]))
            if rest == runs[0]:
                raise
        self._check_cost([*runs, rest])
        yield from self._decode_run(rest)

    def _decode_run(self, run: Run) -> Iterator[VideoFrame]:
        """The run's wanted frames. Raises UndecodableClip if one is missing, damaged or out of order."""
        due = list(reversed(run.wanted))
        missing = set(due)
        for frame in self._decode(run, frozenset(due)):
            if frame.pts not in missing:
                continue
            if frame.is_corrupt or frame.pts != due[-1]:
                break
            missing.remove(due.pop())
            yield frame
        if due:
            raise UndecodableClip(
                f"of {len(run.wanted)} frames due in one part of the {self._name} file, "
                f"{len(run.wanted) - len(due)} come in their order",
                found=len(run.wanted) - len(due),
                needed=len(run.wanted),
            )

    def _decode(self, run: Run, wanted: frozenset[int]) -> Iterator[VideoFrame]:
        """The frames that the decoder makes of the run's packets. Skips frames that are not wanted and that
        no other frame depends on."""
        decoder, start = self._decoder, self._packets[run.first].pts
        decoder.flush_buffers()
        for packet, number in self._seek(run):
            if self._is_stopped:
                break
            if packet.is_disposable and number not in wanted:
                continue
            # Hidden frames before an open group's first frame depend on frames that were cut away.
            if packet.is_discard and self._packets[number].pts < start:
                continue
            packet.pts = number
            decoder.skip_frame = "DEFAULT" if number in wanted else "NONREF"
            # What cannot be decoded is given to the decoder all the same, because it counts frames.
            with contextlib.suppress(*((av.error.FFmpegError,) if number in self._doubtful else ())):
                for frame in decoder.decode(packet):
                    yield self._checked(frame)
        decoder.skip_frame = "DEFAULT"
        for frame in decoder.decode(None):
            yield self._checked(frame)

    def _seek(self, run: Run) -> Iterator[tuple[Packet[VideoStream], int]]:
        """The run's packets with their numbers, in file order. Raises UndecodableClip if the seek lands after
        the first one."""
        is_started = False
        for packet in self._packets_from(run.first):
            number = self._numbers.get((packet.pts, packet.pos))
            if number is None or not (is_started or number <= run.first):
                break
            if number >= run.first:
                is_started = True
                yield packet, number
            if number == run.last:
                return
        raise UndecodableClip(f"the {self._name} file's index leads past its frame at packet {run.first}")

    def _packets_from(self, first: int) -> Iterator[Packet[VideoStream]]:
        """The packets from ``first`` or one before it on. Some demuxers cannot seek in a file that starts
        between two key frames; it is read from its beginning then."""
        for pts, any_frame in ((self._packets[first].pts, False), (_BEGINNING, True)):
            with contextlib.suppress(av.error.PermissionError):
                self._file.seek(pts, stream=self._stream, any_frame=any_frame)
                packets = self._file.demux(self._stream)
                packet = next(packets)
                if any_frame or self._numbers.get((packet.pts, packet.pos), first + 1) <= first:
                    return itertools.chain([packet], packets)
        return iter(())

    def _checked(self, frame: VideoFrame) -> VideoFrame:
        """Returns the frame. Raises UndecodableClip if its size differs from that of the first frame, which
        the limits were checked with; ClipTooLarge if the first frame is larger than the file states."""
        size = frame.width, frame.height
        if self._coded_size is None:
            self._coded_size = size
            check_frame_size(*size, self._limits)
            check_decoded_pixels(self._num_planned, *size, self._limits)
        if size != self._coded_size:
            found, needed = (f"{width}x{height}" for width, height in (size, self._coded_size))
            raise UndecodableClip(
                f"a frame of the {self._name} file is {found}, the clip's first is {needed}",
                found=found,
                needed=needed,
            )
        if len(frame.format.components) == 4 and self._stream.codec_context.name == "mjpeg":
            raise UndecodableClip(
                f"the {self._name} file's Motion JPEG has 4 components (CMYK), accepted are 1 and 3"
            )
        return frame

    def _upright(self, frames: Iterator[VideoFrame]) -> Iterator[torch.Tensor]:
        with decoder_errors(self._num_bytes, self._name):
            for frame in frames:
                image_HWC = self._rgb(frame)
                if self._turn.swaps_sides:
                    image_HWC = image_HWC.swapaxes(0, 1)
                image_HWC = image_HWC[:: self._turn.step_y, :: self._turn.step_x]
                yield torch.from_numpy(np.ascontiguousarray(image_HWC))

    def _rgb(self, frame: VideoFrame) -> np.ndarray:
        """uint8 [H, W, 3]. threads=1, because by default a conversion starts one thread per core."""
        if not self._has_alpha(frame):
            return frame.to_ndarray(format="rgb24", threads=1)
        image_HWC = frame.to_ndarray(format="rgba", threads=1)
        if image_HWC[..., 3].min() == 255:
            return np.ascontiguousarray(image_HWC[..., :3])
        return to_rgb(Image.fromarray(image_HWC), "white")

    def _has_alpha(self, frame: VideoFrame) -> bool:
        """Whether the frame is put on white."""
        return self._transparent != "drop" and any(part.is_alpha for part in frame.format.components)


def _sound_packets(frames: Iterable[VideoFrame]) -> Iterator[int]:
    return (frame.pts for frame in frames if frame.pts is not None and not frame.is_corrupt)


def _is_key(packet: Packet[VideoStream], codec: str, number: int) -> bool:
    """Whether decoding can start at the packet."""
    if codec == "gif":  # every frame is marked as a key frame, but is drawn over the frame before it
        return number == 0
    if codec in ("mpeg1video", "mpeg2video"):
        # QuickTime files mark none, which marks all. A picture's header tells (ISO/IEC 13818-2, 6.2.3).
        _, found, picture = bytes(packet).partition(b"\0\0\1\0")
        return packet.is_keyframe and (not found or picture[1:2] == b"" or picture[1] >> 3 & 7 == 1)
    return packet.is_keyframe


def _is_recovery_point(packet: Packet[VideoStream], stream: VideoStream) -> bool:
    """Whether an H.264 packet, in the form of MP4 and Matroska, has a recovery point message and no IDR
    picture, as where a picture begins to be refreshed bit by bit (ITU-T H.264, 7.3.1 and D.1.8; ISO/IEC
    14496-15, 5.3.3.1)."""
    settings, data = stream.codec_context.extradata or b"", bytes(packet)
    if len(settings) < 5 or settings[0] != 1:
        return False
    width, at, has_message = (settings[4] & 3) + 1, 0, False
    while at + width + 2 <= len(data):
        unit = data[at + width : at + width + 2]
        if unit[0] & 31 == 5:
            return False  # a whole picture
        has_message |= unit[0] & 31 == 6 and unit[1] == 6
        at += width + int.from_bytes(data[at : at + width], "big")
    return has_message


def _pts_of(packet: Packet[VideoStream]) -> int | None:
    """When the packet's frame is shown; its decoding time if the file states no presentation time."""
    return packet.dts if packet.pts is None else packet.pts


def _turn_of(frame: VideoFrame) -> Turn:
    """The quarter turn and mirroring nearest to the display matrix [a b u; c d v; x y w], which maps (x, y)
    to (a x + c y, b x + d y), with y pointing down (ISO/IEC 14496-12, section 6.2.2)."""
    side_data: Mapping[str, Any] = frame.side_data
    matrix = bytes(side_data.get("DISPLAYMATRIX", b""))
    if len(matrix) != 36:
        return Turn(False, 1, 1)
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
    swaps_sides = abs(b) + abs(c) > abs(a) + abs(d)
    x, y = (c, b) if swaps_sides else (a, d)
    return Turn(swaps_sides, -1 if y < 0 else 1, -1 if x < 0 else 1)
