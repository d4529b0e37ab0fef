"""How many cores this process may use, for the default number of worker threads.

Owns the two places where Linux states it: the scheduler's affinity, and the CPU quota of the control group,
by which a container is limited although it sees every core of its host.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

# Control groups version 2, as a container sees its own; the two files of version 1.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CFS_QUOTA_US = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CFS_PERIOD_US = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def usable_cores() -> int:
    """At least 1. A quota is rounded up to whole cores."""
    quota = quota_of(read_quota())
    cores = num_scheduled()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def num_scheduled() -> int:
    """Cores in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_quota() -> str:
    """``quota period`` in microseconds, as in ``cpu.max``; empty where there is no quota."""
    try:
        if CPU_MAX.is_file():
            return CPU_MAX.read_text()
        if CFS_QUOTA_US.is_file():
            return f"{CFS_QUOTA_US.read_text().strip()} {CFS_PERIOD_US.read_text().strip()}"
    except OSError:
        pass
    return ""


def quota_of(text: str) -> float | None:
    """Cores of a ``quota period`` text; None for ``max``, -1 or anything but two numbers."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None
    return int(parts[0]) / int(parts[1])
