"""Times the delivery of rows over every transport, each relative to its lowest possible cost, in one run.

    python -m bench.transport                        # all that this machine can; two GPUs for all of it
    python -m bench.transport --quick --device cpu   # host memory and streams alone, under half a minute

Owns the run: its options, processes, order, time budgets, records and table. transport_peers.py owns what the
processes do. bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness.children import IMAGE_MALLOC, START_S, Child, ProcessFailed
from bench.harness.pods import can_isolate
from bench.measurement import TimedRun, options_of, percentile
from bench.transport_peers import DeviceCopies, bytes_of, num_resident, timed

MIB = 1 << 20
PACKAGES = ("grpcio", "protobuf", "cuda-bindings")
# In the order of tables and charts.
TRANSPORTS = {
    "device_same_gpu": "device",
    "device_nvlink": "device",
    "host_shm": "host",
    "inline_uds": "inline",
    "inline_tcp": "inline",
}
PATHS = tuple(TRANSPORTS)
DEVICE_PATHS, HOST_PATHS = PATHS[:2], PATHS[2:]
SIZES_MIB, QUICK_SIZES_MIB = (0.4, 3.0, 12.0, 32.0, 128.0), (0.4, 3.0, 32.0)
# The size that goals refer to comes first, so that a run that is cut short has it.
FIRST_BYTES = 32 * MIB
# Calls and their floor alternate, so that other load on the machine affects both.
ROUNDS = 6
FLOOR_SHARE = 0.5
ENCODER_GPU = 0
MAX_CALLS = 1000
COLUMNS = {
    "path": "{path}",
    "MiB": "{size_mib:.3g}",
    "p50 ms": "{p50_ms:.3f}",
    "p99 ms": "{p99_ms:.3f}",
    "announced ms": "{announced_ms:.3f}",
    "floor ms": "{floor_ms:.3f}",
    "ratio": "{ratio:.2f}",
    "calls": "{num_calls}",
}


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__doc__, quick="three sizes, few calls")
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="default: all, on a CPU those without GPU")
    parser.add_argument("--sizes-mib", nargs="+", type=float, help="of one item's rows")
    parser.add_argument("--budget-s", type=float, help="of calls for each record; its floor gets half")
    parser.add_argument("--resident-mib", type=float, help="items of one size take turns over so much")
    arguments = parser.parse_args(line)
    on_gpu, quick = arguments.device.type == "cuda", arguments.quick
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu measures host memory and streams")
    arguments.paths = arguments.paths or list(PATHS if on_gpu else HOST_PATHS)
    arguments.sizes_mib = arguments.sizes_mib or list(QUICK_SIZES_MIB if quick else SIZES_MIB)
    arguments.budget_s = arguments.budget_s or (0.25 if quick else 0.8)
    arguments.resident_mib = arguments.resident_mib or (96.0 if quick else 384.0)
    arguments.time_limit_s = arguments.time_limit_s or (22.0 if quick else 110.0)
    return arguments


class Cell(NamedTuple):
    """One record to be measured."""

    path: str
    num_bytes: int


class Run(TimedRun):
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        """folder: for sockets, checkpoints and logs. Its path must be short."""
        self.folder = folder
        self.num_gpus = torch.cuda.device_count() if arguments.device.type == "cuda" else 0
        parts = {"num_gpus": self.num_gpus, "isolated": can_isolate(), "transports": {}}
        settings = {"malloc": IMAGE_MALLOC}
        super().__init__("transport", arguments, settings=settings, parts=parts, packages=PACKAGES)
        self.sizes = [bytes_of(size) for size in arguments.sizes_mib]
        self.resident_bytes = int(arguments.resident_mib * MIB)
        self.stack = ExitStack()
        self.encoders: dict[str, Child] = {}
        self.clients: dict[str, Child] = {}
        self.raw: Child | None = None
        self.raw_addresses: dict[str, str] = {}
        # The sizes that each encoder holds, and the size that the raw server holds.
        self.filled: set[tuple[str, int]] = set()
        self.raw_bytes = 0
        self.copies: tuple[tuple[int, int, int], DeviceCopies] | None = None

    def main(self) -> None:
        with self.stack:
            with self.console.status("starting encoders and clients"):
                paths = self._start()
            cells = self._cells(paths)
            for number, cell in enumerate(cells, 1):
                if self.is_out_of_time({"path": cell.path, "bytes": cell.num_bytes}):
                    continue
                with self.console.status(
                    f"{number} of {len(cells)}: {cell.path}, {cell.num_bytes / MIB:.3g} MiB"
                ):
                    try:
                        self.result["records"].append(self._measured(cell))
                    except ProcessFailed as error:
                        self.leave_out(str(error), path=cell.path, bytes=cell.num_bytes)
                self.file.write()
        self.finish()

    # -- processes -------------------------------------------------------------------------------------

    def _start(self) -> list[str]:
        """Starts all processes concurrently. Returns the paths that work, in order."""
        paths = [path for path in PATHS if path in self.arguments.paths and self._has_gpus(path)]
        total_bytes = sum(num_resident(size, self.resident_bytes) * size for size in self.sizes)
        for kind in sorted({kind_of(path) for path in paths}):
            folder = self.folder / kind
            folder.mkdir()
            encoder = self._process("encoder", ENCODER_GPU if kind == "device" else None)
            encoder.send("start", kind=kind, folder=str(folder), num_bytes=total_bytes)
            self.encoders[kind] = encoder
        for path in paths:
            self.clients[path] = self._process("client", reader_gpu(path))
        if any(TRANSPORTS[path] == "inline" for path in paths):
            self.raw = self._process("raw", None)
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
                self.result["transports"][path] = self.clients[path].ask(
                    "connect",
                    path=path,
                    transport=TRANSPORTS[path],
                    target=addresses[kind][socket_of(path)],
                    on_gpu=path in DEVICE_PATHS,
                    timeout_s=START_S,
                )["reason"]
            except ProcessFailed as error:
                self.leave_out(str(error), path=path)
                continue
            self.result["settings"]["chunk_bytes"] = addresses[kind]["chunk_bytes"]
            working.append(path)
        self.file.write()
        return working

    def _process(self, role: str, gpu: int | None) -> Child:
        return self.stack.enter_context(Child("bench.transport_peers", role, gpu=gpu))

    def _has_gpus(self, path: str) -> bool:
        """Whether the machine has the GPUs that the path needs. If not, records the path as left out."""
        needed = 1 + max(ENCODER_GPU, reader_gpu(path) or 0) if path in DEVICE_PATHS else 0
        if self.num_gpus < needed:
            self.leave_out(f"needs {needed} GPU(s), {self.num_gpus} visible", path=path)
            return False
        if path == "device_nvlink" and not torch.cuda.can_device_access_peer(reader_gpu(path), ENCODER_GPU):
            self.leave_out("the two GPUs do not reach each other's memory", path=path)
            return False
        return True

    # -- one record ------------------------------------------------------------------------------------

    def _cells(self, paths: list[str]) -> list[Cell]:
        """The cells ordered by size, so that each size is made resident once, then by path."""
        sizes = sorted(self.sizes, key=lambda size: size != FIRST_BYTES)
        return [Cell(path, num_bytes) for num_bytes in sizes for path in paths]

    def _measured(self, cell: Cell) -> dict[str, Any]:
        """Measures a cell and returns its record. Raises ProcessFailed, also if the encoder's count of
        deliveries differs from the number of calls."""
        client, encoder = self.clients[cell.path], self.encoders[kind_of(cell.path)]
        transport = TRANSPORTS[cell.path]
        copies = self._prepare(cell)
        budget_s = self.arguments.budget_s / ROUNDS
        limits = {"budget_s": budget_s, "max_calls": MAX_CALLS // ROUNDS}
        floor_limits = limits | {"budget_s": budget_s * FLOOR_SHARE}
        before = encoder.ask("deliveries")
        calls, announced, floors = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):
            if transport == "inline":
                calls += client.ask("measure", what="inline", **limits)["calls_ms"]
            else:
                calls += client.ask("measure", what="resident", **limits)["calls_ms"]
                announced += client.ask("measure", what="announced", **floor_limits)["calls_ms"]
            if copies is None:
                floors += client.ask("measure", what="floor", **floor_limits)["calls_ms"]
            else:
                floors += timed(copies.call, **floor_limits)
        check_deliveries(transport, calls, announced, before, encoder.ask("deliveries"))
        return record_of(cell, calls, floors, announced)

    def _prepare(self, cell: Cell) -> DeviceCopies | None:
        """Creates the rows and the floor for the cell's size, and warms up the caller. Returns the floor if
        this process measures it. Raises ProcessFailed."""
        path, num_bytes, kind = cell.path, cell.num_bytes, kind_of(cell.path)
        resident = {"num_bytes": num_bytes, "resident_bytes": self.resident_bytes}
        if (kind, num_bytes) not in self.filled:
            self.encoders[kind].ask("fill", **resident)
            self.filled.add((kind, num_bytes))
        floor: dict[str, Any] | None = None
        copies: DeviceCopies | None = None
        if path in DEVICE_PATHS:
            copies = self._copies(ENCODER_GPU, reader_gpu(path) or 0, num_bytes)
            timed(copies.call, budget_s=0, max_calls=ROUNDS)
        elif path == "host_shm":
            floor = {"resident_bytes": self.resident_bytes}
        else:
            assert self.raw is not None
            if self.raw_bytes != num_bytes:
                self.raw.ask("fill", **resident, chunk_bytes=self.result["settings"]["chunk_bytes"])
                self.raw_bytes = num_bytes
            floor = {"raw_target": self.raw_addresses[socket_of(path)]}
        self.clients[path].ask(
            "prepare",
            path=path,
            num_bytes=num_bytes,
            count=num_resident(num_bytes, self.resident_bytes),
            on_gpu=path in DEVICE_PATHS,
            floor=floor,
        )
        return copies

    def _copies(self, source: int, target: int, num_bytes: int) -> DeviceCopies:
        route = (source, target, num_bytes)
        if self.copies is None or self.copies[0] != route:
            self.copies = None  # frees the previous size's rows first
            self.copies = route, DeviceCopies(source, target, num_bytes, self.resident_bytes)
        return self.copies[1]


def check_deliveries(
    transport: str,
    calls: list[float],
    announced: list[float],
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    """Raises ProcessFailed unless the encoder's counts before and after show that every item came by the
    path's own transport."""
    inline, shared = (after.get(name, 0) - before.get(name, 0) for name in ("inline", transport))
    expected = len(calls) if transport == "inline" else 0
    if inline != expected or shared < len(announced):
        raise ProcessFailed(
            f"the encoder delivered {inline:g} items inline and {shared:g} by {transport};"
            f" expected {expected} and at least {len(announced)}"
        )


def record_of(cell: Cell, calls: list[float], floors: list[float], announced: list[float]) -> dict[str, Any]:
    """One record. median_ms: of ``resident`` or ``inline`` calls. announced_ms: of calls that the service
    answered with a place. floor_ms: a median. ratio: median to floor."""
    median_ms, floor_ms = statistics.median(calls), statistics.median(floors)
    record = {
        "path": cell.path,
        "bytes": cell.num_bytes,
        "size_mib": cell.num_bytes / MIB,
        "median_ms": median_ms,
        "p50_ms": median_ms,
        "p99_ms": percentile(calls, 0.99),
        "min_ms": min(calls),
        "floor_ms": floor_ms,
        "floor_p99_ms": percentile(floors, 0.99),
        "ratio": median_ms / floor_ms,
        "num_calls": len(calls),
    }
    if announced:
        record["announced_ms"] = statistics.median(announced)
        record["announced_p99_ms"] = percentile(announced, 0.99)
    return record


def kind_of(path: str) -> str:
    """The kind of memory in which the encoder of a path keeps its rows."""
    return "device" if path in DEVICE_PATHS else "host"


def socket_of(path: str) -> str:
    return "tcp" if path == "inline_tcp" else "uds"


def reader_gpu(path: str) -> int | None:
    """The GPU of a path's client, None for host memory."""
    return {"device_same_gpu": ENCODER_GPU, "device_nvlink": ENCODER_GPU + 1}.get(path)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="ve-") as folder:
        run = Run(arguments, Path(folder))
        run.main()
    result = run.result
    where = "own PID, IPC and mount namespaces" if result["isolated"] else "the same namespaces"
    run.print_table(
        f"Delivery of rows on {result['device']}",
        sorted(result["records"], key=lambda one: (PATHS.index(one["path"]), one["bytes"])),
        COLUMNS,
        f"one call, from its start to checked rows in the caller's own memory; processes in {where}",
    )
    run.print_end()
    if not result["records"]:
        sys.exit("nothing could be measured")


if __name__ == "__main__":
    main()
