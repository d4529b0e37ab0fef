"""MP4, WebM, Matroska and GIF to upright RGB frames, through PyAV.

Owns the choice of the stream, the count and the rate of its frames, and their decoding. Which frames are
wanted is ``video_rules``', which packets that takes ``video_plan``'s, the limits ``video_file``'s.

The rules, and what each follows:

* Frames are counted by the stream's packets and addressed in the order in which they are shown. The rate is
  the container's average rate, as the reference's PyAV reader takes it; where the frames' own times differ
  from that by more than a frame, as in files of variable rate, it is their number over the time they take, as
  of its default reader (torchcodec).
* Where two frames have one time, as those of fast clips in Matroska, which counts milliseconds, frames are
  taken in the order of decoding, which has to be that of the times.
* Pixels are those of ``VideoFrame.to_ndarray(format="rgb24")``, the reference reader's.
* A display matrix is applied, to a quarter turn, as players do; the reference's PyAV reader leaves it.
* A file that is cut off, a frame that cannot be decoded, or one of another size than the first fail the clip:
  rows of a picture that is partly guessed would be cached as if they were its own.
* Frames that follow a key frame may lean on ones before it (an open group of pictures, a gradual refresh):
  where decoding from one fails or leaves out a frame that is wanted, the rest is decoded from the first
  packet on. What fails there too is damage.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction

import av
import torch
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from encoder_service.errors import ClipTooLarge, UndecodableClip
from encoder_service.ingest.video_container import CONTAINER_NAMES, Container
from encoder_service.ingest.video_demux import CODECS, UNORDERED, check_streams, chosen_stream, open_demuxer
from encoder_service.ingest.video_file import (
    ClipHeader,
    check_decoded_pixels,
    check_frame_size,
    decoder_errors,
)
from encoder_service.ingest.video_gif import gif_blocks
from encoder_service.ingest.video_plan import PacketFact, PacketIndex, Run, check_ascending, plan_runs
from encoder_service.ingest.video_rules import DEFAULT_SOURCE_FPS
from encoder_service.ingest.video_settings import ClipLimits
from encoder_service.ingest.video_turn import turn_of

_VP8_SHOWN = 0x10  # of a frame's first byte, RFC 6386 section 9.1
MAX_UNSHOWN = 8192  # packets that an edit list hides: a seek takes time by their square
MAX_THREAD_PIXELS = 1 << 27  # of all frames that a decoder's threads hold


class StreamClip:
    """A clip in a container of FFmpeg's. See ``video_file.ClipSource``."""

    def __init__(self, data: bytes, container: Container, limits: ClipLimits) -> None:
        self._data = data
        self._container = container
        self._name = CONTAINER_NAMES[container]
        self._limits = limits
        self._file: InputContainer | None = None
        self._is_stopped = False
        self._coded_size: tuple[int, int] | None = None
        try:
            with self._errors():
                self._open()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        if self._index.shares_times and indices:
            run = self._index.run_through(indices[-1])
            self._check_cost(run.num_packets)
            return self._upright_all(self._decode_in_order(indices, run))
        runs = self._planned(indices)
        self._check_cost(sum(run.num_packets for run in runs))
        return self._upright_all(self._decode_all([self._index.shown[index] for index in indices], runs))

    def _planned(self, indices: Sequence[int]) -> list[Run]:
        return plan_runs(self._index.packets, [self._index.shown[index] for index in indices])

    def _check_cost(self, num_frames: int) -> None:
        """Raises ClipTooLarge."""
        assert self._coded_size is not None
        check_decoded_pixels(num_frames, *self._coded_size, self._limits)

    def _upright_all(self, frames: Iterator[VideoFrame]) -> Iterator[torch.Tensor]:
        with self._errors():
            for frame in frames:
                yield self._upright(frame)

    def _decode_all(self, wanted: Sequence[int], runs: Sequence[Run]) -> Iterator[VideoFrame]:
        """The wanted frames, run by run; from where a run fails on, by decoding from the first packet. Raises
        what that fails with."""
        num_done = num_decoded = 0
        try:
            for run in runs:
                num_decoded += run.num_packets
                for frame in self._decode(run):
                    num_done += 1
                    yield frame
            return
        except (av.error.FFmpegError, UndecodableClip):
            last = max((run.last for run in runs if run.wanted & {*wanted[num_done:]}), default=0)
            if not last:
                raise
        if self._coded_size is not None:
            self._check_cost(num_decoded + last + 1)
        self._stream.codec_context.flush_buffers()
        yield from self._decode(Run(0, last, frozenset(wanted[num_done:])))

    # -- the header ------------------------------------------------------------------------------------

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return decoder_errors(len(self._data), self._name)

    def _open(self) -> None:
        """Raises UndecodableClip, ClipTooLarge."""
        check_streams(self._data, self._container, self._limits)
        file = self._file = self._demuxer(CODECS)
        self._stream = chosen_stream(file, self._name)
        self._video_place = file.streams.video.index(self._stream)
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
        # Each thread holds a frame.
        context.thread_count = min(self._limits.decode_threads, max(1, MAX_THREAD_PIXELS // (width * height)))
        context.thread_type = "AUTO"
        self._index = self._read_index(file)
        self._fps = self._checked_rate()
        # How a clip is turned is told with its frames only.
        shares_times = self._index.shares_times
        run = self._index.run_through(0) if shares_times else self._planned([0])[0]
        check_decoded_pixels(run.num_packets, width, height, self._limits)
        first = (
            self._decode_in_order([0], run)
            if shares_times
            else self._decode_all(self._index.shown[:1], [run])
        )
        self.header = self._read_header(next(first))

    def _demuxer(self, codecs: Sequence[str], **options: str) -> InputContainer:
        """See ``video_demux.open_demuxer``."""
        return open_demuxer(self._data, self._container, self._limits, codecs, **options)

    def _read_index(self, file: InputContainer) -> PacketIndex:
        """Raises UndecodableClip for a stream without frames or whose times run backwards, ClipTooLarge for
        too many."""
        stream, most = self._stream, self._limits.max_source_frames
        packets: list[PacketFact] = []
        shown: list[int] = []
        end = num_unshown = 0
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
            num_unshown += packet.is_discard
            if not packet.is_discard and not (is_vp8 and not bytes(packet)[0] & _VP8_SHOWN):
                shown.append(pts)
            if len(packets) > most:
                raise ClipTooLarge(f"the clip has over {most} frames, which is the limit", max_frames=most)
            if num_unshown > MAX_UNSHOWN:
                raise ClipTooLarge(
                    f"the {self._name} file has over {MAX_UNSHOWN} frames that its edit list hides, which is "
                    "the limit",
                    max_unshown=MAX_UNSHOWN,
                )
        if not shown:
            raise UndecodableClip(f"the {self._name} file's video has 0 frames, needs 1", num_frames=0)
        if stream.codec_context.name in UNORDERED:
            check_ascending(shown, self._name)
        if stream.frames > len(packets) and self._container == "mov":
            # Those that an edit list leaves out are promised too.
            with self._demuxer((), ignore_editlist="1") as unedited:
                found = sum(1 for packet in unedited.demux(unedited.streams[stream.index]) if packet.size)
            if stream.frames > found:
                raise UndecodableClip(
                    f"the {self._name} file promises {stream.frames} frames and has {found}",
                    found=found,
                    needed=stream.frames,
                )
        if self._container == "gif" and len(packets) != (needed := gif_blocks(self._data).num_pictures):
            raise UndecodableClip(
                f"the GIF file has {needed} pictures, of which {len(packets)} can be read",
                found=len(packets),
                needed=needed,
            )
        return PacketIndex(packets, sorted(shown), end)

    def _checked_rate(self) -> float:
        """Frames a second. Raises ClipTooLarge for a clip that lasts too long."""
        fps, most_s = self._rate(), self._limits.max_duration_s
        duration_s = len(self._index.shown) / fps
        if duration_s > most_s:
            raise ClipTooLarge(
                f"the clip lasts {duration_s:.1f} s, the limit is {most_s:.1f} s",
                found_s=round(duration_s, 1),
                max_duration_s=most_s,
            )
        return fps

    def _read_header(self, first: VideoFrame) -> ClipHeader:
        """Raises ClipTooLarge."""
        num_frames = len(self._index.shown)
        width, height = first.width, first.height
        check_frame_size(width, height, self._limits)
        self._turn = turn_of(first)
        if self._turn.swaps_sides:
            width, height = height, width
        return ClipHeader(num_frames, self._fps, height, width, num_frames / self._fps, self._name)

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
        not come when it is due: what comes in its place is another frame."""
        decoder = self._stream.codec_context
        start = self._index.packets[run.first].pts
        due, num_done = sorted(run.wanted), 0
        for packet in self._packets(run):
            pts = None if packet is None else _pts_of(packet)
            wanted = pts in run.wanted
            if packet is not None:
                if packet.is_disposable and not wanted:
                    continue
                # Of an open group of pictures that a trimmed clip starts with: what it leans on was cut away.
                if packet.is_discard and pts is not None and pts < start:
                    continue
                # A frame that no other is predicted from is not decoded for nothing.
                decoder.skip_frame = "DEFAULT" if wanted else "NONREF"
            for frame in decoder.decode(packet):
                self._check_size(frame, run)
                pts = frame.pts
                if pts is None or pts not in run.wanted or (num_done and pts <= due[num_done - 1]):
                    continue
                if frame.is_corrupt:
                    raise UndecodableClip(f"the frame at {frame.time} s of the {self._name} file is damaged")
                if pts != due[num_done]:
                    # Left out before it: frames of a picture that is whole only after some more of them, as
                    # with a gradual refresh, and damaged ones.
                    raise self._left_out(due, num_done)
                num_done += 1
                yield frame
        decoder.flush_buffers()
        if num_done < len(due):
            raise self._left_out(due, num_done)

    def _left_out(self, due: Sequence[int], num_done: int) -> UndecodableClip:
        return UndecodableClip(
            f"of {len(due)} frames wanted of one part of the {self._name} file, {num_done} can be decoded in "
            "their order",
            found=num_done,
            needed=len(due),
        )

    def _decode_in_order(self, indices: Sequence[int], run: Run) -> Iterator[VideoFrame]:
        """The frames at these places of those that are shown, read from the first packet on, as the
        reference's reader does, where two are shown at one time. run: the packets that takes.

        Raises UndecodableClip unless every frame comes at its place's time, since the order would not be that
        of the times else; and where one is left out. That one of the last time is missing shows at the end
        only: the last one wanted waits for that.
        """
        decoder, shown = self._stream.codec_context, self._index.shown
        due = shown[: bisect_right(shown, shown[indices[-1]])]
        wanted, num_done = frozenset(indices), 0
        held: VideoFrame | None = None
        decoder.flush_buffers()
        decoder.skip_frame = "DEFAULT"
        for packet in self._first_packets(run.num_packets):
            for frame in decoder.decode(packet):
                self._check_size(frame, run)
                if frame.is_corrupt:
                    raise UndecodableClip(f"the frame at {frame.time} s of the {self._name} file is damaged")
                if num_done == len(due):
                    continue
                if frame.pts != due[num_done]:
                    raise self._left_out(due, num_done)
                if num_done in wanted:
                    if held is not None:
                        yield held
                    held = frame
                num_done += 1
        decoder.flush_buffers()
        if held is None or num_done < len(due):
            raise self._left_out(due, num_done)
        yield held

    def _first_packets(self, count: int) -> Iterator[Packet[VideoStream] | None]:
        """Then None, which empties the decoder. A seek by time might land on another packet of that time."""
        with self._demuxer(CODECS) as file:
            for packet in itertools.islice(file.demux(file.streams.video[self._video_place]), count):
                if self._is_stopped:
                    break
                yield packet
            yield None

    def _packets(self, run: Run) -> Iterator[Packet[VideoStream] | None]:
        """The run's packets in the file's order, then None, which empties the decoder."""
        assert self._file is not None
        facts = self._index.packets
        start, end = facts[run.first].pts, facts[run.last].pts
        places = self._index.places
        self._file.seek(start, stream=self._stream)
        is_started = False
        for packet in self._file.demux(self._stream):
            if not packet.size or self._is_stopped:
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

    def _check_size(self, frame: VideoFrame, run: Run) -> None:
        """Of a frame that nobody wants too: its pixels are counted as the first one's. Raises
        UndecodableClip for another size than that, ClipTooLarge."""
        if self._coded_size is None:
            self._coded_size = frame.width, frame.height
            self._check_cost(run.num_packets)
        if (frame.width, frame.height) != self._coded_size:
            width, height = self._coded_size
            raise UndecodableClip(
                f"the frame at {frame.time} s is {frame.width}x{frame.height}, the clip's first is "
                f"{width}x{height}",
                found=f"{frame.width}x{frame.height}",
                needed=f"{width}x{height}",
            )

    def _upright(self, frame: VideoFrame) -> torch.Tensor:
        """uint8 [H, W, 3]."""
        # One thread: by default the conversion starts as many as there are cores, for each thread that reads.
        return torch.from_numpy(self._turn.apply(frame.to_ndarray(format="rgb24", threads=1)))


def _pts_of(packet: Packet[VideoStream]) -> int | None:
    """When the packet's frame is shown; where only the order of decoding is told, that."""
    return packet.dts if packet.pts is None else packet.pts
