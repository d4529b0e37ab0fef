"""Names of segments that say who made them, so that what the dead leave can be told from what is in use.

``<prefix>.<boot>.<pid namespace>.<pid>.<start time>.<random>``: the first eight hexadecimal digits of the
kernel's boot id, the inode of the publisher's PID namespace, its PID there, the clock tick of its start
(/proc/PID/stat, field 22), and eight random bytes in hexadecimal. Whoever follows this is swept after;
``lm_adapter.transport.segment_names`` does, and a contract test holds the two equal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_PATTERN = re.compile(
    r"[\w.-]*\.(?P<boot>[0-9a-f]{8})\.(?P<pid_namespace>\d{1,20})\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})"
    r"\.[0-9a-f]{16}",
    re.ASCII,
)


class Publisher(NamedTuple):
    """The process that a name tells of."""

    boot: str
    pid_namespace: int
    pid: int
    start: int


def publisher_of(name: str) -> Publisher | None:
    """None for a name that does not say."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    return Publisher(match["boot"], int(match["pid_namespace"]), int(match["pid"]), int(match["start"]))


def is_orphan(name: str) -> bool:
    """Whether the name's publisher is certainly dead. One in another PID namespace cannot be judged from here
    and counts as alive."""
    publisher = publisher_of(name)
    if publisher is None:
        return False
    if publisher.boot != boot():
        return True
    if publisher.pid_namespace != pid_namespace() or publisher.pid == 0:
        return False
    try:
        os.kill(publisher.pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return False
    except PermissionError:
        pass  # it lives, or another with its number does
    found = life_of(publisher.pid)
    # Not readable (/proc may hide other users' processes): alive, for all that is known.
    return found is not None and (found.is_dead or found.start != publisher.start)


class Life(NamedTuple):
    """is_dead: ended, and its parent has not asked yet."""

    is_dead: bool
    start: int


def life_of(pid: int | str = "self") -> Life | None:
    """What the kernel tells of a process; None when it does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command, in parentheses, may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return Life(fields[0] in "ZX", int(fields[19])) if len(fields) > 19 else None


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
