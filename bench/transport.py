"""Times the delivery of rows over every transport, each against the least that it could cost, in one run.

    python bench/transport.py                        # all that this machine can; two GPUs for all of it
    python bench/transport.py --quick --device cpu   # host memory and streams alone, under half a minute
    python bench/transport_report.py RESULT.json     # the picture of a result, again

Owns the run: its processes, its order, its budgets and the result file. What an encoder and a client do is
theirs (transport_encoder.py, transport_client.py), as is what a floor is (transport_floors.py);
bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transport_report
from measurement import ResultFile, describe_environment
from rich.console import Console
from transport_cases import (
    DEVICE_PATHS,
    MIB,
    OTHER_WAYS,
    PATHS,
    TRANSPORTS,
    Timed,
    bytes_of,
    num_resident,
    timed,
)
from transport_floors import DeviceCopies
from transport_options import parse_arguments
from transport_processes import IMAGE_MALLOC, START_S, Process, ProcessFailed, can_isolate, settled

PACKAGES = ("grpcio", "protobuf", "cuda-bindings")
# Calls and their floor take turns, so often that what else the machine does meets both.
ROUNDS = 6
# Of a record whose goal is a ratio of two times that both scatter, streams of large rows: so much more.
RATIO_BUDGET = 2.0
FLOOR_SHARE = 0.5
COPY_SHARE = 0.25
# Of each of the other ways to rows that are resident.
OTHER_SHARE = 0.25
DEVICE_EVENTS = 50
ENCODER_GPU = 0


class Cell(NamedTuple):
    """One record to be: a path, a size, a number of callers at once."""

    path: str
    num_bytes: int
    concurrency: int


@dataclass
class Samples:
    """Milliseconds of every call, and the seconds that all of them took together."""

    calls_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def add(self, found: Timed) -> None:
        self.calls_ms += found.calls_ms
        self.wall_s += found.wall_s


class Run:
    """One run: what was asked for, and the result as it grows. Each record is written at once, so that a run
    that is cut short leaves a valid file, marked by ``complete`` being false."""

    def __init__(self, arguments: argparse.Namespace, console: Console, folder: Path) -> None:
        """folder: for sockets, checkpoints and logs; a short path."""
        self.arguments = arguments
        self.console = console
        self.folder = folder
        self.begun_s = time.perf_counter()
        self.num_gpus = torch.cuda.device_count() if arguments.device.type == "cuda" else 0
        self.sizes = [bytes_of(size) for size in arguments.sizes_mib]
        self.resident_bytes = int(arguments.resident_mib * MIB)
        self.malloc = {} if arguments.default_malloc else IMAGE_MALLOC
        environment = describe_environment(arguments.device, arguments.commit, PACKAGES)
        environment["command"][0] = "bench/transport.py"
        settings = {
            name: value for name, value in vars(arguments).items() if name not in ("device", "out", "commit")
        }
        self.result: dict[str, Any] = environment | {
            "complete": False,
            "num_gpus": self.num_gpus,
            "isolated": can_isolate(),
            "settings": settings | {"malloc": self.malloc},
            "transports": {},
            "resident": {},
            "records": [],
            "left_out": [],
        }
        self.file = ResultFile(arguments.out, "transport", self.result)
        self.stack = ExitStack()
        self.encoders: dict[str, Process] = {}
        self.clients: dict[str, Process] = {}
        self.raw: Process | None = None
        self.raw_addresses: dict[str, str] = {}
        # What is there: of every encoder the sizes it was filled with, of the raw server its only one.
        self.filled: set[tuple[str, int]] = set()
        self.raw_bytes = 0
        self.copies: tuple[tuple[int, int, int], DeviceCopies] | None = None

    def main(self) -> None:
        with self.stack:
            with self.console.status("starting encoders and clients"):
                paths = self._start()
            cells = self._cells(paths)
            for number, cell in enumerate(cells, 1):
                if self._out_of_time(cell):
                    continue
                with self.console.status(f"{number} of {len(cells)}: {cell.path} {size_text(cell)}"):
                    try:
                        self.result["records"].append(self._measured(cell))
                    except ProcessFailed as error:
                        self._leave_out(cell.path, str(error), cell)
                self.file.write()
        cut_short = any(one["cut_short"] for one in self.result["left_out"])
        self.result["complete"] = bool(self.result["records"]) and not cut_short
        self.result["seconds"] = time.perf_counter() - self.begun_s
        self.file.write()

    # -- processes -------------------------------------------------------------------------------------

    def _start(self) -> list[str]:
        """Starts everything side by side; the paths that work, in order."""
        paths = [path for path in PATHS if path in self.arguments.paths and self._has_gpus(path)]
        total_bytes = sum(num_resident(size, self.resident_bytes) * size for size in self.sizes)
        for kind in sorted({kind_of(path) for path in paths}):
            folder = self.folder / kind
            folder.mkdir()
            encoder = self._process("encoder", kind, ENCODER_GPU if kind == "device" else None)
            encoder.send("start", kind=kind, folder=str(folder), num_bytes=total_bytes)
            self.encoders[kind] = encoder
        for path in paths:
            self.clients[path] = self._process("client", path, reader_gpu(path))
        if any(TRANSPORTS[path] == "inline" for path in paths):
            self.raw = self._process("floors", "raw", None)
            self.raw.send("start", folder=str(self.folder))
            self.raw_addresses = self.raw.answer(START_S)
        addresses: dict[str, dict[str, Any]] = {}
        failed: dict[str, ProcessFailed] = {}
        for kind, encoder in self.encoders.items():
            try:
                addresses[kind] = encoder.answer(START_S)
            except ProcessFailed as error:
                failed[kind] = error
        working = []
        for path in paths:
            kind = kind_of(path)
            try:
                if kind in failed:
                    raise failed[kind]
                choice = self.clients[path].ask(
                    "connect",
                    path=path,
                    transport=TRANSPORTS[path],
                    target=addresses[kind]["tcp" if path == "inline_tcp" else "uds"],
                    on_gpu=path in DEVICE_PATHS,
                    timeout_s=START_S,
                )
            except ProcessFailed as error:
                self._leave_out(path, str(error))
                continue
            self.result["transports"][path] = choice["reason"]
            self.result["resident"][path] = choice["resident"]
            self.result["settings"]["chunk_bytes"] = addresses[kind]["chunk_bytes"]
            working.append(path)
        self.file.write()
        return working

    def _process(self, role: str, name: str, gpu: int | None) -> Process:
        log = self.folder / f"{role}-{name}.log"
        process = Process(f"transport_{role}.py", log, gpu=gpu, malloc=self.malloc)
        return self.stack.enter_context(process)

    def _has_gpus(self, path: str) -> bool:
        """Whether the machine has the path's GPUs; a path is left out otherwise, with the reason."""
        needed = 1 + max(ENCODER_GPU, reader_gpu(path) or 0) if path in DEVICE_PATHS else 0
        if self.num_gpus < needed:
            self._leave_out(path, f"needs {needed} GPU(s), {self.num_gpus} visible")
            return False
        if path == "device_nvlink" and not torch.cuda.can_device_access_peer(reader_gpu(path), ENCODER_GPU):
            self._leave_out(path, "the two GPUs do not reach each other's memory")
            return False
        return True

    # -- one record ------------------------------------------------------------------------------------

    def _cells(self, paths: list[str]) -> list[Cell]:
        """By size, so that each is made resident once, then by path. The size that has goals goes first: a
        run that is out of time has it."""
        several = {bytes_of(size) for size in self.arguments.concurrent_sizes_mib}
        return [
            Cell(path, num_bytes, concurrency)
            for num_bytes in sorted(self.sizes, key=lambda size: size != transport_report.GOAL_BYTES)
            for path in paths
            for concurrency in self.arguments.concurrency
            if concurrency == 1 or num_bytes in several
        ]

    def _measured(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell. Raises ProcessFailed."""
        client, encoder = self.clients[cell.path], self.encoders[kind_of(cell.path)]
        copies = self._prepare(cell)
        is_ratio = (cell.num_bytes, cell.concurrency) == (transport_report.GOAL_BYTES, 1)
        is_ratio &= cell.path in transport_report.GOAL_RATIOS
        budget_s = self.arguments.budget_s * (RATIO_BUDGET if is_ratio else 1.0) / ROUNDS
        max_calls = max(1, self.arguments.max_calls // ROUNDS)
        is_shared = TRANSPORTS[cell.path] != "inline"
        others = {way: Samples() for way in OTHER_WAYS if is_shared and cell.concurrency == 1}
        before = settled(encoder) if is_shared else {}
        calls, floors = Samples(), Samples()
        for _ in range(ROUNDS):
            calls.add(ask_timed(client, "call", budget_s, max_calls))
            for way, samples in others.items():
                samples.add(ask_timed(client, way, budget_s * OTHER_SHARE, max_calls))
            if copies is None:
                floors.add(ask_timed(client, "floor", budget_s * FLOOR_SHARE, max_calls))
            else:
                floors.add(
                    timed(
                        copies.calls(cell.concurrency), budget_s=budget_s * FLOOR_SHARE, max_calls=max_calls
                    )
                )
        record = record_of(cell, calls, floors)
        if is_shared:
            num_read, num_leased = len(calls.calls_ms), sum(len(other.calls_ms) for other in others.values())
            expected = before | {"read": before["read"] + num_read, "shared": before["shared"] + num_leased}
            if (after := settled(encoder)) != expected:
                raise ProcessFailed(
                    f"{num_read} items were to be read by the directory and {num_leased} by lease: {before} "
                    f"before, {after} after"
                )
        for way, samples in others.items():
            record[f"{way}_ms"] = statistics.median(samples.calls_ms)
            record[f"{way}_p99_ms"] = percentile(samples.calls_ms, 0.99)
            record[f"{way}_min_ms"] = min(samples.calls_ms)
        if is_shared and cell.concurrency == 1:
            copied = client.ask("measure_copy", budget_s=budget_s * COPY_SHARE, max_calls=max_calls)
            record["copy_ms"] = statistics.median(copied["calls_ms"])
        if copies is not None and cell.concurrency == 1:
            record["floor_device_ms"] = statistics.median(copies.device_ms(DEVICE_EVENTS))
        return record

    def _prepare(self, cell: Cell) -> DeviceCopies | None:
        """Rows and floors of the cell's size are there, callers and buffers warm; the floor where it is
        measured in this process. Raises ProcessFailed."""
        path, num_bytes, kind = cell.path, cell.num_bytes, kind_of(cell.path)
        resident = {"num_bytes": num_bytes, "resident_bytes": self.resident_bytes}
        if (kind, num_bytes) not in self.filled:
            self.encoders[kind].ask("fill", **resident)
            self.filled.add((kind, num_bytes))
        count = num_resident(num_bytes, self.resident_bytes)
        floor: dict[str, Any] | None = None
        copies: DeviceCopies | None = None
        if path in DEVICE_PATHS:
            copies = self._copies(ENCODER_GPU, reader_gpu(path) or 0, num_bytes)
            timed(copies.calls(1), budget_s=0, max_calls=ROUNDS)
        elif path == "host_shm":
            floor = {"resident_bytes": self.resident_bytes}
        else:
            assert self.raw is not None
            if self.raw_bytes != num_bytes:
                self.raw.ask("fill", **resident, chunk_bytes=self.result["settings"]["chunk_bytes"])
                self.raw_bytes = num_bytes
            floor = {
                "raw_target": self.raw_addresses["tcp" if path == "inline_tcp" else "uds"],
                "count": count,
            }
        self.clients[path].ask(
            "prepare",
            path=path,
            num_bytes=num_bytes,
            count=count,
            concurrency=cell.concurrency,
            on_gpu=path in DEVICE_PATHS,
            floor=floor,
        )
        return copies

    def _copies(self, source: int, target: int, num_bytes: int) -> DeviceCopies:
        place = (source, target, num_bytes)
        if self.copies is None or self.copies[0] != place:
            self.copies = None  # before others of the same size are made
            self.copies = place, DeviceCopies(source, target, num_bytes, self.resident_bytes)
        return self.copies[1]

    # -- what is not measured --------------------------------------------------------------------------

    def _out_of_time(self, cell: Cell) -> bool:
        spent_s, limit_s = time.perf_counter() - self.begun_s, self.arguments.time_limit_s
        if spent_s < limit_s:
            return False
        self._leave_out(cell.path, f"{spent_s:.0f} s had passed of {limit_s:.0f}", cell, cut_short=True)
        return True

    def _leave_out(
        self, path: str, reason: str, cell: Cell | None = None, *, cut_short: bool = False
    ) -> None:
        place = {} if cell is None else {"bytes": cell.num_bytes, "concurrency": cell.concurrency}
        self.result["left_out"].append({"path": path, **place, "reason": reason, "cut_short": cut_short})


def ask_timed(client: Process, what: str, budget_s: float, max_calls: int) -> Timed:
    """Raises ProcessFailed."""
    return Timed(**client.ask("measure", what=what, budget_s=budget_s, max_calls=max_calls))


def record_of(cell: Cell, calls: Samples, floors: Samples) -> dict[str, Any]:
    """One record of the result. floor_ms: the median of the floor; of several callers at once the mean, since
    threads that take turns in long slices make the median of short copies that of an undisturbed one. ratio:
    of median to floor, of several callers of the floor's rate to theirs."""
    median_ms = statistics.median(calls.calls_ms)
    rate, floor_rate = gib_per_s(cell, calls), gib_per_s(cell, floors)
    if cell.concurrency == 1:
        floor_ms = statistics.median(floors.calls_ms)
        ratio = median_ms / floor_ms
    else:
        floor_ms = cell.concurrency * floors.wall_s * 1e3 / len(floors.calls_ms)
        ratio = floor_rate / rate
    return {
        "path": cell.path,
        "bytes": cell.num_bytes,
        "median_ms": median_ms,
        "p99_ms": percentile(calls.calls_ms, 0.99),
        "min_ms": min(calls.calls_ms),
        "floor_ms": floor_ms,
        "concurrency": cell.concurrency,
        "ratio": ratio,
        "gib_per_s": rate,
        "floor_gib_per_s": floor_rate,
        "floor_p99_ms": percentile(floors.calls_ms, 0.99),
        "num_calls": len(calls.calls_ms),
    }


def gib_per_s(cell: Cell, samples: Samples) -> float:
    return cell.num_bytes * len(samples.calls_ms) / samples.wall_s / (1 << 30)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def kind_of(path: str) -> str:
    """Where the encoder of a path keeps its rows."""
    return "device" if path in DEVICE_PATHS else "host"


def reader_gpu(path: str) -> int | None:
    """The GPU of a path's client."""
    return {"device_same_gpu": ENCODER_GPU, "device_nvlink": ENCODER_GPU + 1}.get(path)


def size_text(cell: Cell) -> str:
    return f"{cell.num_bytes / MIB:.3g} MiB, {cell.concurrency} at once"


def main() -> None:
    arguments = parse_arguments((__doc__ or "").splitlines()[0])
    console = Console(width=None if sys.stdout.isatty() else 132)
    with tempfile.TemporaryDirectory(prefix="ve-") as folder:
        run = Run(arguments, console, Path(folder))
        run.main()
    result = run.result
    console.print(transport_report.table_of(result))
    for line in transport_report.left_out_lines(result["left_out"]):
        console.print(line)
    try:
        console.print(f"chart: {transport_report.draw(result, run.file.path.with_suffix('.png'))}")
    except (transport_report.NoMatplotlib, ValueError) as error:
        console.print(f"no chart: {error}")
    console.print(f"written to {run.file.path} after {result['seconds']:.0f} s")
    if not result["records"]:
        sys.exit("nothing could be measured")


if __name__ == "__main__":
    main()
