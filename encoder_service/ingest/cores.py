"""How many cores this process may use, for the default number of worker threads.

Owns the two places where Linux states it: the scheduler's affinity, and the CPU quota of the control group
(version 2), which limits a container although it sees every core of its host.
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
