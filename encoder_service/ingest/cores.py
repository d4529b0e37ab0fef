"""How many cores this process may use, and how many threads decode images and clips on them.

Owns the two places where Linux states the cores: the scheduler's affinity, and the CPU quota of the control
group (version 2), which limits a container although it sees every core of its host.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The number of usable cores, at least 1. A quota is rounded up to whole cores."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota_us, period_us = map(int, CPU_MAX.read_text().split())
        return max(1, min(num_cores, math.ceil(quota_us / period_us)))
    except (OSError, ValueError, ZeroDivisionError):  # no quota: "max 100000", or no such file
        return num_cores


def decoder_threads(num_workers: int) -> int:
    """Threads of one clip's decoder, beside num_workers threads for images."""
    return max(2, min(8, num_workers // 4))


def num_clip_workers(num_workers: int) -> int:
    """Clips that are decoded at a time: as many as their decoders' threads have workers' cores."""
    return max(1, num_workers // decoder_threads(num_workers))
