"""Serves photographs under open-loop load, against the tower alone and a plain loop over the reference model.

    python bench/serve.py                                     # full size on cuda:0, four minutes
    python bench/serve.py --quick --device cpu --size tiny    # does it run at all
    python bench/serve_report.py RESULT.json                  # the picture of a result, again

Owns the run: its processes, its order, its budgets and the result file. What is sent is serve_traffic.py's,
how serve_client.py's; the 100 % line is serve_tower.py's, the plain loop serve_baseline.py's; figures are
serve_figures.py's. bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import json
import pstats
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import serve_report
from checkpoints import random_checkpoint
from measurement import ResultFile, describe_environment
from rich.console import Console
from serve_figures import client_figures, goals_of, requests_of, service_figures, summary_of
from serve_options import BASELINE_LOAD, NUM_MAIN_MIXES, OTHER_LOADS, parse_arguments
from serve_service import NotStarted, ServiceProcess, Sight
from serve_traffic import MAX_PIXELS, kinds_of, load_of, write_photos
from transport_processes import IMAGE_MALLOC, Process, ProcessFailed, visible_gpu

PACKAGES = ("grpcio", "protobuf", "pillow", "simplejpeg", "torchvision", "cuda-bindings")
GIB = 1 << 30
WARM_UP_SHARE = 0.2
# Between the order to send and the first request, for every process to have made its schedule.
HEAD_START_S = 0.7
TIMEOUT_S = 20.0
GRACE_S = 2.0
SERVICE, BASELINE = "service", "baseline"
BY_GRPC = "service by gRPC"
"""The same service, asked by clients that make no local calls and look for nothing by themselves."""


@dataclass(frozen=True)
class Cell:
    """One record to be."""

    server: str
    mix: str
    load: float
    bursty: bool = False


class Run:
    """One run: what was asked for, and the result as it grows. Each record is written at once, so that a run
    that is cut short leaves a valid file, marked by ``complete`` being false."""

    def __init__(self, arguments: argparse.Namespace, console: Console, folder: Path) -> None:
        """folder: for sockets, photographs and logs; a short path."""
        self.arguments = arguments
        self.console = console
        self.folder = folder
        self.begun_s = time.perf_counter()
        self.on_gpu = arguments.device.type == "cuda"
        self.seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
        environment = describe_environment(arguments.device, arguments.commit, PACKAGES)
        environment["command"][0] = "bench/serve.py"
        settings = {
            name: value for name, value in vars(arguments).items() if name not in ("device", "out", "commit")
        }
        self.result: dict[str, Any] = environment | {
            "complete": False,
            "settings": settings
            | {"seed": self.seed, "max_pixels": self._max_pixels(), "malloc": IMAGE_MALLOC},
            "phases": {},
            "photos": {},
            "tower": {},
            "service": {},
            "records": [],
            "summary": [],
            "goals": [],
            "left_out": [],
        }
        self.file = ResultFile(arguments.out, "serve", self.result)
        self.stack = ExitStack()
        self.clients: list[Process] = []
        self.service: ServiceProcess | None = None

    def main(self) -> None:
        arguments = self.arguments
        with (
            self.stack,
            random_checkpoint(
                arguments.family, arguments.size, arguments.seed or 0, arguments.device
            ) as checkpoint,
        ):
            limit_area(checkpoint, self._max_pixels())
            self._mark("checkpoint")
            with self.console.status("photographs"):
                self.clients = [
                    self._process(
                        "serve_client.py", f"client-{number}", uses_gpu=arguments.transport == "device"
                    )
                    for number in range(arguments.clients)
                ]
                self._make_photos()
            self._mark("photographs")
            with self.console.status("the tower alone"):
                self._measure_tower(checkpoint)
            self._mark("tower")
            with self.console.status("starting the service"):
                self._start_service(checkpoint)
            self._mark("service start")
            cells = self._cells()
            for number, cell in enumerate(cells, 1):
                if self._out_of_time(cell):
                    continue
                with self.console.status(
                    f"{number} of {len(cells)}: {cell.server} {cell.mix} at {cell.load:g}"
                ):
                    try:
                        self._start_baseline(checkpoint, cell)
                        self.result["records"].append(self._measured(cell))
                    except ProcessFailed as error:
                        self._leave_out(cell, str(error))
                self.result["goals"] = goals_of(self.result["records"], self.result["tower"])
                self.result["summary"] = summary_of(self.result["records"], self.result["tower"])
                self._mark(f"{cell.server} {cell.mix} {cell.load:g}" + (" bursty" if cell.bursty else ""))
                self.file.write()
            if self.service is not None:
                self.result["service"]["exit_status"] = self.service.close()
        if arguments.profile:
            self.result["profile"] = profile_lines(self.folder / "profile", self.result["records"])
        self.result["complete"] = bool(self.result["records"]) and not any(
            one["cut_short"] for one in self.result["left_out"]
        )
        self.result["seconds"] = time.perf_counter() - self.begun_s
        self.file.write()

    def _mark(self, phase: str) -> None:
        """The seconds of the run at which a phase of it was over."""
        self.result["phases"][phase] = time.perf_counter() - self.begun_s

    # -- processes -------------------------------------------------------------------------------------

    def _process(self, script: str, name: str, *, uses_gpu: bool) -> Process:
        gpu = (self.arguments.device.index or 0) if self.on_gpu and uses_gpu else None
        process = Process(script, self.folder / f"{name}.log", gpu=gpu, malloc=IMAGE_MALLOC)
        return self.stack.enter_context(process)

    def _make_photos(self) -> None:
        arguments = self.arguments
        for mix in arguments.mixes:
            kinds = kinds_of(mix, arguments.photos, scale=arguments.scale, seed=self.seed)
            folder = self.folder / "photos" / mix
            threads = arguments.ingest_threads + arguments.clients
            num_bytes = write_photos(folder, kinds, seed=self.seed, threads=threads)
            self.result["photos"][mix] = {
                "count": len(kinds),
                "mean_bytes": num_bytes / len(kinds),
                "mean_pixels": sum(kind.width * kind.height for kind in kinds) / len(kinds),
                "sizes": [f"{kind.width}x{kind.height}" for kind in kinds],
            }
            for client in self.clients:
                client.send("photos", mix=mix, folder=str(folder))
        for _ in arguments.mixes:
            for client in self.clients:
                client.answer(self.arguments.start_limit_s)

    def _settings(self, checkpoint: Path) -> dict[str, Any]:
        """Of the service, and of the tower alone."""
        arguments = self.arguments
        settings = {
            "model": str(checkpoint),
            # Every process sees one GPU at most.
            "device": "cuda:0" if self.on_gpu else "cpu",
            "precision": arguments.precision,
            "log_level": "warning",
        }
        # On a CPU the tower and its callers share the cores: one thread for each of our processes. Batches
        # are small, so that a load of seconds has many.
        return settings if self.on_gpu else settings | {"torch_threads": 1, "max_patches_per_batch": 2048}

    def _measure_tower(self, checkpoint: Path) -> None:
        """Raises ProcessFailed."""
        arguments = self.arguments
        with self._process("serve_tower.py", "tower", uses_gpu=True) as tower:
            loaded = tower.ask("load", settings=self._settings(checkpoint), timeout_s=arguments.start_limit_s)
            for mix in arguments.mixes:
                self.result["tower"][mix] = tower.ask(
                    "measure",
                    folder=str(self.folder / "photos" / mix),
                    budget_s=arguments.tower_s,
                    seed=self.seed,
                    timeout_s=arguments.tower_s + arguments.start_limit_s,
                ) | {"load_s": loaded["seconds"]}
        self.file.write()

    def _start_service(self, checkpoint: Path) -> None:
        """Raises NotStarted, ProcessFailed."""
        arguments = self.arguments
        settings = self._settings(checkpoint) | {
            "listen": f"unix:{self.folder}/serve.sock",
            "admin_listen": "127.0.0.1:0",
            "ingest_threads": arguments.ingest_threads,
            "resize": arguments.resize,
            "broker_path": f"{self.folder}/broker.sock",
            "arena_bytes": int(arguments.host_arena_gib * GIB),
        }
        if arguments.torch_threads is not None:
            settings["torch_threads"] = arguments.torch_threads
        if self.on_gpu:
            settings["device_arena_bytes"] = int(arguments.device_arena_gib * GIB)
        self.service = self.stack.enter_context(
            ServiceProcess(
                settings,
                self.folder / "service.log",
                environment=IMAGE_MALLOC
                | (
                    {"CUDA_VISIBLE_DEVICES": visible_gpu(arguments.device.index or 0)}
                    if self.on_gpu
                    else {"OMP_NUM_THREADS": "1"}
                ),
                start_s=arguments.start_limit_s,
                profile=self.folder / "profile" if arguments.profile else None,
            )
        )
        reasons = self._connect(SERVICE, self.service.target, arguments.transport)
        if arguments.grpc_loads:
            self._connect(BY_GRPC, self.service.target, arguments.transport, by_grpc=True)
        self.result["service"] = {"start_s": self.service.start_s, "transport": reasons[0]}

    def _start_baseline(self, checkpoint: Path, cell: Cell) -> None:
        """Before its first cell. Raises ProcessFailed."""
        if cell.server != BASELINE or "baseline" in self.result:
            return
        self.result["baseline"] = {"max_batch": self.arguments.baseline_batch}
        baseline = self._process("serve_baseline.py", "baseline", uses_gpu=True)
        started = baseline.ask(
            "start",
            settings=self._settings(checkpoint),
            max_batch=self.arguments.baseline_batch,
            timeout_s=self.arguments.start_limit_s,
        )
        self._connect(BASELINE, started["target"], "inline")
        self.result["baseline"]["is_ready"] = True

    def _connect(self, name: str, target: str, transport: str, *, by_grpc: bool = False) -> list[str]:
        for client in self.clients:
            client.send("connect", name=name, target=target, transport=transport, by_grpc=by_grpc)
        return [client.answer(self.arguments.start_limit_s)["reason"] for client in self.clients]

    # -- one record ------------------------------------------------------------------------------------

    def _cells(self) -> list[Cell]:
        """The most telling first: a run that is out of time has them."""
        arguments = self.arguments
        main, others = arguments.mixes[:NUM_MAIN_MIXES], arguments.mixes[NUM_MAIN_MIXES:]
        most, fewer = arguments.loads[: len(OTHER_LOADS)], arguments.loads[len(OTHER_LOADS) :]
        cells = [Cell(SERVICE, mix, load) for load in most for mix in main]
        cells += [Cell(BY_GRPC, mix, load) for load in arguments.grpc_loads for mix in main]
        cells += [Cell(SERVICE, mix, OTHER_LOADS[0]) for mix in others]
        if arguments.baseline_batch:
            cells += [Cell(BASELINE, mix, BASELINE_LOAD) for mix in main]
        cells += [Cell(SERVICE, mix, load) for load in fewer for mix in main]
        if arguments.bursty:
            cells.append(Cell(SERVICE, main[0], arguments.bursty, bursty=True))
        return cells + [Cell(SERVICE, mix, load) for load in OTHER_LOADS[1:] for mix in others]

    def _measured(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell. Raises ProcessFailed."""
        arguments = self.arguments
        if cell.server == BASELINE and "is_ready" not in self.result["baseline"]:
            raise ProcessFailed("the baseline did not start")
        duration_s, warm_s = arguments.cell_s, arguments.cell_s * WARM_UP_SHARE
        load = load_of(
            cell.load * self.result["tower"][cell.mix]["images_per_s"],
            duration_s=duration_s,
            num_photos=arguments.photos,
            # Contents of one cell are new to the next: each begins with a cache that knows none of them.
            seed=secrets.randbelow(2**31),
            repeat_share=arguments.repeat_share,
            zipf=arguments.zipf,
            bursty=cell.bursty,
        )
        start_s = time.monotonic() + HEAD_START_S
        for number, client in enumerate(self.clients):
            client.send(
                "run",
                name=cell.server,
                mix=cell.mix,
                load=asdict(load),
                number=number,
                num_clients=len(self.clients),
                start_s=start_s,
                timeout_s=TIMEOUT_S,
                grace_s=GRACE_S,
            )
        sights = [self._sight_at(start_s + at_s) for at_s in (warm_s, duration_s)]
        answers = [client.answer(duration_s + GRACE_S + TIMEOUT_S) for client in self.clients]
        figures = client_figures(
            requests_of(answers), warm_s=warm_s, duration_s=duration_s, bound_ms=arguments.bound_ms
        )
        tower = self.result["tower"][cell.mix]
        record = asdict(cell) | {"duration_s": duration_s, "warm_s": warm_s} | figures
        record["tower_share"] = figures["encoded_patches_per_s"] / tower["patches_per_s"]
        record["rate"] = load.rate
        if cell.server != BASELINE:
            record |= seen(*sights)
        return record

    def _sight_at(self, at_s: float) -> Sight:
        assert self.service is not None
        time.sleep(max(0.0, at_s - time.monotonic()))
        return self.service.sight()

    # -- what is not measured --------------------------------------------------------------------------

    def _out_of_time(self, cell: Cell) -> bool:
        spent_s, limit_s = time.perf_counter() - self.begun_s, self.arguments.time_limit_s
        if spent_s < limit_s:
            return False
        self._leave_out(cell, f"{spent_s:.0f} s had passed of {limit_s:.0f}", cut_short=True)
        return True

    def _leave_out(self, cell: Cell, reason: str, *, cut_short: bool = False) -> None:
        self.result["left_out"].append(asdict(cell) | {"reason": reason, "cut_short": cut_short})

    def _max_pixels(self) -> int:
        return int(MAX_PIXELS * self.arguments.scale**2)


def seen(before: Sight, after: Sight) -> dict[str, Any]:
    return service_figures(
        before.counters,
        after.counters,
        seconds=after.at_s - before.at_s,
        cpu_s=after.cpu_s - before.cpu_s,
        loop_cpu_s=after.loop_cpu_s - before.loop_cpu_s,
    )


def limit_area(checkpoint: Path, max_pixels: int) -> None:
    """The largest area of an image after resizing, in the processor's settings, where everything that is
    measured reads it; families whose limit is another keep theirs."""
    path = checkpoint / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if "size" in settings:
        settings["size"]["longest_edge"] = max(max_pixels, settings["size"]["shortest_edge"])
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def profile_lines(path: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The event loop's functions by their own time, with milliseconds for each request of all loads."""
    if not path.exists():
        return []
    requests = max(1, sum(one["num_requests"] for one in records if one["server"] == SERVICE))
    stats: Any = pstats.Stats(str(path))
    ordered = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:60]
    return [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls_per_request": calls / requests,
            "own_ms_per_request": own_s * 1e3 / requests,
            "ms_per_request": total_s * 1e3 / requests,
        }
        for (file, line, name), (_, calls, own_s, total_s, _) in ordered
    ]


def main() -> None:
    arguments = parse_arguments((__doc__ or "").splitlines()[0])
    console = Console(width=None if sys.stdout.isatty() else 150)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ve", dir=memory if memory.is_dir() else None) as folder:
        run = Run(arguments, console, Path(folder))
        try:
            run.main()
        except (NotStarted, ProcessFailed) as error:
            sys.exit(f"{error}\nwhat there was is in {run.file.path}")
    result = run.result
    for table in serve_report.tables_of(result):
        console.print(table)
    for line in serve_report.lines_of(result):
        console.print(line)
    try:
        console.print(f"chart: {serve_report.draw(result, run.file.path.with_suffix('.png'))}")
    except (serve_report.NoMatplotlib, ValueError) as error:
        console.print(f"no chart: {error}")
    console.print(f"written to {run.file.path} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
