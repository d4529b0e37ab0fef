"""Scheduling policies compared by simulation: the planner against first come, fixed counts, one at a time.

    python bench/scheduling.py                                 # all scenarios; writes a JSON file
    python bench/scheduling.py --seed 7 --traffic my/folder    # other arrivals, other sizes
    python bench/scheduling.py --planner-time                  # only how long the planner takes for a batch

Owns the simulated device, virtual time and what is reported. The streams are scheduling_traffic.py's, the
other policies scheduling_policies.py's, the pictures scheduling_chart.py's. Needs neither GPU nor torch.

The device takes what the cost model of a recorded tower bench says, in the default ladder of buckets, times
an error of its own for each bucket, which no policy knows. Up to two batches are with it, as in the engine:
the next one is made when the one before starts. An item's latency is from its arrival to the end of its
batch; ingest and delivery are left out. The same seed gives the same figures, but for ``planner_us``.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import math
import random
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scheduling_policies import MAX_ITEMS, MAX_PATCHES, Policy, policies
from scheduling_time import planner_times
from scheduling_traffic import SCENARIOS, TRAFFIC, Arrival, Scenario, Sizes, arrivals_of, item_of

from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder
from encoder_service.scheduler.cost import CostModel
from encoder_service.scheduler.outlook import Outlook
from encoder_service.scheduler.planner import Ticket, launch_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TOWER = RESULTS / "tower-nvidia-h200-2026-11-20-9.json"
PADDING = RESULTS / "padding-2026-11-20-2.json"
MAX_IN_FLIGHT = 2
SEED = 5


class Device:
    """Times of launches. model_error: the spread of each bucket's own factor about the cost model."""

    def __init__(self, ladder: BucketLadder, model_error: float, seed: int) -> None:
        self.ladder = ladder
        self._model_error = model_error
        self._seed = seed
        self._factors: dict[Bucket | None, float] = {}

    def times_us(self, tickets: Sequence[Ticket]) -> tuple[float, float]:
        """Of a batch as it runs, and of a graph of exactly its shapes."""
        launch = launch_of(tickets)
        bucket = self.ladder.choose_for(launch)
        if bucket not in self._factors:
            spread = random.Random(f"{self._seed} {bucket}").gauss(0.0, self._model_error)
            self._factors[bucket] = math.exp(spread)
        us = self.ladder.predicted_us(launch) * self._factors[bucket]
        return us, min(us, self.ladder.cost.exact_us(launch) * self._factors[bucket])


@dataclass
class Outcome:
    """One policy on one scenario, by stream where it is a dictionary. Times in microseconds."""

    busy_us: float = 0.0
    exact_us: float = 0.0
    end_us: float = 0.0
    batches: int = 0
    patches: int = 0
    most_passes: int = 0
    items: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dropped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    contended_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    latencies_us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    starvation: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Simulation:
    """One policy on one scenario's arrivals."""

    def __init__(self, scenario: Scenario, policy: Policy, device: Device, sizes: Sizes, seed: int) -> None:
        self._scenario = scenario
        self._policy = policy
        self._device = device
        self._sizes = sizes
        self._cost = device.ladder.cost
        self._end_us = scenario.seconds * 1e6
        self._arrivals = deque(
            heapq.merge(
                *(arrivals_of(one, scenario.seconds, sizes, self._cost, seed) for one in scenario.streams),
                key=lambda arrival: arrival.at_us,
            )
        )
        self._floods = [
            (one, random.Random(f"{seed} {one.name} keeps")) for one in scenario.streams if one.backlog
        ]
        self._waiting: dict[Ticket, Arrival] = {}
        self._waiting_patches: dict[str, int] = defaultdict(int)
        self._in_flight: deque[tuple[float, list[Ticket]]] = deque()
        self._outlook = Outlook()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """To the last item's end."""
        now_us = 0.0
        while True:
            self._admit(now_us)
            if len(self._policy) and len(self._in_flight) < MAX_IN_FLIGHT:
                self._start(now_us)
                continue
            coming = [self._in_flight[0][0]] if self._in_flight else []
            if self._arrivals:
                coming.append(self._arrivals[0].at_us)
            if not coming:
                return self.outcome
            now_us = max(now_us, min(coming))
            while self._in_flight and self._in_flight[0][0] <= now_us:
                self._finish()

    def _admit(self, now_us: float) -> None:
        while self._arrivals and self._arrivals[0].at_us <= now_us:
            self._add(self._arrivals.popleft())
        for stream, generator in self._floods:
            while now_us < self._end_us and self._waiting_patches[stream.name] < stream.backlog:
                self._add(item_of(stream, now_us, self._sizes, generator))

    def _add(self, arrival: Arrival) -> None:
        ticket = Ticket(
            arrival.shape.num_patches,
            arrival.priority,
            None if arrival.deadline_us is None else (arrival.at_us + arrival.deadline_us) / 1e6,
            num_sequences=arrival.shape.num_sequences,
            namespace=arrival.namespace,
        )
        self._waiting[ticket] = arrival
        self._waiting_patches[arrival.stream] += ticket.num_patches
        self.outcome.items[arrival.stream] += 1
        self._policy.add(ticket)

    def _start(self, now_us: float) -> None:
        """Hands the next batch over."""
        contended = all(self._waiting_patches[one.name] for one in self._scenario.streams)
        plan = self._policy.next_batch(now_us / 1e6, self._outlook.busy_s(now_us / 1e6))
        for ticket in [*plan.expired, *(late.ticket for late in plan.late)]:
            self.outcome.dropped[self._leave(ticket).stream] += 1
            del self._waiting[ticket]
        if not plan.batch:
            return
        us, exact_us = self._device.times_us(plan.batch)
        begins_us = max(now_us, self._in_flight[-1][0] if self._in_flight else 0.0)
        self._in_flight.append((begins_us + us, plan.batch))
        self._outlook.launched(now_us / 1e6, self._device.ladder.predicted_us(launch_of(plan.batch)))
        outcome = self.outcome
        outcome.busy_us += us
        outcome.exact_us += exact_us
        outcome.batches += 1
        added = [self._cost.added_us(launch_of((ticket,))) for ticket in plan.batch]
        for ticket, added_us in zip(plan.batch, added, strict=True):
            arrival = self._leave(ticket)
            if contended:
                outcome.contended_us[arrival.stream] += us * added_us / sum(added)
            alone_us = self._device.ladder.predicted_us(launch_of((ticket,)))
            waited = (begins_us - arrival.at_us) / alone_us
            outcome.starvation[arrival.stream] = max(outcome.starvation[arrival.stream], waited)
            outcome.most_passes = max(outcome.most_passes, ticket.passes)
            outcome.patches += ticket.num_patches

    def _leave(self, ticket: Ticket) -> Arrival:
        """A ticket goes to the device or is dropped."""
        arrival = self._waiting[ticket]
        self._waiting_patches[arrival.stream] -= ticket.num_patches
        return arrival

    def _finish(self) -> None:
        end_us, batch = self._in_flight.popleft()
        self._outlook.finished(end_us / 1e6)
        self.outcome.end_us = end_us
        for ticket in batch:
            arrival = self._waiting.pop(ticket)
            latency_us = end_us - arrival.at_us
            self.outcome.latencies_us[arrival.stream].append(latency_us)
            if arrival.deadline_us is not None and latency_us > arrival.deadline_us:
                self.outcome.missed[arrival.stream] += 1


def latency_figures(latencies_us: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies_us)
    return {
        "p50_ms": ordered[len(ordered) // 2] / 1e3,
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] / 1e3,
        "max_ms": ordered[-1] / 1e3,
    }


def stream_record(outcome: Outcome, name: str, alone: Outcome | None) -> dict[str, Any]:
    """One stream's figures. slowdown: its mean latency over that without the other streams."""
    latencies_us = outcome.latencies_us[name]
    contended_us = sum(outcome.contended_us.values())
    record: dict[str, Any] = {
        "items": outcome.items[name],
        "dropped": outcome.dropped[name],
        "in_time_share": (len(latencies_us) - outcome.missed[name]) / outcome.items[name],
        "most_wait_over_own_cost": outcome.starvation[name],
        **latency_figures(latencies_us),
    }
    if alone is not None:
        alone_us = alone.latencies_us[name]
        record["slowdown"] = (sum(latencies_us) / len(latencies_us)) / (sum(alone_us) / len(alone_us))
        record["contended_share"] = outcome.contended_us[name] / contended_us if contended_us else None
    return record


def record_of(
    scenario: Scenario, policy: str, outcome: Outcome, alone: Mapping[str, Outcome]
) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "policy": policy,
        "items_per_s": sum(map(len, outcome.latencies_us.values())) / outcome.end_us * 1e6,
        "patches_per_s": outcome.patches / outcome.end_us * 1e6,
        "busy_share": outcome.busy_us / outcome.end_us,
        "waste_share": 1 - outcome.exact_us / outcome.busy_us,
        "items_per_batch": sum(map(len, outcome.latencies_us.values())) / outcome.batches,
        "most_passes": outcome.most_passes,
        **latency_figures([us for one in outcome.latencies_us.values() for us in one]),
        "streams": {
            one.name: stream_record(outcome, one.name, alone.get(one.name)) for one in scenario.streams
        },
    }


def compare(
    scenarios: Sequence[Scenario], cost: CostModel, model_error: float, sizes: Sizes, seed: int
) -> list[dict[str, Any]]:
    """Every scenario under every policy."""
    ladder = default_ladder(MAX_PATCHES, cost=cost)
    records = []
    for scenario in scenarios:
        for name, make in policies(ladder, scenario.weights).items():

            def run(one: Scenario, make: Any = make) -> Outcome:
                return Simulation(one, make(), Device(ladder, model_error, seed), sizes, seed).run()

            alone = {}
            if len(scenario.streams) > 1:
                alone = {
                    one.name: run(replace(scenario, streams=(one,))) for one in scenario.streams if one.load
                }
            records.append(record_of(scenario, name, run(scenario), alone))
    return records


def recorded_cost(path: Path) -> CostModel:
    """The cost model that a tower bench fitted to its device."""
    fields = json.loads(path.read_text())["padding"]["cost"]
    return CostModel(**{**fields, "curve": tuple((int(size), us) for size, us in fields["curve"])})


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cost, model_error = recorded_cost(TOWER), json.loads(PADDING.read_text())["settings"]["model_error"]
    scenarios = [one for one in SCENARIOS if not arguments.only or one.name in arguments.only]
    records = compare(scenarios, cost, model_error, Sizes(arguments.traffic), arguments.seed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or None,
        "settings": {
            "seed": arguments.seed,
            "tower": TOWER.name,
            "padding": PADDING.name,
            "model_error": model_error,
            "max_patches": MAX_PATCHES,
            "max_items": MAX_ITEMS,
            "max_in_flight": MAX_IN_FLIGHT,
        },
        "cost": asdict(cost),
        "scenarios": [asdict(one) for one in scenarios],
        "records": records,
        "planner_us": planner_times(),
    }


def write_new(folder: Path, date: str, result: Mapping[str, Any]) -> Path:
    """Writes ``scheduling-<date>.json``; a second result of a day gets a number, none is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"scheduling-{date}.json" if number == 1 else f"scheduling-{date}-{number}.json")
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            json.dump(finite(result), file, indent=1)
            file.write("\n")
            return path
    raise AssertionError


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--traffic", type=Path, default=TRAFFIC, help="folder of CSV files of the same names")
    parser.add_argument("--only", nargs="*", default=[], help="names of scenarios")
    parser.add_argument("--planner-time", action="store_true", help="only how long a batch takes to make")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.planner_time:
        print(json.dumps(planner_times(), indent=1))
        return
    result = run(arguments)
    for record in result["records"]:
        name = f"{record['scenario']:24} {record['policy']:26} {record['items_per_s']:7.1f}/s"
        print(f"{name}  waste {record['waste_share']:5.1%}  p99 {record['p99_ms']:8.1f} ms")
    path = write_new(arguments.out, result["date"][:10], result)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
