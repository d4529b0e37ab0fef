"""Which packets of a stream have to be decoded for the frames that are wanted.

Owns the plan: runs of packets, each from a frame that is decoded by itself to the last one wanted before the
next such start. Pure numbers; ``video_stream`` reads and decodes.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from encoder_service.errors import UndecodableClip


class PacketFact(NamedTuple):
    """One packet in the order of the file. pts: when its frame is shown, in the stream's time base."""

    pts: int
    is_key: bool


class Run(NamedTuple):
    """Packets [first, last] of the file's order. wanted: pts of the frames to keep."""

    first: int
    last: int
    wanted: frozenset[int]

    @property
    def num_packets(self) -> int:
        """At most so many frames are decoded: the decoder leaves out some that no other depends on."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class PacketIndex:
    """packets: in the file's order; shown: pts of the frames, ascending; end: when the last one's time is
    over, in the stream's time base."""

    packets: list[PacketFact]
    shown: list[int]
    end: int

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """A packet's place in the file's order by its pts."""
        return {packet.pts: place for place, packet in enumerate(self.packets)}

    @functools.cached_property
    def shares_times(self) -> bool:
        """Whether two packets have one time, which names neither then."""
        return len({packet.pts for packet in self.packets}) < len(self.packets)

    def run_through(self, index: int) -> Run:
        """Every packet to the last that is shown no later than this frame; wants none by its time."""
        until = self.shown[index]
        last = max(place for place, packet in enumerate(self.packets) if packet.pts <= until)
        return Run(0, last, frozenset())


def check_ascending(shown: Sequence[int], name: str) -> None:
    """shown: pts of the frames in the file's order, of a codec that has no other; name: of the container, for
    people. Raises UndecodableClip where a frame is shown before the one before it."""
    for place, (before, pts) in enumerate(pairwise(shown), 1):
        if pts < before:
            raise UndecodableClip(
                f"the {name} file shows frame {place} at {pts} ticks, before frame {place - 1} at {before}",
                frame=place,
            )


def plan_runs(packets: Sequence[PacketFact], wanted: Sequence[int]) -> list[Run]:
    """packets: all of a stream's, whose pts differ; wanted: pts of some of them, ascending.

    A frame is decoded from the last key frame that is shown no later: frames between two key frames that are
    shown before the second may be predicted from frames before it. What can be reached by going on is not
    looked up again.
    """
    places = {packet.pts: place for place, packet in enumerate(packets)}
    keys = [(packet.pts, place) for place, packet in enumerate(packets) if packet.is_key]
    keys.sort()
    key_pts = [pts for pts, _ in keys]
    runs: list[Run] = []
    for pts in wanted:
        at = bisect.bisect_right(key_pts, pts) - 1
        start = keys[at][1] if at >= 0 else 0
        place = places[pts]
        start = min(start, place)
        if runs and start <= runs[-1].last + 1:
            run = runs[-1]
            runs[-1] = Run(run.first, max(run.last, place), run.wanted | {pts})
        else:
            runs.append(Run(start, place, frozenset({pts})))
    return runs
