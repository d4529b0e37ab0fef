"""What a fleet's clients see while replicas come, go, stall and slow down; and what the client itself costs.

    python bench/fleet.py            # about four minutes
    python bench/fleet.py --quick    # each event once

Owns the events, their repeats, the table and the result file; the chart is fleet_chart's. Replicas are fakes
of the adapter behind wires on loopback addresses (tests/fleet/rig.py), all in this process: what is measured
is how calls are routed and recovered, not how fast rows are made. The time that an encode takes is the fakes'
own setting."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fleet_chart import draw
from measurement import RESULTS, describe_environment

from lm_adapter import AsyncVisionEncoderClient, ImageItem
from lm_adapter.fleet import AsyncFleetClient, FleetClient, FleetSettings
from lm_adapter.testing import FakeEncoder
from tests.fleet.rig import (
    CallNote,
    Load,
    LoopbackFleet,
    homes,
    loopback_fleet,
    moved_share,
    percentile,
    settled,
)

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = FleetSettings(refresh_s=1.0)
"""The defaults, but for names that are looked up each second."""
ENCODE_S = 0.01
BEFORE_S, AFTER_S = 1.5, 3.5
QUICK_BEFORE_S, QUICK_AFTER_S = 0.5, 0.6
SERIES_S = 0.1
NUM_KEYS = 4000


@dataclass
class Event:
    """act: what happens to the fleet; undo: until it is as before. touched: the replicas that it happens to,
    by number; None for all. ideal: share of keys that have to move."""

    name: str
    act: Callable[[LoopbackFleet, AsyncFleetClient], Awaitable[None]]
    undo: Callable[[LoopbackFleet, AsyncFleetClient], Awaitable[None]] | None
    repeats: int
    replicas: int = 4
    touched: tuple[int, ...] | None = None
    ideal: float = 0.0


@dataclass
class Outcome:
    """Of all repeats of one event; p99s in milliseconds."""

    event: str
    repeats: int
    items: int = 0
    failed: int = 0
    ideal_moved: float = 0.0
    moved: list[float] = field(default_factory=list)
    recovery_ms: list[float] = field(default_factory=list)
    p99_before_ms: list[float] = field(default_factory=list)
    p99_after_ms: list[float] = field(default_factory=list)
    hit_rate_before: list[float] = field(default_factory=list)
    hit_rate_after: list[float] = field(default_factory=list)
    extra_attempts: float = 0.0
    series: list[list[float]] = field(default_factory=list)
    """Of the first repeat: second, median and largest latency in milliseconds, per tenth of a second."""


async def kill(fleet: LoopbackFleet, _: AsyncFleetClient) -> None:
    await fleet.replicas[1].kill()


async def start_again(fleet: LoopbackFleet, client: AsyncFleetClient) -> None:
    await fleet.replicas[1].start()
    await settled(client, 4, 30)


async def rolling(fleet: LoopbackFleet, client: AsyncFleetClient) -> None:
    for one in fleet.replicas:
        await one.drain(0.3)
        await one.start()
        await settled(client, 4, 30)


async def partition(fleet: LoopbackFleet, _: AsyncFleetClient) -> None:
    fleet.replicas[2].wire.block()


async def rejoin(fleet: LoopbackFleet, client: AsyncFleetClient) -> None:
    fleet.replicas[2].wire.unblock()
    await settled(client, 4, 60)


async def slow_down(fleet: LoopbackFleet, _: AsyncFleetClient) -> None:
    fleet.replicas[0].slow(0.4)


async def speed_up(fleet: LoopbackFleet, client: AsyncFleetClient) -> None:
    fleet.replicas[0].slow(fleet.latency_s)
    await settled(client, 4, 60)


def scaling(num_replicas: int) -> Callable[[LoopbackFleet, AsyncFleetClient], Awaitable[None]]:
    async def scale(fleet: LoopbackFleet, client: AsyncFleetClient) -> None:
        await fleet.scale(num_replicas)
        await settled(client, num_replicas, 30)

    return scale


def events(quick: bool) -> list[Event]:
    few, more, many = (1, 1, 1) if quick else (3, 6, 10)
    return [
        Event("scale 4 to 8", scaling(8), scaling(4), few, ideal=4 / 8),
        Event("scale 8 to 3", scaling(3), scaling(8), few, replicas=8, touched=(3, 4, 5, 6, 7), ideal=5 / 8),
        Event("kill", kill, start_again, many, touched=(1,), ideal=1 / 4),
        Event("rolling restart", rolling, None, few),
        Event("partition", partition, rejoin, more, touched=(2,), ideal=1 / 4),
        Event("slow replica", slow_down, speed_up, few, touched=(0,), ideal=1 / 4),
    ]


async def measure(event: Event, num_callers: int, before_s: float, after_s: float) -> Outcome:
    found = Outcome(event.name, event.repeats, ideal_moved=event.ideal)
    keys = [secrets.token_bytes(32) for _ in range(NUM_KEYS)]
    async with (
        loopback_fleet(event.replicas, ENCODE_S) as fleet,
        AsyncFleetClient(fleet.endpoints, settings=SETTINGS) as client,
    ):
        await client.wait_ready(30, num_replicas=event.replicas)
        load = Load(client, num_callers=num_callers)
        await client.encode([ImageItem(b"content", digest=digest) for digest in load.digests])
        async with load:
            for number in range(event.repeats):
                await asyncio.sleep(before_s)
                touched = event.touched and {fleet.replicas[number].target for number in event.touched}
                before, event_s = homes(client, keys), time.monotonic()
                await event.act(fleet, client)
                act_ended_s = time.monotonic()
                await asyncio.sleep(after_s)
                until_s = act_ended_s if touched is None else math.inf
                recovery_s = load.recovery_s(event_s, touched, until_s, before_s)
                if event.name == "rolling restart":  # from its end, not from its beginning
                    recovery_s = max(0.0, recovery_s - (act_ended_s - event_s))
                found.recovery_ms.append(1e3 * recovery_s)
                note(found, load, event_s, before_s, first=number == 0)
                found.moved.append(moved_share(before, homes(client, keys)))
                if event.undo is not None:
                    await event.undo(fleet, client)
        counts = client.counts
    found.items, found.failed = len(load.notes), len(load.failures())
    found.extra_attempts = (counts.attempts - counts.items) / counts.items
    return found


def note(found: Outcome, load: Load, event_s: float, before_s: float, *, first: bool) -> None:
    """Adds one repeat's latencies and hits."""
    earlier = [one for one in load.notes if event_s - before_s < one.ended_s <= event_s]
    later = load.since(event_s)
    found.p99_before_ms.append(1e3 * percentile([one.latency_s for one in earlier], 0.99))
    found.p99_after_ms.append(1e3 * percentile([one.latency_s for one in later], 0.99))
    found.hit_rate_before.append(load.hit_rate(earlier))
    found.hit_rate_after.append(load.hit_rate(later))
    if first:
        found.series = series([*earlier, *later], event_s)


def series(notes: list[CallNote], event_s: float) -> list[list[float]]:
    places: dict[int, list[float]] = {}
    for one in notes:
        places.setdefault(int((one.ended_s - event_s) // SERIES_S), []).append(1e3 * one.latency_s)
    return [
        [round(place * SERIES_S, 3), round(statistics.median(values), 2), round(max(values), 2)]
        for place, values in sorted(places.items())
    ]


async def overhead(repeats: int) -> dict[str, float]:
    """Median milliseconds of one item that is held, one after the other: through the client of one server and
    through a fleet's, of the same four."""
    item = ImageItem(b"content", digest=secrets.token_bytes(32))
    fakes = [FakeEncoder(f"127.0.0.{number}:0") for number in range(2, 6)]
    for one in fakes:
        await asyncio.to_thread(one.start)
    targets = [one.target for one in fakes]

    samples: dict[str, list[float]] = {}
    blocking = await asyncio.to_thread(FleetClient, targets)
    try:
        async with AsyncVisionEncoderClient(targets[0]) as plain, AsyncFleetClient(targets) as fleet:
            await plain.wait_ready(10)
            await fleet.wait_ready(10, num_replicas=4)
            await asyncio.to_thread(blocking.wait_ready, 10, num_replicas=4)
            ways: dict[str, Callable[[], Awaitable[object]]] = {
                "one_server_ms": lambda: plain.encode_one(item),
                "fleet_ms": lambda: fleet.encode_one(item),
                "fleet_blocking_ms": lambda: asyncio.to_thread(blocking.encode_one, item),
            }
            for number in range(repeats + repeats // 10):
                for name, call in ways.items():  # in turn: a busy moment meets all of them
                    begun_s = time.perf_counter()
                    await call()
                    if number >= repeats // 10:
                        samples.setdefault(name, []).append(1e3 * (time.perf_counter() - begun_s))
    finally:
        await asyncio.to_thread(blocking.close)
        for one in fakes:
            await asyncio.to_thread(one.stop)
    return {name: statistics.median(values) for name, values in samples.items()}


async def sick_fleet(num_calls: int) -> list[dict[str, float]]:
    """Every replica is full: calls that it sees per item asked for, with the budget and with none to speak
    of."""
    found = []
    for name, settings in (
        ("budget", SETTINGS),
        ("no budget", replace(SETTINGS, retry_share=10.0, retry_reserve_per_s=1e6)),
    ):
        async with loopback_fleet(4) as fleet, AsyncFleetClient(fleet.endpoints, settings=settings) as client:
            await client.wait_ready(30, num_replicas=4)
            for one in fleet.replicas:
                one.script.call_failures["Encode"] = full()
            async with Load(client, num_callers=16) as load:
                await load.until(num_calls, 120)
            counts = client.counts
        found.append(
            {"case": name, "items": counts.items, "attempts_per_item": counts.attempts / counts.items}
        )
    return found


def full() -> Any:
    import grpc

    from lm_adapter import ItemFailed

    failure = ItemFailed("64 patches are queued", reason="QUEUE_FULL", status=8, retryable=True)
    return grpc.StatusCode.RESOURCE_EXHAUSTED, failure


def grpc_ring() -> dict[str, Any]:
    """gRPC's own policy in the same events; a process of its own, for its environment."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fleet.grpc_ring"],
        cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}, capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table(title="milliseconds; recovery: until the last call that the event made late has ended")
    for column in (
        "event", "times", "items", "failed", "p99 before", "p99 after", "recovery median", "recovery p99",
        "keys moved", "ideal", "hits before", "hits after", "extra attempts",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "event" else "right")
    for one in outcomes:
        table.add_row(
            one.event, str(one.repeats), str(one.items), str(one.failed),
            f"{statistics.median(one.p99_before_ms):.0f}", f"{statistics.median(one.p99_after_ms):.0f}",
            f"{statistics.median(one.recovery_ms):.0f}", f"{percentile(one.recovery_ms, 0.99):.0f}",
            f"{100 * statistics.median(one.moved):.1f} %", f"{100 * one.ideal_moved:.1f} %",
            f"{100 * statistics.fmean(one.hit_rate_before):.1f} %",
            f"{100 * statistics.fmean(one.hit_rate_after):.1f} %", f"{100 * one.extra_attempts:.1f} %",
        )  # fmt: skip
    return table


async def run(quick: bool, num_callers: int) -> dict[str, Any]:
    times = (QUICK_BEFORE_S, QUICK_AFTER_S) if quick else (BEFORE_S, AFTER_S)
    outcomes = [await measure(event, num_callers, *times) for event in events(quick)]
    return {
        "records": [asdict(one) for one in outcomes],
        "overhead": await overhead(50 if quick else 400),
        "sick_fleet": await sick_fleet(200 if quick else 4000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each event once")
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--commit", default=None, help="what the result says was measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result and its chart")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.quick, arguments.callers))
    result = {
        **describe_environment(torch.device("cpu"), arguments.commit, ("grpcio",)),
        "settings": {
            "quick": arguments.quick,
            "callers": arguments.callers,
            "encode_s": ENCODE_S,
            "before_s": QUICK_BEFORE_S if arguments.quick else BEFORE_S,
            "after_s": QUICK_AFTER_S if arguments.quick else AFTER_S,
            "load_average": os.getloadavg(),
            "num_keys": NUM_KEYS,
            "fleet": asdict(SETTINGS),
        },
        **found,
        "grpc_ring": grpc_ring(),
    }
    console = Console(width=170)
    console.print(table_of([Outcome(**one) for one in result["records"]]))
    console.print(result["overhead"], result["sick_fleet"], result["grpc_ring"])
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"fleet-{datetime.datetime.now(datetime.UTC).date()}.json"
    if path.exists():
        path = path.with_stem(f"{path.stem}-{secrets.token_hex(2)}")
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and its chart")


if __name__ == "__main__":
    main()
