"""Messages that arrive slowly are counted by what their connection has received."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from encoder_service.errors import DeadlineExceeded, QueueFull
from encoder_service.rpc import arrivals as module
from encoder_service.rpc.arrivals import Arrivals

pytestmark = pytest.mark.anyio

MAX_MESSAGE, MAX_ARRIVING = 100, 400
TCP, UNIX = "ipv4:10.0.0.7:4711", "unix:"


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.002)


class Call:
    """A call's context whose message comes when it is given."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.num_reads = 0
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return self._peer

    async def read(self) -> bytes:
        self.num_reads += 1
        return await asyncio.shield(self.message)


class Kernel:
    """received: bytes by peer."""

    def __init__(self) -> None:
        self.received = {TCP: 1000}
        self.num_checks = 0

    def __call__(self, peers: Collection[str]) -> Mapping[str, int]:
        self.num_checks += 1
        return {peer: count for peer, count in self.received.items() if peer in peers}

    async def check(self) -> None:
        """Returns after two more checks of the connections, once their counts are used."""
        least = self.num_checks + 2
        async with asyncio.timeout(10):
            while self.num_checks < least:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)


Started = tuple[Call, asyncio.Task[bytes | None]]


class Rig:
    def __init__(self) -> None:
        self.kernel = Kernel()
        self.arrivals = Arrivals(MAX_ARRIVING, MAX_MESSAGE, self.kernel)

    def start(self, peer: str, within_s: float = 10.0, holder: str = "a") -> Started:
        call: Any = Call(peer)
        return call, asyncio.get_running_loop().create_task(self.arrivals.read(call, (holder,), within_s))


async def finish(started: Iterable[Started], message: bytes = b"a") -> None:
    for call, reading in started:
        call.message.set_result(message)
        assert await reading == message


async def test_a_message_that_is_complete_at_once_needs_no_check() -> None:
    rig = Rig()
    call, reading = rig.start(TCP)
    call.message.set_result(b"abc")
    assert await reading == b"abc"
    assert rig.kernel.num_checks == 0


async def test_p67_late_messages_count_with_the_bytes_of_their_connection() -> None:
    rig = Rig()
    rig.kernel.received[TCP] = 0
    (first, reading), (second, other) = rig.start(TCP), rig.start(TCP)
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 0
    rig.kernel.received[TCP] += 90
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 90
    rig.kernel.received[TCP] += 500
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 2 * MAX_MESSAGE, "two messages are no larger"
    rig.kernel.received[TCP] -= 480
    first.message.set_result(bytes(60))
    assert await reading == bytes(60)
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 50
    second.message.set_result(bytes(50))
    await other
    assert rig.arrivals.num_bytes == 0


async def test_p67_only_as_many_messages_are_received_at_once_as_may_be_of_the_largest_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHECK_S", 10)
    rig = Rig()
    stalled = [rig.start(TCP) for _ in range(8)]
    others = [rig.start("ipv4:10.0.0.8:1", holder="b") for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [call.num_reads for call, _ in stalled] == [1] * 3 + [0] * 5, "a quarter is left to others"
    assert [call.num_reads for call, _ in others] == [1, 0]
    await finish([*others, *stalled])


async def test_p67_what_came_before_a_message_is_late_counts_unless_it_was_delivered() -> None:
    rig = Rig()
    rig.kernel.received[TCP] = 70
    delivered, reading = rig.start(TCP)
    delivered.message.set_result(bytes(70))
    await reading
    late, reading = rig.start(TCP)
    rig.kernel.received[TCP] += 40  # at once, and nothing afterwards
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 40
    late.message.set_result(bytes(40))
    await reading
    rig.kernel.received[TCP] = 30  # another connection from the same address
    late, reading = rig.start(TCP)
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 30
    late.message.set_result(bytes(30))
    await reading


async def test_p67_one_check_ends_the_newest_connections_that_have_no_room() -> None:
    rig = Rig()
    peers = [f"ipv4:10.0.0.9:{port}" for port in range(1, 41)]
    rig.kernel.received.update(dict.fromkeys(peers, 0))
    calls = [rig.start(peer) for peer in peers]
    while not all(call.num_reads for call, _ in calls):
        await rig.kernel.check()
    await rig.kernel.check()
    rig.kernel.received.update(dict.fromkeys(peers, 90))
    await rig.kernel.check()
    await asyncio.wait([reading for _, reading in calls], timeout=0.001)
    assert [reading.done() for _, reading in calls] == [False] * 3 + [True] * 37, "300 of 400 bytes"
    assert rig.arrivals.num_bytes == 3 * 90
    await finish(calls[:3], bytes(90))
    for _, refused in calls[3:]:
        with pytest.raises(QueueFull):
            await refused
    assert rig.arrivals.num_bytes == 0


async def test_p67_small_messages_are_received_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 10)
    monkeypatch.setattr(module, "LEAST_EXPECTED_BYTES", 1)
    rig = Rig()
    for _ in range(40):
        await finish([rig.start(TCP)])
    many = [rig.start(TCP) for _ in range(60)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert {call.num_reads for call, _ in many} == {1}
    many[0][0].message.set_result(bytes(MAX_MESSAGE))
    await many[0][1]
    more = [rig.start(TCP) for _ in range(9)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(call.num_reads for call, _ in more) <= 3, "after a large one, fewer at once"
    await finish([*many[1:], *more])


async def test_p67_a_late_message_releases_its_estimate() -> None:
    rig = Rig()
    stalled = [rig.start(TCP) for _ in range(8)]
    await finish([rig.start(TCP)])
    for _, late in stalled:
        late.cancel()


async def test_p67_without_the_kernels_count_a_late_message_is_as_large_as_one_may_be() -> None:
    rig = Rig()
    started = [rig.start(UNIX) for _ in range(4)]
    await rig.kernel.check()
    await rig.kernel.check()
    assert rig.arrivals.num_bytes == 300
    with pytest.raises(QueueFull, match="hold 300 bytes of 400, 300 of them this caller's"):
        await started.pop()[1]
    await finish([rig.start(UNIX)])  # a message that comes at once needs no room
    await finish(started, bytes(MAX_MESSAGE))
    assert rig.arrivals.num_bytes == 0


async def test_p67_a_connection_that_sends_too_much_ends_its_own_messages_only() -> None:
    rig = Rig()
    rig.kernel.received["ipv4:10.0.0.8:1"] = 0
    flooding = [rig.start(TCP)[1] for _ in range(5)]
    call, reading = rig.start("ipv4:10.0.0.8:1", holder="b")
    await rig.kernel.check()
    await rig.kernel.check()
    rig.kernel.received[TCP] += 401
    for refused in flooding:
        with pytest.raises(QueueFull, match="of 400") as caught:
            await refused
        assert caught.value.retry_after_ms
    assert not reading.done()
    assert rig.arrivals.num_bytes == 0
    call.message.set_result(b"a")
    await reading


async def test_callers_that_leave_or_miss_their_deadline_hold_nothing() -> None:
    rig = Rig()
    _, left = rig.start(UNIX)
    _, late = rig.start(UNIX, within_s=0.05)
    await rig.kernel.check()
    left.cancel()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await late
    await asyncio.wait([left])
    assert rig.arrivals.num_bytes == 0
    await asyncio.sleep(0.05)  # a check that had begun may still run
    num_checks = rig.kernel.num_checks
    await asyncio.sleep(0.02)
    assert rig.kernel.num_checks == num_checks, "no check without an incomplete message"


async def test_p67_connections_that_leave_in_the_middle_of_a_message_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 4)
    rig = Rig()
    for port in range(20):
        peer = f"ipv4:10.0.0.1:{port + 1}"
        rig.kernel.received[peer] = 1000
        _, reading = rig.start(peer)
        await rig.kernel.check()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert len(rig.arrivals._delivered) <= 4
