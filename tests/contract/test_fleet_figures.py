"""docs/fleet.md says what its result file and the code say."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import fields
from pathlib import Path

from lm_adapter.fleet import FleetSettings
from lm_adapter.fleet.budget import WINDOW_S
from lm_adapter.fleet.call import MAX_MOVES
from lm_adapter.fleet.directory import LEAST_PAUSE_S, LINGER_S, LOOKUP_S
from lm_adapter.fleet.replica import MISSED_CHECKS, ReplicaState
from lm_adapter.fleet.run import KEPT_BYTES
from tests.fleet.rig import percentile

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fleet.md").read_text()
(NAME,) = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULT = json.loads((ROOT / NAME).read_text())


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    _, found, rest = PAGE.partition(heading)
    assert found, heading
    (table,) = re.findall(r"((?:^\|.*\n)+)", rest, re.MULTILINE)[:1]
    return [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in table.splitlines()[2:]]


def test_events_are_those_of_the_file_and_nothing_failed() -> None:
    assert not RESULT["settings"]["quick"]
    expected = [
        [
            one["event"],
            str(one["repeats"]),
            f"{one['items']:,}",
            str(one["failed"]),
            f"{statistics.median(one['p99_before_ms']):.0f}",
            f"{statistics.median(one['p99_after_ms']):.0f}",
            f"{statistics.median(one['recovery_ms']):.0f}",
            f"{percentile(one['recovery_ms'], 0.99):.0f}",
            f"{100 * statistics.median(one['moved']):.1f} %",
            f"{100 * one['ideal_moved']:.1f} %",
            f"{100 * statistics.fmean(one['hit_rate_after']):.1f} %",
            f"{100 * one['extra_attempts']:.1f} %",
        ]
        for one in RESULT["records"]
    ]
    assert rows_under("### Events") == expected
    assert all(one["failed"] == 0 for one in RESULT["records"])


def test_what_counts_as_late_is_said() -> None:
    late = [3 * before + 50 for one in RESULT["records"] for before in one["p99_before_ms"]]
    assert f"between {min(late):.0f} and {max(late):.0f} ms" in " ".join(PAGE.split())


def test_keys_moved_by_the_ideal_share() -> None:
    """Of those events that are seen as one change; of 4000 keys, four standard deviations."""
    for one in RESULT["records"]:
        if one["event"].startswith(("scale", "kill", "rolling")):
            moved = statistics.median(one["moved"])
            assert abs(moved - one["ideal_moved"]) < 4 * (0.25 / 4000) ** 0.5, one["event"]


def test_costs_are_those_of_the_file() -> None:
    overhead = RESULT["overhead"]
    budget, free = RESULT["sick_fleet"]
    assert rows_under("### Costs") == [
        ["one item that is held, client of one server", f"{overhead['one_server_ms']:.2f} ms"],
        ["the same, fleet client", f"{overhead['fleet_ms']:.2f} ms"],
        ["the same, blocking fleet client", f"{overhead['fleet_blocking_ms']:.2f} ms"],
        ["attempts per item, every replica full, with the budget", f"{budget['attempts_per_item']:.2f}"],
        ["attempts per item, every replica full, without", f"{free['attempts_per_item']:.2f}"],
    ]
    share = RESULT["settings"]["fleet"]["retry_share"]
    reserve = RESULT["settings"]["fleet"]["retry_reserve_per_s"] * WINDOW_S
    assert budget["attempts_per_item"] <= 1 + share + 2 * reserve / budget["items"]


def test_what_is_said_of_grpcs_ring_is_what_was_found() -> None:
    found = RESULT["grpc_ring"]
    assert f"grpcio {RESULT['versions']['grpcio']}" in PAGE
    assert [cells[1] for cells in rows_under("## Why not gRPC's ring hash")] == [
        f"yes, {found['num_keys']} of {found['num_keys']}" if found["same_again"] else "no",
        f"{found['replicas_used_after_scaling_4_to_8']} of 8 are used",
        f"{found['failed_while_one_of_4_drains']} of {found['num_keys']} calls fail",
        f"{found['failed_after_one_stopped']} of {found['num_keys']} calls fail",
    ]


def test_settings_and_constants_are_the_codes() -> None:
    defaults = FleetSettings()
    for name, given in re.findall(r"`(\w+)=([\d.]+)`", PAGE):
        assert name in {one.name for one in fields(FleetSettings)}, name
        if name != "refresh_s":
            assert float(given) == getattr(defaults, name)
    for name in re.findall(r"`(\w+_s|max_\w+|\w+_share|\w+_percentile|\w+_factor|\w+_floor)`", PAGE):
        assert hasattr(defaults, name), name
    assert (WINDOW_S, MAX_MOVES, MISSED_CHECKS) == (10.0, 3, 2)
    assert KEPT_BYTES == 64 << 20
    assert (LOOKUP_S, LINGER_S, LEAST_PAUSE_S) == (10.0, 5.0, 0.1)
    assert [cells[0] for cells in rows_under("## Which replicas there are")] == [
        one.value for one in ReplicaState
    ]
    measured = RESULT["settings"]["fleet"]
    assert {name for name, value in measured.items() if value != getattr(defaults, name)} == {"refresh_s"}


def test_the_later_runs_are_those_of_their_files() -> None:
    results = [json.loads((ROOT / f"bench/results/fleet-2026-11-23-{n}.json").read_text()) for n in (3, 4, 5)]
    one_call = [f"{result['overhead']['one_server_ms']:.1f}" for result in results]
    items = [f"{sum(one['items'] for one in result['records']):,}" for result in results]
    slow = [max(result["records"][-1]["recovery_ms"]) for result in results]
    assert all(result["records"][-1]["event"] == "slow replica" for result in results)
    assert {sum(one["repeats"] for one in result["records"]) for result in results} == {28}
    assert not any(one["failed"] for result in results for one in result["records"])
    words = " ".join(PAGE.split())
    assert f"took {one_call[0]}, {one_call[1]} and {one_call[2]} ms for what takes" in words
    assert f"{items[0]}, {items[1]} and {items[2]} items, 28 events each, and again none failed" in words
    assert (
        f"up to {slow[0]:.0f} ms in the first, {slow[1]:.0f} in the second and up to {slow[2]:.0f}" in words
    )
