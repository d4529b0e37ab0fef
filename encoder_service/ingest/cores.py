"""How many cores this process may keep busy, for the number of threads that decode.

Owns where Linux says it: the scheduler's affinity, and the quota of the control group, which is how a
container's limit of CPU time reaches a process that still sees every core of its host.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

# Version 2, as a container sees its own group; version 1's two files.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CFS_QUOTA_US = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CFS_PERIOD_US = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def usable_cores() -> int:
    """At least 1. A quota counts as so many cores, rounded up."""
    quota = quota_of(read_quota())
    cores = num_scheduled()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def num_scheduled() -> int:
    """Cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_quota() -> str:
    """``quota period`` in microseconds, as ``cpu.max`` has it; empty where there is none to read."""
    try:
        if CPU_MAX.is_file():
            return CPU_MAX.read_text()
        if CFS_QUOTA_US.is_file():
            return f"{CFS_QUOTA_US.read_text().strip()} {CFS_PERIOD_US.read_text().strip()}"
    except OSError:
        pass
    return ""


def quota_of(text: str) -> float | None:
    """Cores in ``quota period``; None for ``max``, -1 or anything that is not two numbers."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None
    return int(parts[0]) / int(parts[1])
