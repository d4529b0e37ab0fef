"""Measurement methods of the benches: interleaved samples with device events, ceilings and power of the
device, result files.

Owns timing, the description of machine and software, the options, time limit and tables of a run, and the
rule that result files are never overwritten. Each bench owns what it measures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.charts import draw_beside

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "triton",
    "fa3-fwd",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "numpy",
)
# Options that are no settings of a result.
NO_SETTINGS = ("device", "out", "commit")
# The target length of one sample, and the maximum number of runs in it.
SAMPLE_MS = 20.0
MAX_IN_A_ROW = 8
# Limits the queue of work, because graph replays are queued far faster than they run.
MAX_IN_FLIGHT = 4


def time_once(run: Callable[[], object], device: torch.device, *, in_a_row: int = 1) -> float:
    """Milliseconds of one run, the mean of ``in_a_row``. Uses device events on CUDA, else the wall clock."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(in_a_row):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / in_a_row
    begun = time.perf_counter()
    for _ in range(in_a_row):
        run()
    return (time.perf_counter() - begun) * 1e3 / in_a_row


def interleaved_samples(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warm_up: int,
    repeats: int,
    budget_s: float,
) -> dict[str, list[float]]:
    """The samples of each variant, in milliseconds per run.

    A sample is one run, or several consecutive short runs: about SAMPLE_MS, at most MAX_IN_A_ROW runs. Host
    time shows only where it is longer than device time. Each round runs the variants in a new order, so that
    changes of clocks and other load on the machine affect all of them, and so does the variant that ran
    before (on an H200 a variant ran several percent slower after heavy work than after light work). Stops
    when ``budget_s`` is spent, after at least three rounds, or after ``repeats`` rounds. A variant's warm-up
    stops after a tenth of the budget and at least one run.
    """
    in_a_row: dict[str, int] = {}
    for name, run in variants.items():
        begun = time.perf_counter()
        milliseconds = SAMPLE_MS
        for done in range(warm_up):
            if done and time.perf_counter() - begun > budget_s / 10:
                break
            synchronise(device)
            milliseconds = time_once(run, device)
        in_a_row[name] = max(1, min(MAX_IN_A_ROW, round(SAMPLE_MS / max(milliseconds, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    begun = time.perf_counter()
    for done in range(repeats):
        if done >= 3 and time.perf_counter() - begun > budget_s:
            break
        order = list(variants)
        random.Random(done).shuffle(order)
        for name in order:
            samples[name].append(time_once(variants[name], device, in_a_row=in_a_row[name]))
    return samples


def host_time_us(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median time in microseconds until ``run`` returns. The device is idle before each run."""
    samples = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        run()
        samples.append((time.perf_counter() - begun) * 1e6)
    synchronise(device)
    return statistics.median(samples)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is not less than ``share`` of all values; NaN if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def sustained(
    run: Callable[[], object], device: torch.device, *, settle_s: float, measure_s: float
) -> dict[str, Any]:
    """Runs one variant back to back. Returns milliseconds per run after the clocks have settled, and the
    device's power and SM clock during that time (None if ``nvidia-smi`` does not report them)."""
    keep_running(run, device, settle_s)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    fields = "power.draw.instant,clocks.sm,clocks_event_reasons.sw_power_cap"
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        sampler = subprocess.Popen([*command, "-lms", "50"], stdout=subprocess.PIPE, text=True)
    except OSError:
        sampler = None
    num_runs, spent_s = keep_running(run, device, measure_s)
    text = ""
    if sampler is not None:
        sampler.terminate()
        text = sampler.communicate(timeout=10)[0]
    return {"sustained_ms": spent_s * 1e3 / num_runs, "num_runs": num_runs} | power_summary(text)


def power_summary(text: str) -> dict[str, Any]:
    """Means over ``nvidia-smi`` lines of power in watts, SM clock in MHz, and whether the power limit was
    active. Skips incomplete lines."""
    samples = []
    for line in text.splitlines():
        try:
            power_w, clock_mhz, capped = (part.strip() for part in line.split(","))
            samples.append((float(power_w), float(clock_mhz), capped == "Active"))
        except ValueError:
            continue
    means: list[Any] = [statistics.fmean(column) for column in zip(*samples, strict=True)] or [None] * 3
    return dict(zip(("power_w", "sm_clock_mhz", "power_limited_share"), means, strict=True)) | {
        "num_samples": len(samples)
    }


def keep_running(run: Callable[[], object], device: torch.device, seconds: float) -> tuple[int, float]:
    """Runs for about this many seconds, at least once. Returns the number of runs and the elapsed seconds."""
    synchronise(device)
    begun = time.perf_counter()
    num_runs = 0
    pending: deque[torch.cuda.Event] = deque()
    while not num_runs or time.perf_counter() - begun < seconds:
        run()
        num_runs += 1
        if device.type == "cuda":
            pending.append(torch.cuda.Event())
            pending[-1].record()
            if len(pending) > MAX_IN_FLIGHT:
                pending.popleft().synchronize()
    synchronise(device)
    return num_runs, time.perf_counter() - begun


def ceilings(device: torch.device, *, quick: bool) -> dict[str, float]:
    """The rates that the device reaches on simple work: TFLOP/s of a large square matrix product of random
    bfloat16 values (float32 on a CPU), and GB/s of a large copy, counting bytes read and written."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    num_bytes = (4 << 30) if on_gpu else (64 << 20)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = interleaved_samples(
        {
            "matmul": lambda: torch.mm(left, right, out=product),
            "copy": lambda: target.copy_(source),
        },
        device,
        warm_up=3,
        repeats=5 if quick else 20,
        budget_s=20,
    )
    return {
        "matmul_side": float(side),
        "matmul_tflops": 2 * side**3 / statistics.median(samples["matmul"]) / 1e9,
        "copy_gb_per_s": 2 * num_bytes / statistics.median(samples["copy"]) / 1e6,
    }


def describe_environment(
    device: torch.device, commit: str | None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Device, kernel, driver, versions, commit and command for a result. packages: names to report versions
    of, in addition to PACKAGES."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        versions["cudnn"] = str(torch.backends.cudnn.version())
    for package in (*PACKAGES, *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "kernel": platform.release(),
        "driver": driver_version() if device.type == "cuda" else None,
        "versions": versions,
        "commit": commit or read_commit(),
        "command": command_line(sys.argv),
        "num_threads": torch.get_num_threads(),
    }


def command_line(arguments: Sequence[str]) -> list[str]:
    """What follows ``python``, without ``--out``, which does not affect the figures."""
    kept, skip = ["-m", f"bench.{Path(arguments[0]).stem}"], False
    for argument in arguments[1:]:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return kept


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def driver_version() -> str | None:
    lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def read_commit() -> str | None:
    """The current commit, with a mark if tracked files differ from it."""
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with local changes" if changed else commit


def output_of(*command: str) -> str:
    """The output of a command; empty if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_result(folder: Path, bench: str, result: dict[str, Any]) -> Path:
    """Writes a result as in ``ResultFile``. Returns the path."""
    return ResultFile(folder, bench, result).path


class ResultFile:
    """The file of a result. It exists from the start of the run, so that an interrupted run leaves its
    records.

    Its name is ``<bench>-<device>-<date>.json``. Further results on the same day get a number; no file is
    overwritten.
    """

    def __init__(self, folder: Path, bench: str, result: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", str(result["device"]).lower()).strip("-")
        stem = f"{bench}-{device}-{str(result['date'])[:10]}"
        self.result = result
        number = 1
        while True:
            self.path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
            try:
                self.path.open("x").close()
            except FileExistsError:
                number += 1
            else:
                break
        self.write()

    def write(self) -> None:
        """Writes the current result and renames it into place, so that readers never see a partial file."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path)


def options_of(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with the options of every bench of one device. quick: what is left of the run."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--time-limit-s", type=float, help="no record begins later")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    return parser


class TimedRun:
    """One run of a bench. Each record is written when it ends. A run that is cut short leaves a valid file,
    in which ``complete`` is false."""

    def __init__(
        self,
        bench: str,
        arguments: argparse.Namespace,
        *,
        settings: Mapping[str, Any],
        parts: Mapping[str, Any],
        packages: Sequence[str] = (),
    ) -> None:
        """arguments: of a parser of ``options_of``. settings: those that are not among them. parts: of the
        result, beside its records."""
        self.bench = bench
        self.arguments = arguments
        # Reasons and paths are no markup.
        self.console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
        self.begun_s = time.perf_counter()
        given = {name: value for name, value in vars(arguments).items() if name not in NO_SETTINGS}
        self.result: dict[str, Any] = {
            **describe_environment(arguments.device, arguments.commit, packages),
            "complete": False,
            "settings": given | dict(settings),
            **parts,
            "records": [],
            "left_out": [],
        }
        self.file = ResultFile(arguments.out, bench, self.result)

    def leave_out(self, reason: str, *, cut_short: bool = False, **case: Any) -> None:
        self.result["left_out"].append(case | {"reason": reason, "cut_short": cut_short})

    def is_out_of_time(self, *cases: Mapping[str, Any]) -> bool:
        """Whether the time limit has passed. If so, records the cases as left out."""
        spent_s, limit_s = time.perf_counter() - self.begun_s, self.arguments.time_limit_s
        if spent_s < limit_s:
            return False
        for case in cases:
            self.leave_out(f"{spent_s:.0f} s had passed of {limit_s:.0f}", cut_short=True, **case)
        return True

    def finish(self) -> None:
        cut_short = any(one["cut_short"] for one in self.result["left_out"])
        self.result["complete"] = bool(self.result["records"]) and not cut_short
        self.result["seconds"] = time.perf_counter() - self.begun_s
        self.file.write()

    def print_table(
        self, title: str, records: Iterable[Mapping[str, Any]], columns: Mapping[str, str], caption: str = ""
    ) -> None:
        """columns: the format of a cell by the column's name. Cells without a value are empty."""
        table = Table(title=title, caption=caption)
        for name in columns:
            table.add_column(name, justify="right")
        for record in records:
            table.add_row(*(formatted(cell, record) for cell in columns.values()))
        self.console.print(table)

    def print_end(self) -> None:
        """Prints what was left out, by reason, and where result and chart are."""
        cases: dict[str, list[str]] = {}
        for one in self.result["left_out"]:
            named = [str(one[name]) for name in one if name not in ("reason", "cut_short") and one[name]]
            cases.setdefault(one["reason"], []).append(" ".join(named))
        for reason, names in cases.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.console.print(f"left out: {names[0]}{more}: {reason}")
        self.console.print(draw_beside(self.bench, self.result, self.file.path))
        self.console.print(f"written to {self.file.path} after {self.result['seconds']:.0f} s")


def formatted(cell: str, record: Mapping[str, Any]) -> str:
    try:
        return cell.format_map(record)
    except (KeyError, TypeError):  # not measured
        return ""
