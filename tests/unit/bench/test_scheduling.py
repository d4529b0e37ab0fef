"""The scheduling simulation: its traffic, its device, and that the same seed gives the same figures."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scheduling import PADDING, TOWER, Device, Simulation, compare, finite, recorded_cost, write_new
from scheduling_policies import BUDGET, COUNT, PLANNER, SINGLE, FirstCome, policies
from scheduling_time import planner_times
from scheduling_traffic import SCENARIOS, TRAFFIC, Scenario, Shape, Sizes, Stream, drawn_sizes, read_sizes

from encoder_service.scheduler.buckets import default_ladder
from encoder_service.scheduler.planner import Ticket
from encoder_service.tune import read_traffic

COST = recorded_cost(TOWER)
ROOT = Path(__file__).resolve().parents[3]
SEED = random.randrange(2**31)


def short(name: str, seconds: float = 4.0) -> Scenario:
    """A scenario of the bench, cut short."""
    (scenario,) = (one for one in SCENARIOS if one.name == name)
    return replace(scenario, seconds=seconds)


def test_the_files_are_what_their_seed_draws() -> None:
    for name, rows in drawn_sizes():
        with (TRAFFIC / f"{name}.csv").open(newline="") as file:
            _, *found = csv.reader(file)
        assert [tuple(map(int, row)) for row in found] == rows
        assert sum(read_traffic(TRAFFIC / f"{name}.csv").counts.values()) == sum(row[2] for row in rows)


def test_a_file_of_pixels_alone_is_rounded_as_the_processor_does(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("width, height, count\n1024,1024,3\n100,100,1\n")
    assert read_sizes(tmp_path / "own.csv") == ([Shape(4096), Shape(256)], [3.0, 1.0])
    (tmp_path / "none.csv").write_text("width,height\n")
    with pytest.raises(ValueError, match="0 sizes"):
        read_sizes(tmp_path / "none.csv")


def test_the_same_seed_gives_the_same_figures_and_another_gives_others() -> None:
    scenarios = [short("flood", 2.0), short("deadlines", 2.0)]
    first, second, other = (compare(scenarios, COST, 0.05, Sizes(), seed) for seed in (SEED, SEED, SEED + 1))
    assert first == second
    assert first != other
    assert json.loads(json.dumps(finite(first))) == first


def test_a_device_gives_each_item_its_rows_once_and_is_never_busy_twice() -> None:
    ladder = default_ladder(16_384, cost=COST)
    for name, make in policies(ladder, {}).items():
        simulation = Simulation(short("clips"), make(), Device(ladder, 0.05, SEED), Sizes(), SEED)
        outcome = simulation.run()
        assert len(outcome.latencies_us["all"]) == outcome.items["all"] > 100, name
        assert 0 < outcome.exact_us <= outcome.busy_us <= outcome.end_us
        assert not simulation._waiting


def test_a_lone_item_takes_what_the_cost_model_says() -> None:
    ladder = default_ladder(16_384, cost=COST)
    scenario = Scenario("one", (Stream("all", (("huge", 1.0),), load=1e-6),), seconds=1e6)
    outcome = Simulation(scenario, FirstCome(16_384, 64), Device(ladder, 0.0, 1), Sizes(), SEED).run()
    ticket = Ticket(15_040)
    (expected_us,) = {ladder.predicted_us(Shape(15_040).launch)}
    assert Device(ladder, 0.0, 1).times_us([ticket])[0] == expected_us
    assert outcome.latencies_us["all"] == pytest.approx([expected_us] * outcome.items["all"])


def test_the_planner_protects_the_small_tenant_and_meets_more_deadlines() -> None:
    records = {
        (one["scenario"], one["policy"]): one
        for one in compare([short("flood", 8.0), short("deadlines", 8.0)], COST, 0.05, Sizes(), SEED)
    }
    for policy in (BUDGET, COUNT, SINGLE):
        small, other = (records["flood", one]["streams"]["small"] for one in (PLANNER, policy))
        assert small["p50_ms"] < 0.25 * other["p50_ms"]
        on_time, late = (records["deadlines", one]["streams"]["all"] for one in (PLANNER, policy))
        assert on_time["in_time_share"] > late["in_time_share"] + 0.1


def test_first_come_ends_a_batch_at_what_does_not_fit_and_drops_what_expired() -> None:
    policy = FirstCome(10, 3)
    tickets = [Ticket(6), Ticket(3, deadline_s=1.0), Ticket(3), Ticket(4), Ticket(1)]
    for ticket in tickets:
        policy.add(ticket)
    plan = policy.next_batch(1.0)
    assert (plan.batch, plan.expired) == ([tickets[0], tickets[2]], [tickets[1]])
    assert policy.next_batch(1.0).batch == tickets[3:]


def test_planner_times_are_told_by_queue() -> None:
    times = planner_times(waiting=100, batches=3)
    assert len({(one["sizes"], one["namespaces"], one["deadlines"]) for one in times}) == len(times) == 24
    assert all(0 < one["median_us"] <= one["p90_us"] for one in times)


def test_no_result_is_replaced(tmp_path: Path) -> None:
    first, second = (write_new(tmp_path, "2030-01-01", {"a": float("inf")}) for _ in range(2))
    assert (first.name, second.name) == ("scheduling-2030-01-01.json", "scheduling-2030-01-01-2.json")
    assert json.loads(second.read_text()) == {"a": None}


def test_the_simulation_needs_no_torch() -> None:
    code = "import sys, scheduling; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "bench", check=True, timeout=60)
    assert json.loads(PADDING.read_text())["settings"]["model_error"] > 0
