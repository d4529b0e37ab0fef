"""How the benches measure: interleaved medians by device events, ceilings of the device, result files.

Owns timing, the description of machine and software, and the rule that no result file is overwritten.
What is measured is each bench's own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "triton",
    "fa3-fwd",
    "flash-attn",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "numpy",
)
# Of one sample, and the most runs in it.
SAMPLE_MS = 20.0
MAX_IN_A_ROW = 8


def time_once(run: Callable[[], object], device: torch.device, *, in_a_row: int = 1) -> float:
    """Milliseconds of one run, the mean of ``in_a_row``: device events on CUDA, the wall clock elsewhere."""
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


def interleaved_medians(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warm_up: int,
    repeats: int,
    budget_s: float,
) -> dict[str, tuple[float, int]]:
    """Median milliseconds of each variant and the number of runs behind it. See interleaved_samples."""
    samples = interleaved_samples(variants, device, warm_up=warm_up, repeats=repeats, budget_s=budget_s)
    return {name: (statistics.median(values), len(values)) for name, values in samples.items()}


def interleaved_samples(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warm_up: int,
    repeats: int,
    budget_s: float,
) -> dict[str, list[float]]:
    """Milliseconds of a run, sample by sample, of each variant.

    A sample is one run, or several in a row where a run is short: about SAMPLE_MS, at most MAX_IN_A_ROW. So
    the host's part shows where it is longer than the device's, and not where it hides behind the run before.
    The variants take turns in a new order each round: a change of clocks or of a neighbour's load meets all
    of them, and so does what the variant before left behind (on an H200 the same variant ran several percent
    slower after heavy work than after light). Stops before ``repeats`` rounds once ``budget_s`` is spent,
    but not before three; a variant's warm-up stops after a tenth of the budget, but not before one run.
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
    """Median microseconds until ``run`` returns, with the device idle before each: what a step costs the
    host when it waits for nothing."""
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


def ceilings(device: torch.device, *, quick: bool) -> dict[str, float]:
    """What the device reaches on plain work: TFLOP/s of a large square product of random bfloat16 values
    (float32 on a CPU), GB/s of a large copy counted as bytes read plus bytes written."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    num_bytes = (4 << 30) if on_gpu else (64 << 20)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    medians = interleaved_medians(
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
        "matmul_tflops": 2 * side**3 / medians["matmul"][0] / 1e9,
        "copy_gb_per_s": 2 * num_bytes / medians["copy"][0] / 1e6,
    }


def describe_environment(
    device: torch.device, commit: str | None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Device, driver, versions and commit: what a figure means nothing without.
    packages: besides PACKAGES."""
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
        "driver": driver_version() if device.type == "cuda" else None,
        "versions": versions,
        "commit": commit or read_commit(),
        "command": command_line(sys.argv),
        "num_threads": torch.get_num_threads(),
    }


def command_line(arguments: Sequence[str]) -> list[str]:
    """The command without the folder of its results, which says nothing about the run."""
    kept, skip = [], False
    for argument in arguments:
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
    """The checked-out commit, marked where tracked files differ from it."""
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with local changes" if changed else commit


def output_of(*command: str) -> str:
    """What a command prints, or nothing where it is absent or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_result(folder: Path, bench: str, result: Mapping[str, Any]) -> Path:
    """Writes ``<bench>-<device>-<date>.json``; a second result of a day gets a number, none is replaced."""
    return ResultFile(folder, bench, result).path


class ResultFile:
    """A result's file, there from the start of the run, so that a run that is cut short leaves what it had.

    Named ``<bench>-<device>-<date>.json``; a second result of a day gets a number, none is replaced.
    """

    def __init__(self, folder: Path, bench: str, result: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", str(result["device"]).lower()).strip("-")
        stem = f"{bench}-{device}-{str(result['date'])[:10]}"
        self._result = result
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
        """What the result holds now; a reader sees the old file or the new one, never half of one."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self._result, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path)
