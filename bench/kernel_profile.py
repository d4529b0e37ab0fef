"""The groups of kernels on which a run spends the device's time, by torch's profiler.

Owns the groups. All times are device times; host work shows only as idle time between kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.measurement import synchronise, time_once

# The first match wins. Marks are parts of kernel names of the libraries and of this repository, in lower
# case.
GROUPS = {
    "attention": ("flash", "fmha", "attend", "attention", "sdpa", "list_tiles", "varlen"),
    "products": ("gemm", "nvjet", "xmma", "gemv", "splitk", "scaled_mm", "cublas", "_product", "matmul"),
    "rope": ("rotate", "rotary", "rope"),
    "norms": ("norm",),
    "gelu": ("gelu",),
    "copies": ("memcpy", "memset", "copy", "fill", "catarray"),
    "other": ("",),
}


def profile_runs(run: Callable[[], object], device: torch.device, *, repeats: int = 5) -> dict[str, Any]:
    """The profile of one run, averaged over ``repeats``.

    span_us: from its start to its end, by events on the device; busy_us: the sum of its kernels' times;
    idle_share; groups, each with calls, total_us and share of busy_us. Raises ValueError for no kernels."""
    run()
    synchronise(device)
    span_us = 1e3 * sum(time_once(run, device) for _ in range(repeats)) / repeats
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
            synchronise(device)
    sums: dict[str, tuple[float, float]] = {}
    for kernel in profiler.key_averages():
        if kernel.device_type.name == "CUDA":
            name = group_of(kernel.key)
            calls, spent_us = sums.get(name, (0.0, 0.0))
            sums[name] = calls + kernel.count / repeats, spent_us + kernel.self_device_time_total / repeats
    if not sums:
        raise ValueError("the profiler has seen no kernels")
    busy_us = sum(spent_us for _, spent_us in sums.values())
    return {
        "repeats": repeats,
        "span_us": span_us,
        "busy_us": busy_us,
        "idle_share": max(0.0, 1 - busy_us / span_us),
        "groups": [
            {"name": name, "calls": calls, "total_us": spent_us, "share": spent_us / busy_us}
            for name, (calls, spent_us) in sorted(sums.items(), key=lambda one: -one[1][1])
        ],
    }


def group_of(name: str) -> str:
    return next(group for group, marks in GROUPS.items() if any(mark in name.lower() for mark in marks))


def line_of(title: str, profile: dict[str, Any]) -> str:
    """The profile as a line of text."""
    groups = ", ".join(f"{row['name']} {row['total_us']:.0f}" for row in profile["groups"])
    return f"{title}: {profile['span_us']:.0f} us, idle {profile['idle_share']:.1%}; {groups}"
