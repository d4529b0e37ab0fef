"""A fleet of fake encoders on loopback addresses, a name that resolves to it, and callers that never pause.

Owns what is done to replicas and the record of every call. Used by the tests beside it and by bench/fleet.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from lm_adapter.errors import EncoderError, ItemFailed
from lm_adapter.fleet import AsyncFleetClient, FleetSettings
from lm_adapter.testing import FakeEncoder, FakeScript, fake_rows
from lm_adapter.types import CacheTier, EncodedRows, ImageItem
from tests.fleet.wire import Wire

QUICK = FleetSettings(
    refresh_s=0.1,
    check_interval_s=0.25,
    check_timeout_s=0.25,
    hedge_min_s=0.05,
    hedge_max_s=0.5,
    max_eject_s=4.0,
)
"""A fleet whose times are short enough to watch."""
DRAINING = (
    grpc.StatusCode.UNAVAILABLE,
    ItemFailed("the service is stopping", reason="DRAINING", status=14, retryable=True),
)


class LoopbackReplica:
    """A fake behind a wire. ``script`` lives as long as the replica, through its restarts."""

    def __init__(self, number: int, latency_s: float) -> None:
        self.script = FakeScript(latency_s=latency_s)
        self.fake = FakeEncoder("127.0.0.1:0", script=self.script)
        self.wire = Wire(f"127.0.0.{2 + number}", "")

    @property
    def target(self) -> str:
        return self.wire.target

    async def start(self) -> None:
        await asyncio.to_thread(self.fake.start)
        self.wire.beyond = self.fake.target
        await self.wire.start()

    async def kill(self) -> None:
        """As kill -9: every connection is reset, nothing is finished."""
        await self.wire.cut()
        await asyncio.to_thread(self.fake.stop)

    async def drain(self, grace_s: float) -> None:
        """As SIGTERM: health drops, new work is refused, what was accepted finishes, the process ends."""
        self.script.serving = False
        for method in ("Encode", "Prefetch"):
            self.script.call_failures[method] = DRAINING
        await asyncio.sleep(grace_s)
        await asyncio.to_thread(self.fake.stop, grace_s)
        await self.wire.cut()
        self.script.serving = True
        self.script.call_failures.clear()

    def slow(self, latency_s: float) -> None:
        self.script.latency_s = latency_s


class LoopbackFleet:
    """``endpoints`` is what a headless service's name resolves to: for a client's ``endpoints``."""

    def __init__(self, num_replicas: int, latency_s: float = 0.004) -> None:
        self.latency_s = latency_s
        self.num_first = num_replicas
        self.replicas: list[LoopbackReplica] = []
        self.listed: list[LoopbackReplica] = []
        self.gone: list[LoopbackReplica] = []

    async def endpoints(self) -> list[str]:
        return [one.target for one in self.listed]

    async def scale(self, num_replicas: int, grace_s: float = 0.3) -> None:
        """To this many: new ones are listed when they serve; those that go drain, and leave the list."""
        while len(self.replicas) < num_replicas:
            one = LoopbackReplica(len(self.replicas) + len(self.gone), self.latency_s)
            await one.start()
            self.replicas.append(one)
            self.listed.append(one)
        leaving = self.replicas[num_replicas:]
        del self.replicas[num_replicas:]
        self.gone += leaving
        await asyncio.gather(*(self._leave(one, grace_s) for one in leaving))

    async def _leave(self, one: LoopbackReplica, grace_s: float) -> None:
        self.listed.remove(one)
        await one.drain(grace_s)

    async def close(self) -> None:
        for one in self.replicas:
            await one.kill()


@contextlib.asynccontextmanager
async def loopback_fleet(num_replicas: int, latency_s: float = 0.004) -> AsyncIterator[LoopbackFleet]:
    fleet = LoopbackFleet(num_replicas, latency_s)
    try:
        await fleet.scale(num_replicas)
        yield fleet
    finally:
        await fleet.close()


@dataclass(frozen=True)
class CallNote:
    """One call of one item, as its caller saw it; times on time.monotonic's clock. outcome: the tier, or the
    failure's reason."""

    begun_s: float
    latency_s: float
    outcome: str
    failed: bool
    home: str = ""
    """Of the item, when the call began."""

    @property
    def ended_s(self) -> float:
        return self.begun_s + self.latency_s


@dataclass
class Load:
    """Callers at work: ``async with`` starts and ends them. Items are drawn by Zipf's law (exponent 0.9) from
    num_items; every row that comes is compared with what it has to be."""

    client: AsyncFleetClient
    num_callers: int = 8
    num_items: int = 300
    timeout_s: float = 10.0
    pause_s: float = 0.01
    seed: int = field(default_factory=lambda: random.SystemRandom().getrandbits(32))
    notes: list[CallNote] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_begun: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.digests = [draw.randbytes(32) for _ in range(self.num_items)]
        self._weights = [1 / (rank + 1) ** 0.9 for rank in range(self.num_items)]
        self._draw = draw
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.ensure_future(self._caller()) for _ in range(self.num_callers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def until(self, num_calls: int, limit_s: float = 20) -> None:
        """Until this many more calls have ended."""
        wanted, ends_s = len(self.notes) + num_calls, time.monotonic() + limit_s
        while len(self.notes) < wanted:
            assert time.monotonic() < ends_s, f"{len(self.notes)} calls of {wanted} ended in {limit_s} s"
            await asyncio.sleep(0.005)

    async def _caller(self) -> None:
        while not self._stop.is_set():
            count = self._draw.randint(1, 3)
            digests = list(dict.fromkeys(self._draw.choices(self.digests, self._weights, k=count)))
            self.num_begun += len(digests)
            begun_s = time.monotonic()
            places = [self.client.home(digest) for digest in digests]
            seen: Counter[int] = Counter()
            try:
                items = [ImageItem(b"content", digest=digest) for digest in digests]
                stream = self.client.encode_iter(items, timeout_s=self.timeout_s)
                async with contextlib.aclosing(stream):
                    async for index, outcome in stream:
                        seen[index] += 1
                        self._note(begun_s, digests[index], places[index], outcome)
            except EncoderError as error:
                self.wrong.append(f"the whole call failed: {error!r}")
            if seen != Counter(range(len(digests))):
                self.wrong.append(f"{len(digests)} items were answered so: {dict(seen)}")
            await asyncio.sleep(self.pause_s)

    def _note(self, begun_s: float, digest: bytes, home: str, outcome: EncodedRows | ItemFailed) -> None:
        latency_s = time.monotonic() - begun_s
        if isinstance(outcome, ItemFailed):
            self.notes.append(
                CallNote(begun_s, latency_s, f"{outcome.reason}: {outcome.message}", True, home)
            )
            return
        expected = fake_rows(digest, outcome.num_rows, outcome.width)
        if outcome.content_digest != digest or not np.array_equal(outcome.numpy(), expected):
            self.wrong.append(f"the rows of {digest.hex()} are not its own")
        self.notes.append(CallNote(begun_s, latency_s, outcome.tier.value, False, home))

    # What came of it ---------------------------------------------------------------------------------------

    def failures(self) -> list[str]:
        return [note.outcome for note in self.notes if note.failed] + self.wrong

    def hit_rate(self, notes: Sequence[CallNote]) -> float:
        return sum(note.outcome != CacheTier.MISS.value for note in notes) / max(1, len(notes))

    def since(self, begun_s: float) -> list[CallNote]:
        return [note for note in self.notes if note.begun_s >= begun_s]

    def recovery_s(
        self,
        event_s: float,
        touched: Container[str] | None = None,
        until_s: float = math.inf,
        before_s: float = 3.0,
    ) -> float:
        """From the event until the last call that it disturbed has ended; 0 when it disturbed none. Disturbed
        is what takes three times as long as the 99th percentile of the time before the event, and 50 ms
        longer, of items whose home, when their call began before until_s, was one of those touched
        (None: any)."""
        earlier = [one.latency_s for one in self.notes if event_s - before_s < one.ended_s < event_s]
        usual_s = percentile(earlier, 0.99)
        limit_s = max(3 * usual_s, usual_s + 0.05)
        later = [one for one in self.notes if one.ended_s >= event_s]
        assert later, "no call ended after the event"
        return max(
            (
                one.ended_s - event_s
                for one in later
                if one.latency_s > limit_s
                and one.begun_s < until_s
                and (touched is None or one.home in touched)
            ),
            default=0.0,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all are not above; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def homes(client: AsyncFleetClient, digests: Sequence[bytes]) -> dict[bytes, str]:
    return {digest: client.home(digest) for digest in digests}


def moved_share(before: dict[bytes, str], after: dict[bytes, str]) -> float:
    return sum(before[digest] != after[digest] for digest in before) / len(before)


async def settled(client: AsyncFleetClient, num_up: int, limit_s: float = 10) -> None:
    """Until the client sees exactly this many replicas, all up."""
    ends_s = time.monotonic() + limit_s
    while [one.state for one in client.replicas] != ["up"] * num_up:
        assert time.monotonic() < ends_s, client.replicas
        await asyncio.sleep(0.01)
