"""Sends photographs by gRPC under open-loop load, and compares the service with the tower alone.

    python -m bench.serve                                     # full size on cuda:0, about three minutes
    python -m bench.serve --replicas 2 --mps                  # two services on the GPU, side by side
    python -m bench.serve --quick --device cpu --size tiny    # checks that the bench runs

Owns the run: its options, processes, order, time budgets, figures and tables. traffic.py owns what is sent;
serve_peers.py owns sending it, and the tower alone. bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.checkpoints import random_checkpoint
from bench.harness.children import IMAGE_MALLOC, Child, ProcessFailed, ServiceProcess, Snapshot
from bench.harness.mps import MPS_CONTROL, has_mps, mps_daemon
from bench.measurement import TimedRun, options_of, percentile
from bench.serve_peers import OK, STAGES
from bench.traffic import MAX_PIXELS, MIXES, load_of, specs_of, write_photos
from encoder_service.checkpoints.synthetic import FAMILIES, SIZES
from encoder_service.ingest.cores import usable_cores

PACKAGES = ("grpcio", "protobuf", "pillow", "simplejpeg", "torchvision", "cuda-bindings")
GIB = 1 << 30
# The most informative load first, so that a run that is cut short has it.
LOADS = (1.1, 0.1, 0.6)
WARM_UP_SHARE = 0.2
# Time between the command to send and the first request, in which every process computes its schedule.
HEAD_START_S = 0.7
TIMEOUT_S = 20.0
GRACE_S = 2.0
SERVICE = "service"
# The tier of rows that were encoded for this request.
MISS = "miss"
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Requests for content that was requested before, and the exponent of its popularity.
REPEAT_SHARE, ZIPF = 0.3, 1.1
# Until a process is ready.
START_LIMIT_S = 150.0
COLUMNS = {
    "mix": "{mix}",
    "load": "{load:g}",
    "req/s": "{offered_images_per_s:.1f}",
    "img/s": "{images_per_s:.1f}",
    "patches/s": "{encoded_patches_per_s:.0f}",
    "tower": "{tower_share:.1%}",
    "good": "{goodput_images_per_s:.1f}",
    "p50 ms": "{latency_ms[p50]:.1f}",
    "p90": "{latency_ms[p90]:.1f}",
    "p99": "{latency_ms[p99]:.1f}",
    "beyond": "{overhead_ms[p50]:.2f}",
    "busy": "{device_busy_share:.0%}",
    "pad": "{padding_share:.0%}",
    "cores": "{cores:.1f}",
    "loop": "{loop_share:.0%}",
    "turns": "{turns_per_call:.1f}",
    "misses": "{tiers[miss]:.0%}",
    "failures": "{failures}",
}
SUMMARY_COLUMNS = {
    "mix": "{mix}",
    "tower alone, img/s": "{tower_images_per_s:.1f}",
    "service, of the tower": "{service_over_tower:.1%}",
    "at load": "{best_load:g}",
    "ms beyond decode and tower": "{overhead_p50_ms:.2f}",
    "at load ": "{overhead_load:g}",
}


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__doc__, quick="one mix, two loads, few seconds each")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, help="default: 448-heavy and chat; one if quick")
    parser.add_argument(
        "--loads", nargs="+", type=float, help=f"new images a second over the tower's rate; default {LOADS}"
    )
    parser.add_argument(
        "--transport",
        choices=("device", "host", "inline"),
        help="default: the device's. inline: all by TCP, as across hosts",
    )
    parser.add_argument("--clients", type=int, help="processes that send; default: half of the cores")
    parser.add_argument("--ingest-threads", type=int, help="default: the cores without the clients'")
    parser.add_argument(
        "--replicas", type=int, default=1, help="services; each has its contents, as behind a gateway"
    )
    parser.add_argument(
        "--mps", action="store_true", help="services and callers share the GPU by NVIDIA's MPS"
    )
    parser.add_argument("--photos", type=int, help="files of a mix, each sent under many contents")
    parser.add_argument("--cell-s", type=float, help="seconds of one load, its first fifth a warm-up")
    arguments = parser.parse_args(line)
    on_gpu, quick = arguments.device.type == "cuda", arguments.quick
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --quick --device cpu --size tiny checks that the bench runs")
    if not on_gpu and arguments.transport == "device":
        parser.error("rows on the device need a GPU")
    if arguments.replicas < 1:
        parser.error(f"--replicas {arguments.replicas}: at least 1 service is needed")
    if arguments.mps and not (on_gpu and has_mps()):
        parser.error(f"--mps needs a GPU and {MPS_CONTROL} on PATH")
    cores = usable_cores()
    defaults = {
        "mixes": ["448-heavy"] if quick else ["448-heavy", "chat"],
        "loads": list(LOADS[:2] if quick else LOADS),
        "transport": "device" if on_gpu else "host",
        "clients": max(1, cores // 2),
        "photos": 20 if quick else 100,
        "cell_s": 2.5 if quick else 6.0,
        "time_limit_s": 60.0 if quick else 215.0,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.ingest_threads is None:
        arguments.ingest_threads = max(1, (cores - arguments.clients) // arguments.replicas)
    # Latency for goodput; factor for the photographs' sides; seconds of the tower alone for each mix.
    arguments.bound_ms = 300.0 if on_gpu else 1500.0
    arguments.scale = 0.25 if quick and not on_gpu else 1.0
    arguments.tower_s = 1.2 if quick else 3.0
    return arguments


@dataclass(frozen=True)
class Cell:
    """One record to be measured."""

    mix: str
    load: float


class Run(TimedRun):
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        """folder: for sockets, photographs and logs. Its path must be short."""
        self.folder = folder
        self.gpu = (arguments.device.index or 0) if arguments.device.type == "cuda" else None
        self.seed = secrets.randbelow(2**31)
        self.max_pixels = int(MAX_PIXELS * arguments.scale**2)
        settings = {"seed": self.seed, "max_pixels": self.max_pixels, "malloc": IMAGE_MALLOC}
        settings |= {"repeat_share": REPEAT_SHARE, "zipf": ZIPF}
        parts: dict[str, Any] = {"photos": {}, "tower": {}, "service": {}, "summary": []}
        super().__init__("serve", arguments, settings=settings, parts=parts, packages=PACKAGES)
        self.stack = ExitStack()
        self.clients: list[Child] = []

    def main(self) -> None:
        """Raises ProcessFailed if the tower or the service does not start."""
        arguments = self.arguments
        weights = random_checkpoint(arguments.family, arguments.size, 0, arguments.device)
        with self.stack, weights as checkpoint:
            if arguments.mps:
                # Every process is started with this one's variables.
                os.environ |= self.stack.enter_context(mps_daemon(self.folder / "mps"))
            limit_area(checkpoint, self.max_pixels)
            with self.console.status("photographs"):
                self._make_photos()
            with self.console.status("the tower alone"):
                self._measure_tower(checkpoint)
            with self.console.status("starting the service"):
                services = self._start_services(checkpoint)
            cells = [Cell(mix, load) for load in arguments.loads for mix in arguments.mixes]
            for number, cell in enumerate(cells, 1):
                if self.is_out_of_time(asdict(cell)):
                    continue
                with self.console.status(f"{number} of {len(cells)}: {cell.mix} at {cell.load:g}"):
                    try:
                        self.result["records"].append(self._measured(cell, services))
                    except ProcessFailed as error:
                        self.leave_out(str(error), **asdict(cell))
                self.result["summary"] = summary_of(self.result["records"], self.result["tower"])
                self.file.write()
            self.result["service"]["exit_status"] = [service.close() for service in services]
        self.finish()

    # -- processes -------------------------------------------------------------------------------------

    def _process(self, role: str, *, uses_gpu: bool) -> Child:
        gpu = self.gpu if uses_gpu else None
        return self.stack.enter_context(Child("bench.serve_peers", role, gpu=gpu))

    def _make_photos(self) -> None:
        """Writes the photographs. Also starts the clients, which read them."""
        arguments = self.arguments
        uses_gpu = arguments.transport == "device"
        self.clients = [self._process("client", uses_gpu=uses_gpu) for _ in range(arguments.clients)]
        for mix in arguments.mixes:
            specs = specs_of(mix, arguments.photos, scale=arguments.scale, seed=self.seed)
            folder = self.folder / "photos" / mix
            threads = arguments.ingest_threads + arguments.clients
            num_bytes = write_photos(folder, specs, seed=self.seed, threads=threads)
            self.result["photos"][mix] = {
                "count": len(specs),
                "mean_bytes": num_bytes / len(specs),
                "mean_pixels": sum(spec.width * spec.height for spec in specs) / len(specs),
                "sizes": [f"{spec.width}x{spec.height}" for spec in specs],
            }
            for client in self.clients:
                client.send("photos", mix=mix, folder=str(folder))
        for _ in arguments.mixes:
            for client in self.clients:
                client.answer(START_LIMIT_S)

    def _settings(self, checkpoint: Path) -> dict[str, Any]:
        """Settings of the service and of the tower alone. Every process sees at most one GPU."""
        settings: dict[str, Any] = {"model": str(checkpoint), "device": "cpu"}
        if self.gpu is not None:
            return settings | {"device": "cuda:0"}
        # Tower and callers share the CPU. Each process gets one thread, and batches are small, so that a load
        # of a few seconds has many batches.
        return settings | {"torch_threads": 1, "max_patches_per_batch": 2048}

    def _measure_tower(self, checkpoint: Path) -> None:
        """Measures the tower alone with each mix. Raises ProcessFailed."""
        arguments = self.arguments
        with self._process("tower", uses_gpu=True) as tower:
            loaded = tower.ask("load", settings=self._settings(checkpoint), timeout_s=START_LIMIT_S)
            for mix in arguments.mixes:
                self.result["tower"][mix] = tower.ask(
                    "measure",
                    folder=str(self.folder / "photos" / mix),
                    budget_s=arguments.tower_s,
                    seed=self.seed,
                    timeout_s=arguments.tower_s + START_LIMIT_S,
                ) | {"load_s": loaded["seconds"]}
        self.file.write()

    def _start_services(self, checkpoint: Path) -> list[ServiceProcess]:
        """Starts the replicas one after the other and connects the clients. Raises ProcessFailed."""
        arguments = self.arguments
        services = [self._start_service(checkpoint, number) for number in range(arguments.replicas)]
        for client in self.clients:
            targets = [service.target for service in services]
            client.send("connect", targets=targets, transport=arguments.transport)
        reasons = [client.answer(START_LIMIT_S)["reason"] for client in self.clients]
        starts_s = [service.start_s for service in services]
        self.result["service"] = {"start_s": starts_s, "transport": reasons[0]}
        return services

    def _start_service(self, checkpoint: Path, number: int) -> ServiceProcess:
        arguments = self.arguments
        unix = f"unix:{self.folder}/serve-{number}.sock"
        settings = self._settings(checkpoint) | {
            "listen": "127.0.0.1:0" if arguments.transport == "inline" else unix,
            "admin_listen": "127.0.0.1:0",
            "ingest_threads": arguments.ingest_threads,
            "broker_path": f"{self.folder}/broker-{number}.sock",
            "arena_bytes": (GIB // 2 if self.gpu is None else 4 * GIB) // arguments.replicas,
        }
        if self.gpu is not None:
            settings["device_arena_bytes"] = 16 * GIB // arguments.replicas
        return self.stack.enter_context(
            ServiceProcess(
                settings,
                self.folder / f"service-{number}.log",
                gpu=self.gpu,
                start_s=START_LIMIT_S,
                counts_turns=True,
            )
        )

    # -- one record ------------------------------------------------------------------------------------

    def _measured(self, cell: Cell, services: Sequence[ServiceProcess]) -> dict[str, Any]:
        """Measures a cell and returns its record. Raises ProcessFailed."""
        arguments = self.arguments
        duration_s, warm_s = arguments.cell_s, arguments.cell_s * WARM_UP_SHARE
        tower = self.result["tower"][cell.mix]
        load = load_of(
            cell.load * tower["images_per_s"],
            duration_s=duration_s,
            num_photos=arguments.photos,
            # A new seed: no cache has the contents of a new cell.
            seed=secrets.randbelow(2**31),
            repeat_share=REPEAT_SHARE,
            zipf=ZIPF,
        )
        start_s = time.monotonic() + HEAD_START_S
        for number, client in enumerate(self.clients):
            client.send(
                "run",
                mix=cell.mix,
                load=asdict(load),
                number=number,
                num_clients=len(self.clients),
                start_s=start_s,
                timeout_s=TIMEOUT_S,
                grace_s=GRACE_S,
            )
        snapshots = []
        for at_s in (warm_s, duration_s):
            time.sleep(max(0.0, start_s + at_s - time.monotonic()))
            snapshots.append([service.snapshot() for service in services])
        answers = [client.answer(duration_s + GRACE_S + TIMEOUT_S) for client in self.clients]
        figures = client_figures(
            requests_of(answers), warm_s=warm_s, duration_s=duration_s, bound_ms=arguments.bound_ms
        )
        record = {"server": SERVICE} | asdict(cell) | {"duration_s": duration_s, "warm_s": warm_s} | figures
        record["tower_share"] = figures["encoded_patches_per_s"] / tower["patches_per_s"]
        record["rate"] = load.rate
        return record | service_figures(*snapshots)


def limit_area(checkpoint: Path, max_pixels: int) -> None:
    """Sets the largest image area after resizing in the checkpoint's processor settings, which service and
    tower read. Families with another kind of limit keep theirs."""
    path = checkpoint / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if "size" in settings:
        settings["size"]["longest_edge"] = max(max_pixels, settings["size"]["shortest_edge"])
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# -- figures ---------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99; None if there are no values, because JSON has no NaN."""
    if not values:
        return None
    return {name: percentile(values, share) for name, share in PERCENTILES.items()}


def requests_of(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The requests of all clients, as dictionaries by column."""
    return [dict(zip(answer["columns"], row, strict=True)) for answer in answers for row in answer["rows"]]


def client_figures(
    requests: Sequence[Mapping[str, Any]], *, warm_s: float, duration_s: float, bound_ms: float
) -> dict[str, Any]:
    """Figures for the part of a load after ``warm_s``. Rates count what ended in that part, latencies what
    was due in it. Overheads are percentiles over requests, not differences of percentiles."""
    span_s = duration_s - warm_s
    due = [one for one in requests if one["at_s"] >= warm_s]
    fine = [one for one in due if one["status"] == OK]
    ended = [
        one
        for one in requests
        if one["status"] == OK and warm_s <= one["at_s"] + one["latency_ms"] / 1e3 < duration_s
    ]
    misses = [one for one in fine if one["tier"] == MISS]
    hits = [one for one in fine if one["tier"] not in (MISS, "in_flight")]
    tiers = Counter(one["tier"] for one in fine)
    return {
        "offered_images_per_s": len(due) / span_s,
        "images_per_s": len(ended) / span_s,
        "patches_per_s": sum(one["patches"] for one in ended) / span_s,
        "encoded_images_per_s": sum(one["tier"] == MISS for one in ended) / span_s,
        "encoded_patches_per_s": sum(one["patches"] for one in ended if one["tier"] == MISS) / span_s,
        "delivered_mib_per_s": sum(one["bytes"] for one in ended) / span_s / (1 << 20),
        "goodput_images_per_s": sum(one["latency_ms"] <= bound_ms for one in fine) / span_s,
        "bound_ms": bound_ms,
        "num_requests": len(due),
        "failures": dict(Counter(one["status"] for one in due if one["status"] != OK)),
        "tiers": {tier: count / len(fine) for tier, count in sorted(tiers.items())} if fine else {},
        "latency_ms": percentiles([one["latency_ms"] for one in fine]),
        "miss_latency_ms": percentiles([one["latency_ms"] for one in misses]),
        "hit_latency_ms": percentiles([one["latency_ms"] for one in hits]),
        "lag_ms": percentiles([one["lag_ms"] for one in fine]),
        "stages": {stage: percentiles([one[stage] for one in misses]) for stage in STAGES if misses},
        "overhead_ms": percentiles([overhead_ms(one) for one in misses]),
        "overhead_unqueued_ms": percentiles([overhead_ms(one) - one["queue_ms"] for one in misses]),
        "service_overhead_ms": percentiles([service_overhead_ms(one) for one in misses]),
        "caller_overhead_ms": percentiles([overhead_ms(one) - service_overhead_ms(one) for one in misses]),
    }


def overhead_ms(request: Mapping[str, Any]) -> float:
    """Time from when a request was due to its rows, without decoding, resizing and the tower's forward."""
    spent = request["decode_ms"] + request["resize_ms"] + request["tower_ms"]
    return float(request["latency_ms"] - spent)


def service_overhead_ms(request: Mapping[str, Any]) -> float:
    """The same overhead by the service's clock: without the caller's process and the transfer to it."""
    spent = request["decode_ms"] + request["resize_ms"] + request["tower_ms"]
    return float(request["total_ms"] + request["delivery_ms"] - spent)


def service_figures(before: Sequence[Snapshot], after: Sequence[Snapshot]) -> dict[str, Any]:
    """What the replicas of the service counted between two moments. Shares are relative to the elapsed time,
    a replica's in the mean. cores: mean number of busy cores, of all; loop_share: CPU time of the thread that
    runs the event loop."""
    changes = list(zip(before, after, strict=True))
    seconds = sum(end.at_s - begin.at_s for begin, end in changes) / len(changes)
    cpu_s = sum(end.cpu_s - begin.cpu_s for begin, end in changes)
    loop_cpu_s = sum(end.loop_cpu_s - begin.loop_cpu_s for begin, end in changes)

    def grown(name: str) -> float:
        return sum(end.counters.get(name, 0.0) - begin.counters.get(name, 0.0) for begin, end in changes)

    items, batches = grown("ve_encoded_items_total"), grown("ve_batches_total")
    patches, padded = grown("ve_encoded_patches_total"), grown("ve_padded_patches_total")
    turns, calls = sum(end.turns - begin.turns for begin, end in changes), grown("ve_requests_total{Encode}")
    names = {name for end in after for name in end.counters if name.startswith("ve_items_total")}
    delivered = sum(map(grown, names))
    return {
        "device_busy_share": grown("ve_device_busy_seconds_total") / seconds / len(changes),
        "tower_images_per_s": items / seconds,
        "tower_patches_per_s": patches / seconds,
        "batches": batches,
        "images_per_batch": items / batches if batches else None,
        "padding_share": padded / (padded + patches) if patches else None,
        "cores": cpu_s / seconds,
        "loop_share": loop_cpu_s / seconds / len(changes),
        "cpu_ms_per_item": cpu_s * 1e3 / delivered if delivered else None,
        "loop_ms_per_item": loop_cpu_s * 1e3 / delivered if delivered else None,
        "turns_per_s": turns / seconds,
        "calls_per_s": calls / seconds,
        "turns_per_call": turns / calls if calls else None,
        "evictions": grown("ve_store_evictions_total"),
    }


def summary_of(
    records: Sequence[Mapping[str, Any]], towers: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One line per mix: the service's best throughput relative to the tower alone, and the p50 overhead at
    the lightest load (None if no image was encoded)."""
    lines = []
    for mix, tower in towers.items():
        own = [one for one in records if one["mix"] == mix]
        if not own:
            continue
        best = max(own, key=lambda one: one["encoded_patches_per_s"])
        lightest = min(own, key=lambda one: one["load"])
        line = {
            "mix": mix,
            "tower_images_per_s": tower["images_per_s"],
            "service_over_tower": best["encoded_patches_per_s"] / tower["patches_per_s"],
            "best_load": best["load"],
            "overhead_load": lightest["load"],
        }
        for name in ("overhead", "overhead_unqueued", "service_overhead"):
            found = lightest[f"{name}_ms"]
            line[f"{name}_p50_ms"] = None if found is None else found["p50"]
        lines.append(line)
    return lines


def main() -> None:
    arguments = parse_arguments()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ve", dir=memory if memory.is_dir() else None) as folder:
        run = Run(arguments, Path(folder))
        try:
            run.main()
        except ProcessFailed as error:
            sys.exit(f"{error}\nthe partial result is in {run.file.path}")
    settings = run.result["settings"]
    run.print_table(
        f"Serving on {run.result['device']}, {settings['size']} size, rows by {settings['transport']}",
        run.result["records"],
        COLUMNS,
        "load: new images a second over the tower's own rate; good: requests a second within the bound;\n"
        "p50, p90, p99: from when a request was due; beyond: p50 of a miss beyond decode and tower;\n"
        "cores, loop: CPU of the service, of its event loop; turns: of the loop for each call",
    )
    run.print_table("Beside the tower alone", run.result["summary"], SUMMARY_COLUMNS)
    run.print_end()


if __name__ == "__main__":
    main()
