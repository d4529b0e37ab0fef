"""The groups of kernels on which a run spends the device's time, from the profiler's trace of a few runs.

Owns the trace and the groups. All times are device times; host work shows only as idle
time between kernels.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measurement import synchronise

# The first match wins. Marks are parts of kernel names of the libraries and of this repository, in lower
# case.
GROUPS = (
    ("attention", ("flash", "fmha", "attend", "attention", "sdpa", "list_tiles", "varlen")),
    ("products", ("gemm", "nvjet", "xmma", "gemv", "splitk", "scaled_mm", "cublas", "_product", "matmul")),
    ("rope", ("rotate", "rotary", "rope")),
    ("norms", ("norm",)),
    ("gelu", ("gelu",)),
    ("copies", ("memcpy", "memset", "copy", "fill", "catarray")),
)
OTHER = "other"
PAUSE_S = 0.005
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True)
class DeviceSpan:
    """One kernel or copy on the device."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def profile_runs(run: Callable[[], object], device: torch.device, *, repeats: int = 5) -> dict[str, Any]:
    """The profile of one run, averaged over ``repeats``; see ``summary``."""
    run()
    synchronise(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
            synchronise(device)
            time.sleep(PAUSE_S)  # separates the runs in the trace
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return summary(device_spans(json.loads(file.read_text(encoding="utf-8"))), repeats)


def device_spans(trace: dict[str, Any]) -> list[DeviceSpan]:
    """Kernels, copies and fills of a trace, ordered by start."""
    spans = [
        DeviceSpan(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in DEVICE_CATEGORIES and event.get("ph") == "X"
    ]
    return sorted(spans, key=lambda span: span.start_us)


def summary(spans: Sequence[DeviceSpan], repeats: int) -> dict[str, Any]:
    """The profile of one run, averaged.

    span_us: from the first kernel's start to the last kernel's end; busy_us: with at least one kernel
    running; idle_share; groups, each with calls, total_us and share of the total kernel time.
    Raises ValueError for fewer kernels than runs."""
    if len(spans) < repeats:
        raise ValueError(f"the trace has {len(spans)} kernels of {repeats} runs, needs at least one each")
    runs = split_runs(spans, repeats)
    span_us = sum(max(span.end_us for span in one) - one[0].start_us for one in runs) / repeats
    busy = sum(busy_us(one) for one in runs) / repeats
    total_us = sum(span.duration_us for span in spans)
    sums: dict[str, tuple[int, float]] = {}
    for span in spans:
        calls, spent_us = sums.get(group_of(span.name), (0, 0.0))
        sums[group_of(span.name)] = calls + 1, spent_us + span.duration_us
    groups = [
        {
            "name": name,
            "calls": calls / repeats,
            "total_us": spent_us / repeats,
            "share": spent_us / total_us,
        }
        for name, (calls, spent_us) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    return {
        "repeats": repeats,
        "span_us": span_us,
        "busy_us": busy,
        "idle_share": 1 - busy / span_us if span_us else 0.0,
        "groups": groups,
    }


def split_runs(spans: Sequence[DeviceSpan], repeats: int) -> list[Sequence[DeviceSpan]]:
    """Splits the spans into runs, at the longest pauses."""
    ends = [spans[0].end_us]
    for span in spans[1:]:
        ends.append(max(ends[-1], span.end_us))
    pauses = [(spans[index].start_us - ends[index - 1], index) for index in range(1, len(spans))]
    cuts = sorted(index for _, index in sorted(pauses, reverse=True)[: repeats - 1])
    return [spans[first:last] for first, last in zip([0, *cuts], [*cuts, len(spans)], strict=True)]


def busy_us(spans: Iterable[DeviceSpan]) -> float:
    """The time during which at least one span is running."""
    busy, reached_us = 0.0, float("-inf")
    for span in spans:
        busy += max(0.0, span.end_us - max(span.start_us, reached_us))
        reached_us = max(reached_us, span.end_us)
    return busy


def group_of(name: str) -> str:
    lowered = name.lower()
    for group, marks in GROUPS:
        if any(mark in lowered for mark in marks):
            return group
    return OTHER


def line_of(title: str, profile: dict[str, Any]) -> str:
    """The profile as a line of text."""
    groups = ", ".join(f"{row['name']} {row['total_us']:.0f}" for row in profile["groups"])
    return f"{title}: {profile['span_us']:.0f} us, idle {profile['idle_share']:.1%}; {groups}"
