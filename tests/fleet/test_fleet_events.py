"""What happens to replicas under load: no request fails that had a healthy one, and keys keep their homes."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace

import grpc
import pytest

from lm_adapter.errors import ItemFailed
from lm_adapter.fleet import AsyncFleetClient
from tests.fleet.rig import (
    QUICK,
    Load,
    LoopbackFleet,
    homes,
    loopback_fleet,
    moved_share,
    percentile,
    settled,
)

pytestmark = pytest.mark.anyio
KEYS = [secrets.token_bytes(32) for _ in range(2000)]
# Of calls that the event touches, by their home; on a slow machine others are late too.
RECOVERED_S = 4.0
"""Far above what is measured (docs/fleet.md), for machines that are busy with something else."""


def says(event: str, load: Load, event_s: float, client: AsyncFleetClient) -> None:
    after = [one.latency_s for one in load.since(event_s)]
    print(
        f"{event}: {len(load.notes)} items, recovery {1000 * load.recovery_s(event_s):.0f} ms, "
        f"p99 after {1000 * percentile(after, 0.99):.0f} ms, {client.counts}"
    )


async def test_scaling_4_8_3_moves_the_ideal_share_of_keys_and_fails_nothing() -> None:
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client) as load:
            await load.until(300)
            with_four = homes(client, KEYS)
            await fleet.scale(8)
            await settled(client, 8)
            with_eight = homes(client, KEYS)
            await load.until(300)
            event_s = time.monotonic()
            await fleet.scale(3)
            await settled(client, 3)
            found_s = time.monotonic()
            with_three = homes(client, KEYS)
            await load.until(300)
        says("4 -> 8 -> 3", load, event_s, client)
    assert load.failures() == []
    # Ideal: 4 of 8 homes are new; 5 of 8 go. Four standard deviations of 2000 draws.
    assert moved_share(with_four, with_eight) == pytest.approx(4 / 8, abs=0.045)
    assert moved_share(with_eight, with_three) == pytest.approx(5 / 8, abs=0.045)
    # And no key moved that need not: to a replica that was there, or from one that stays.
    old = set(with_four.values())
    assert not any(with_eight[key] in old for key in KEYS if with_eight[key] != with_four[key])
    left = set(with_three.values())
    assert not any(with_eight[key] in left for key in KEYS if with_eight[key] != with_three[key])
    left_behind = {one.target for one in fleet.gone}
    assert load.recovery_s(event_s, left_behind, found_s) < RECOVERED_S


async def test_affinity_one_encode_per_item_while_nothing_happens() -> None:
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client, num_items=40) as load:
            await load.until(400)
        misses = sum(one.outcome == "miss" for one in load.notes)
    assert load.failures() == []
    # A hedge may encode an item a second time, and two callers one after the other find it under way.
    assert misses <= 40 + client.counts.hedges
    used = [one.fake.num_calls["Encode"] for one in fleet.gone + fleet.replicas]
    assert all(used), "every replica is somebody's home"


async def test_a_killed_replica_fails_no_request_and_only_its_keys_move() -> None:
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client) as load:
            await load.until(200)
            before = homes(client, KEYS)
            victim = fleet.replicas[1]
            for _ in range(10):
                event_s = time.monotonic()
                await victim.kill()
                await load.until(200)
                after, found_s = homes(client, KEYS), time.monotonic()
                await victim.start()
                await settled(client, 4)
                back = homes(client, KEYS)
                await load.until(100)
                assert {key for key in KEYS if before[key] != after[key]} == {
                    key for key in KEYS if before[key] == victim.target
                }
                assert back == before
                if client.counts.retries:
                    break  # as a rule at once; no call was there when it was killed otherwise
        says("kill", load, event_s, client)
    assert load.failures() == []
    assert client.counts.retries > 0
    assert load.recovery_s(event_s, {victim.target}, found_s) < RECOVERED_S


async def test_p37_a_rolling_restart_fails_no_request() -> None:
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client) as load:
            await load.until(200)
            event_s = time.monotonic()
            for one in fleet.replicas:
                await one.drain(0.15)
                await one.start()
                await settled(client, 4)
            ended_s = time.monotonic()
            await load.until(100)
        says("rolling restart", load, event_s, client)
    assert load.failures() == []
    assert max(one.latency_s for one in load.since(event_s)) < RECOVERED_S
    assert load.recovery_s(event_s) - (ended_s - event_s) < RECOVERED_S


async def test_a_partition_costs_no_request_its_deadline() -> None:
    """The replica takes connections and says nothing: found by health checks and covered by hedges."""
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client) as load:
            await load.until(300)
            before = homes(client, KEYS)
            event_s = time.monotonic()
            fleet.replicas[2].wire.block()
            await load.until(300)
            await until_state(client, fleet.replicas[2].target, "down")
            found_s = time.monotonic()
            await load.until(100)
            fleet.replicas[2].wire.unblock()
            await settled(client, 4)
            assert homes(client, KEYS) == before
        says("partition", load, event_s, client)
    assert load.failures() == []
    assert load.recovery_s(event_s, {fleet.replicas[2].target}, found_s) < RECOVERED_S


async def test_a_slow_replica_is_hedged_and_then_left() -> None:
    async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=QUICK) as client:
        await client.wait_ready(10, num_replicas=4)
        async with Load(client) as load:
            await load.until(400)
            event_s = time.monotonic()
            fleet.replicas[0].slow(0.4)
            await until_state(client, fleet.replicas[0].target, "ejected")
            found_s = time.monotonic() - event_s
            why = next(one.why for one in client.replicas if one.target == fleet.replicas[0].target)
            await load.until(200)
        says(f"slow, found after {found_s:.2f} s", load, event_s, client)
    assert load.failures() == []
    assert client.counts.hedges_won > 0
    assert client.counts.ejections >= 1
    assert "its median latency is" in why


async def until_state(client: AsyncFleetClient, target: str, state: str, limit_s: float = 15) -> None:
    ends_s = time.monotonic() + limit_s
    while next(one.state for one in client.replicas if one.target == target) != state:
        assert time.monotonic() < ends_s, client.replicas
        await asyncio.sleep(0.01)


async def test_a_sick_fleet_is_asked_no_more_than_the_budget_allows() -> None:
    """Every replica fails everything: what they see is what callers asked, a share more, and the reserve."""
    settings = replace(QUICK, retry_share=0.1, retry_reserve_per_s=0.5)
    async with loopback_fleet(3) as fleet, AsyncFleetClient(fleet.endpoints, settings=settings) as client:
        await client.wait_ready(10, num_replicas=3)
        overloaded(fleet)
        async with Load(client, num_callers=4, pause_s=0.002) as load:
            await load.until(300)
        counts = client.counts
    assert all(note.failed for note in load.notes)
    assert load.wrong == []
    assert counts.attempts - counts.items <= 0.1 * counts.items + 5 + 1
    assert counts.refused > 0
    assert "the retry budget is spent" in " ".join(note.outcome for note in load.notes)


def overloaded(fleet: LoopbackFleet) -> None:
    full = ItemFailed("64 patches are queued, 64 are taken", reason="QUEUE_FULL", status=8, retryable=True)
    for one in fleet.replicas:
        one.script.call_failures["Encode"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, full)
