"""What the service's event loop costs an item, on a CPU alone: the tower answers by itself, all else is real.

    python bench/loop.py
    python bench/loop.py --quick
    python bench/loop.py --profile          # which functions; slows the loop down, so only shares count

Owns the run and the result file. The service is loop_service.py's, the callers are loop_client.py's. One
process serves, others ask for one image a call, by each door in turn (gRPC, and local calls, which go without
it over a unix socket), and give the leases back over the broker's socket.
Three kinds of traffic: ``miss``, every content new, and ``hit``, every content known, both with many calls at
a time; ``alone``, misses one after the other, for the time that a call takes beyond decoding and the tower.
CPU time is of the loop's own thread: what others did beside it on the machine costs it caches, and shows as
time of its own only so far. Rounds take turns, and the median of them is reported.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from measurement import RESULTS, ResultFile, describe_environment
from rich.console import Console
from rich.table import Table
from serve_traffic import kinds_of, write_photos
from transport_processes import Process, ProcessFailed

PACKAGES = ("grpcio", "protobuf", "uvloop", "simplejpeg", "prometheus-client")
START_S = 120.0
RUN_S = 300.0
NUM_PHOTOS = 16
ALONE = 1
# What a batch of the tower takes beside its items: an H200's launch.
BATCH_MS = 1.3
TRAFFIC = ("miss", "hit", "alone")
DOORS = ("grpc", "local")
# Beside the stages that are the pixels' and the tower's, whatever a call takes is the service's and its way.
NOT_OURS = ("decode_ms", "resize_ms", "tower_ms")


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=("224", "448", "1024"), default="448", help="pixels a side")
    parser.add_argument("--calls", type=int, help="of a busy round; default 1500, --quick 60")
    parser.add_argument("--alone-calls", type=int, help="of a round one at a time; default 100, --quick 8")
    parser.add_argument("--at-once", type=int, default=48, help="calls in progress, of all clients")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--clients", type=int, default=1, help="processes that ask")
    parser.add_argument("--rounds", type=int, help="of each traffic; default 5, --quick 1")
    parser.add_argument("--ingest-threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--arena-items", type=int, default=512, help="that the device's arena holds")
    parser.add_argument("--event-loop", choices=("auto", "asyncio"), default="auto")
    parser.add_argument("--item-ms", type=float, default=1.3, help="of the tower; an H200's at 448 px")
    parser.add_argument("--decode", action="store_true", help="decode every image, on the same cores")
    parser.add_argument("--quick", action="store_true", help="does it run at all")
    parser.add_argument("--profile", action="store_true", help="of the loop, in one more round of misses")
    parser.add_argument("--seed", type=int, help="of the photographs; default: a new one")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args(line)
    quick = arguments.quick
    for name, value in {
        "calls": 60 if quick else 1500,
        "alone_calls": 8 if quick else 100,
        "rounds": 1 if quick else 5,
    }.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(2**31)
    return arguments


class Run:
    """One run, from the processes' start to the figures of every round."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.rounds: dict[str, dict[str, list[dict[str, float]]]] = {
            door: {name: [] for name in TRAFFIC} for door in arguments.doors
        }
        self.profile: list[dict[str, Any]] = []
        self.event_loop = ""
        self._seed = arguments.seed

    def main(self) -> None:
        """Raises ProcessFailed."""
        arguments = self.arguments
        photos = self.folder / "photos"
        kinds = kinds_of(arguments.size, NUM_PHOTOS, scale=1.0, seed=arguments.seed)
        write_photos(photos, kinds, seed=arguments.seed, threads=1)
        with ExitStack() as stack:
            service = stack.enter_context(Process("loop_service.py", self.folder / "service.log"))
            clients = [
                stack.enter_context(Process("loop_client.py", self.folder / f"client-{number}.log"))
                for number in range(arguments.clients)
            ]
            started = service.ask(
                "start",
                folder=str(self.folder),
                arena_bytes=arguments.arena_items * self._row_bytes(),
                batch_ms=BATCH_MS,
                item_ms=arguments.item_ms,
                ingest_threads=arguments.ingest_threads,
                event_loop=arguments.event_loop,
                decodes=arguments.decode,
                timeout_s=START_S,
            )
            self.event_loop = started["loop"]
            for client in clients:
                place = {"target": started["target"], "broker": started["broker"], "folder": str(photos)}
                client.ask("connect", **place, timeout_s=START_S)
            for door in arguments.doors:  # warm-up, not counted
                self._ask(clients, door, "miss", min(200, arguments.calls), arguments.at_once)
            for _ in range(arguments.rounds):
                for traffic in TRAFFIC:
                    for door, rounds in self.rounds.items():
                        rounds[traffic].append(self._round(service, clients, door, traffic))
            if arguments.profile:
                service.ask("begin", profile=True)
                self._ask(clients, arguments.doors[-1], "miss", arguments.calls, arguments.at_once)
                self.profile = service.ask("end")["profile"]

    def _row_bytes(self) -> int:
        """An upper bound of an item's rows with the tiny tower."""
        side = int(self.arguments.size) // 32
        return side * side * 1024 + 8192

    def _round(self, service: Process, clients: list[Process], door: str, traffic: str) -> dict[str, float]:
        arguments = self.arguments
        count, at_once = arguments.calls, arguments.at_once
        if traffic == "alone":
            clients, count, at_once = clients[:1], arguments.alone_calls, ALONE
        if traffic == "hit":  # known from here on
            self._ask(clients, door, "hit", NUM_PHOTOS * len(clients), at_once)
        service.ask("begin", profile=False)
        answers = self._ask(clients, door, traffic, count, at_once)
        spent = service.ask("end")["spent"]
        return figures_of(spent, answers)

    def _ask(
        self, clients: list[Process], door: str, traffic: str, count: int, at_once: int
    ) -> list[dict[str, Any]]:
        for number, client in enumerate(clients):
            if traffic != "hit":
                self._seed += 1
            client.send(
                "run",
                door=door,
                seed=self._seed if traffic != "hit" else self.arguments.seed + number,
                count=max(1, count // len(clients)),
                at_once=max(1, at_once // len(clients)),
                contents=NUM_PHOTOS if traffic == "hit" else count,
            )
        return [client.answer(RUN_S) for client in clients]


def figures_of(spent: dict[str, float], answers: list[dict[str, Any]]) -> dict[str, float]:
    """Of one round; CPU milliseconds for each item, by thread. beyond_ms: of each call, its time less that of
    the pixels and the tower."""
    items, seconds = spent["items"], max(answer["seconds"] for answer in answers)
    calls = [dict(zip(answer["columns"], row, strict=True)) for answer in answers for row in answer["rows"]]
    beyond = sorted(one["latency_ms"] - sum(one[name] for name in NOT_OURS) for one in calls)
    found = {
        f"{name.removeprefix('cpu_s.').replace('-', '_')}_ms": value * 1e3 / items
        for name, value in spent.items()
        if name.startswith("cpu_s.")
    }
    return found | {
        "items": items,
        "items_per_s": items / seconds,
        "loop_share": spent["cpu_s.loop"] / seconds,
        "items_per_batch": spent["encoded"] / spent["batches"] if spent["batches"] else 0.0,
        "client_ms": sum(answer["cpu_s"] for answer in answers) * 1e3 / items,
        "beyond_p50_ms": beyond[len(beyond) // 2],
        "beyond_p90_ms": beyond[len(beyond) * 9 // 10],
    }


def medians_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the rounds; ``loop_ms_least``: the least, since others only ever add to it."""
    names = sorted(set().union(*rounds))
    found = {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in names}
    return found | {"loop_ms_least": min(one["loop_ms"] for one in rounds)}


def table_of(result: dict[str, Any]) -> Table:
    table = Table(
        title=f"The event loop ({result['settings']['loop']}) on {result['device']},"
        f" {result['settings']['size']} px",
        caption="CPU ms an item, by thread; beyond: p50 and p90 of a call but for decode, resize and tower",
    )
    names = (
        "traffic",
        "door",
        "loop",
        "least",
        "ingest",
        "engine",
        "rows",
        "broker",
        "process",
        "items/s",
        "loop busy",
    )
    for name in (*names, "a batch", "beyond ms"):
        table.add_column(name, justify="right")
    for record in result["records"]:
        threads = (
            "loop_ms", "loop_ms_least", "ingest_ms", "device_engine_ms", "device_rows_ms", "broker_ms",
            "process_ms",
        )  # fmt: skip
        table.add_row(
            record["traffic"],
            record["door"],
            *(f"{record.get(name, 0.0):.3f}" for name in threads),
            f"{record['items_per_s']:.0f}",
            f"{record['loop_share']:.0%}",
            f"{record['items_per_batch']:.1f}",
            f"{record['beyond_p50_ms']:.2f} / {record['beyond_p90_ms']:.2f}",
        )
    return table


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    begun_s = time.perf_counter()
    environment = describe_environment(torch.device("cpu"), arguments.commit, PACKAGES)
    with tempfile.TemporaryDirectory(prefix="ve") as folder:
        run = Run(arguments, Path(folder))
        try:
            run.main()
        except ProcessFailed as error:
            sys.exit(str(error))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "commit")}
    result: dict[str, Any] = environment | {
        "settings": settings | {"loop": run.event_loop, "batch_ms": BATCH_MS},
        "load_average": os.getloadavg(),
        "records": [
            {"traffic": traffic, "door": door, **medians_of(by_traffic[traffic])}
            for traffic in TRAFFIC
            for door, by_traffic in run.rounds.items()
        ],
        "rounds": run.rounds,
        "profile": run.profile,
        "seconds": time.perf_counter() - begun_s,
    }
    file = ResultFile(arguments.out, "loop", result)
    console.print(table_of(result))
    for one in run.profile[:60]:
        console.print(
            f"{one['own_us']:8.1f} us {one['calls']:6.1f} calls {one['all_us']:8.1f} us  {one['function']}"
        )
    console.print(f"written to {file.path} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
