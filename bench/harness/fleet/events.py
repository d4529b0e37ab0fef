"""What happens to a fleet under load, event by event, and what is measured of it.

Owns the events: each takes a fleet in its usual state (all replicas healthy), does something to it while the
callers send, and leaves it in that state. The tests run them with few calls, bench/fleet.py with many.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.harness.fleet.callers import Measured
from bench.harness.fleet.encoders import CutOffNetwork
from bench.harness.fleet.fleet import NUM_IMAGES, Fleet
from bench.harness.fleet.images import CRASH, HOLD, MIB, image_file
from bench.harness.waiting import wait_until
from lm_adapter import EncoderError

SETTLE_S = 4.0
"""Load goes on for so long after each thing that is done, so that its end shows."""
STOPPED_S = 6.0
HELD_S, QUIET_S = 20, 60.0
MAX_HELD_S = 2.0
"""A replica that stands still holds no call longer (keepalive interval and timeout of the gateway)."""
CRASH_ASKS = 4
BODY_SIZES = (MIB // 2, 16 * MIB, 64 * MIB)
BODY_IMAGES = 8
BODY_HELD_S = 20
"""The encoder is killed meanwhile, on a busy machine seconds later."""


@dataclass
class Event:
    """What one event measured. facts: its own figures."""

    name: str
    measured: Measured
    facts: dict[str, Any] = field(default_factory=dict)


def with_longest(name: str, measured: Measured, **facts: Any) -> Event:
    """With the longest call from the first mark on."""
    return Event(name, measured, {**facts, "longest_s": round(measured.longest_s(), 3)})


def marked_number() -> int:
    """Of an image that is sent once."""
    return NUM_IMAGES + time.monotonic_ns()


def share(calls: int, part: float) -> int:
    return max(1, int(calls * part))


# -- the fleet's size ------------------------------------------------------------------------------------


def steady(fleet: Fleet, calls: int) -> Event:
    """Nothing happens."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(calls)
        return Event("steady", run.stop())


def scale(fleet: Fleet, calls: int) -> Event:
    """4 to 8 to 3 replicas, and back."""
    fleet.warm_up()
    before = fleet.owners()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.3))
        run.mark("8 replicas")
        fleet.scale(8)
        run.wait_more(share(calls, 0.3), SETTLE_S)
        at_eight = fleet.owners()
        run.mark("3 replicas")
        fleet.scale(3)
        run.wait_more(share(calls, 0.4), SETTLE_S)
        at_three = fleet.owners()
        measured = run.stop()
    fleet.scale(4)
    moved = {"4 to 8": moved_over_ideal(before, at_eight), "8 to 3": moved_over_ideal(at_eight, at_three)}
    return with_longest("scale", measured, moved_over_ideal=moved)


def moved_over_ideal(before: Mapping[str, str], after: Mapping[str, str]) -> float:
    """Keys that changed their replica, over the least that have to when all replicas get equal shares."""
    moved = sum(before[key] != after[key] for key in before) / len(before)
    old, new = len(set(before.values())), len(set(after.values()))
    return moved / (1.0 - min(old, new) / max(old, new))


# -- replicas that end -----------------------------------------------------------------------------------


def kill(fleet: Fleet, calls: int) -> Event:
    """kill -9; a new process at the same address."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.4))
        victim = fleet.replicas[0]
        run.mark("kill -9")
        fleet.kill(victim)
        run.wait_more(share(calls, 0.3), SETTLE_S)
        run.mark("started again")
        fleet.start_again(victim)
        fleet.wait_members()
        run.wait_more(share(calls, 0.3))
        return with_longest("kill", run.stop())


def drain(fleet: Fleet, calls: int) -> Event:
    """SIGTERM to one replica, as at the end of its pod; another one takes its place."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.4))
        run.mark("SIGTERM")
        ended_s = fleet.drain(fleet.replicas[0])
        run.wait_more(share(calls, 0.3), SETTLE_S)
        run.mark("replaced")
        fleet.add(1)
        fleet.wait_members()
        run.wait_more(share(calls, 0.3))
        return with_longest("drain", run.stop(), ended_s=round(ended_s, 2))


def rolling_restart(fleet: Fleet, calls: int) -> Event:
    """Each replica in turn: the new one is ready before the old one drains, as with a Deployment's surge."""
    fleet.warm_up()
    portion = share(calls, 0.8) // len(fleet.replicas)
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.2))
        for number, old in enumerate(list(fleet.replicas)):
            run.mark(f"replica {number + 1}")
            fleet.add(1)
            fleet.wait_members()
            fleet.drain(old)
            run.wait_more(portion, 1.0)
        fleet.wait_members()
        return with_longest("rolling_restart", run.stop())


def crash(fleet: Fleet, calls: int) -> Event:
    """An item that crashes its encoder is sent once; crashed encoders are started again."""
    fleet.scale(6)
    fleet.warm_up()
    asked_before = num_asked(fleet)
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.4))
        run.mark("crashing item")
        failure = failure_of(fleet, image_file(marked_number(), mark=CRASH))
        run.wait_more(share(calls, 0.3), SETTLE_S)
        ended = [encoder for encoder in fleet.replicas if encoder.has_ended]
        run.mark("started again")
        for encoder in ended:
            fleet.start_again(encoder)
        fleet.wait_members()
        run.wait_more(share(calls, 0.3))
        measured = run.stop()
    fleet.scale(4)
    facts = {"asked": num_asked(fleet) - asked_before, "crashed": len(ended), "failure": failure}
    return Event("crash", measured, facts)


def num_asked(fleet: Fleet) -> int:
    return sum(len(path.read_text().splitlines()) for path in fleet.folder.glob("*.crashes"))


def failure_of(fleet: Fleet, file: bytes) -> str:
    """The name of the error; empty for rows."""
    try:
        fleet.encode([file])
    except EncoderError as error:
        return type(error).__name__
    return ""


# -- replicas that do not answer -------------------------------------------------------------------------


def stand_still(fleet: Fleet, calls: int) -> Event:
    """SIGSTOP of one replica for some seconds."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.3))
        victim = fleet.replicas[0]
        run.mark("SIGSTOP")
        victim.send(signal.SIGSTOP)
        try:
            run.wait_more(share(calls, 0.4), STOPPED_S)
        finally:
            victim.send(signal.SIGCONT)
        run.mark("SIGCONT")
        fleet.wait_members()
        run.wait_more(share(calls, 0.3), SETTLE_S)
        return with_longest("stand_still", run.stop())


def partition(fleet: Fleet, calls: int) -> Event:
    """The network of one replica loses all packets for some seconds."""
    with CutOffNetwork() as network, fleet.processes_in(network) as processes:
        encoder = fleet.add_cut_off(network, processes)
        fleet.wait_members()
        fleet.warm_up()
        with fleet.run() as run:
            run.wait_calls(share(calls, 0.3))
            run.mark("cut")
            network.cut()
            run.wait_more(share(calls, 0.4), STOPPED_S)
            run.mark("mended")
            network.mend()
            fleet.wait_members()
            run.wait_more(share(calls, 0.3), SETTLE_S)
            measured = run.stop()
        fleet.drain(encoder)
        fleet.wait_members()
    return with_longest("partition", measured)


def slow_replica(fleet: Fleet, calls: int) -> Event:
    """Every item of one replica takes 0.4 s more for a while."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.4))
        victim = fleet.replicas[0]
        run.mark("slow")
        victim.send(signal.SIGUSR1)
        try:
            run.wait_more(share(calls, 0.3), SETTLE_S)
        finally:
            victim.send(signal.SIGUSR1)
        run.mark("as before")
        run.wait_more(share(calls, 0.3))
        measured = run.stop()
    slow, normal = measured.marks
    during = measured.between(slow.at_s, normal.at_s)
    return Event("slow_replica", measured, {"slow_share": round(float((during > 0.4).mean()), 3)})


# -- gateways --------------------------------------------------------------------------------------------


def gateway_restart(fleet: Fleet, calls: int) -> Event:
    """One gateway is killed and started again, then the other is ended and started again."""
    fleet.warm_up()
    with fleet.run() as run:
        run.wait_calls(share(calls, 0.2))
        for gateway, number in zip(fleet.gateways, (signal.SIGKILL, signal.SIGTERM), strict=True):
            run.mark(f"gateway {number.name}")
            gateway.end(number)
            run.wait_more(share(calls, 0.2), 2.0)
            run.mark("gateway again")
            gateway.start()
            fleet.wait_members()
            run.wait_more(share(calls, 0.2), 2.0)
        return with_longest("gateway_restart", run.stop())


# -- items -----------------------------------------------------------------------------------------------


def bodies(fleet: Fleet, calls: int, num_bytes: int) -> Event:
    """Large files, while a replica that has one of them is killed and started again."""
    logs = fleet.access_logs()
    entries: list[dict[str, Any]] = []

    def has_entries(number: int) -> bool:
        entries.extend(one for log in logs for one in log.read() if one["path"].endswith("/Encode"))
        return len(entries) >= number

    with fleet.run(num_images=BODY_IMAGES, num_bytes=num_bytes, concurrency=2) as run:
        run.wait_calls(share(calls, 0.4))
        victim = fleet.wait_busy()
        run.mark("kill -9")
        fleet.kill(victim)
        run.wait_more(share(calls, 0.3))
        run.mark("started again")
        fleet.start_again(victim)
        fleet.wait_members()
        run.wait_more(share(calls, 0.3))
        measured = run.stop()
    wait_until(lambda: has_entries(measured.num_calls), "the access log's entries")
    facts = {
        "retried_by_gateway": sum(one["attempts"] == 2 and one["grpc_status"] == 0 for one in entries),
        "repeated_by_adapter": sum(one["grpc_status"] != 0 for one in entries),
    }
    return Event(f"bodies_{num_bytes / MIB:g}_mib", measured, facts)


def killed_with_body(fleet: Fleet, num_bytes: int) -> dict[str, int]:
    """Kills the encoder that has an item's whole body and has not answered yet, and starts it again. Returns
    what the gateways counted meanwhile."""
    before, held_before = fleet.counters(), fleet.num_held()
    file = image_file(marked_number(), num_bytes, HOLD + b"%02d" % BODY_HELD_S)
    with ThreadPoolExecutor(1) as thread:
        rows = thread.submit(fleet.encode, [file])
        wait_until(lambda: fleet.num_held() > held_before, "the whole body")
        fleet.kill(victim := fleet.wait_busy())
        rows.result()
    after = fleet.counters()
    fleet.start_again(victim)
    fleet.wait_members()
    return {
        name: after[name] - before[name]
        for name in ("upstream_rq_retry_success", "retry_or_shadow_abandoned")
    }


def long_item(fleet: Fleet, held_s: int = HELD_S, quiet_s: float = QUIET_S) -> dict[str, Any]:
    """One item that takes long, then no call at all: connections to the replicas stay. Returns facts."""
    fleet.warm_up()
    before = fleet.counters()
    number = marked_number()
    started_s = time.monotonic()
    fleet.encode([image_file(number, mark=HOLD + b"%02d" % held_s)])
    took_s = time.monotonic() - started_s
    quiet_until_s = time.monotonic() + quiet_s
    wait_until(lambda: time.monotonic() > quiet_until_s, "the quiet time", quiet_s + 5)
    fleet.warm_up()
    after = fleet.counters()
    return {
        "took_s": round(took_s, 2),
        "closed": after["upstream_cx_destroy"] - before["upstream_cx_destroy"],
        "ping_timeouts": after["http2.keepalive_timeout"] - before["http2.keepalive_timeout"],
    }


EVENTS: Mapping[str, Callable[[Fleet, int], Event]] = {
    "steady": steady,
    "scale": scale,
    "kill": kill,
    "drain": drain,
    "rolling_restart": rolling_restart,
    "stand_still": stand_still,
    "slow_replica": slow_replica,
    "partition": partition,
    "gateway_restart": gateway_restart,
    "crash": crash,
}
