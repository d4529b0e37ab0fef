"""Names of segments that say who made them, so that what the dead leave can be told from what is in use.

``<prefix>.<boot>.<pid namespace>.<pid>.<start time>.<random>[.<lock>]``: the first eight hexadecimal digits
of the kernel's boot id, the inode of the publisher's PID namespace, its PID there, the clock tick of its
start (/proc/PID/stat, field 22), and eight random bytes in hexadecimal. A publisher whose names end with a
lock, as many random digits, holds ``<prefix>.<boot>.<pid namespace>.<pid>.<start time>.lock.<lock>`` in the
same folder under a shared ``flock`` for as long as it lives, since before its first segment: that is how
another PID namespace sees its death, where PIDs mean nothing. Whoever follows this is swept after;
``lm_adapter.transport.segment_names`` does, and a contract test holds the two equal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PATTERN = re.compile(
    r"(?P<process>[\w.-]*\.(?P<boot>[0-9a-f]{8})\.(?P<pid_namespace>\d{1,20})\.(?P<pid>\d{1,10})"
    r"\.(?P<start>\d{1,20}))\.(?:[0-9a-f]{16}(?:\.(?P<lock>[0-9a-f]{16}))?|lock\.(?P<own>[0-9a-f]{16}))",
    re.ASCII,
)
_LOCK_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Publisher(NamedTuple):
    """The process that a name tells of. lock: the name of the file that it holds, empty for none. is_lock:
    the name is that file's own."""

    boot: str
    pid_namespace: int
    pid: int
    start: int
    lock: str
    is_lock: bool


def publisher_of(name: str) -> Publisher | None:
    """None for a name that does not say."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    token = match["own"] or match["lock"]
    return Publisher(
        match["boot"],
        int(match["pid_namespace"]),
        int(match["pid"]),
        int(match["start"]),
        f"{match['process']}.lock.{token}" if token else "",
        match["own"] is not None,
    )


@contextlib.contextmanager
def judged(name: str, folder: int) -> Iterator[bool]:
    """Whether the publisher of a name in the folder, an open descriptor, is certainly dead: by its number
    where it has one here, and by the lock that it held, if any. The lock is held here until the block ends,
    so that no process that begins takes the file that is being removed. A publisher in another PID namespace
    that tells of no lock counts as alive."""
    publisher = publisher_of(name)
    if publisher is None or not publisher.lock or publisher.boot != boot():
        yield is_orphan(name)
        return
    if publisher.pid_namespace == pid_namespace() and not is_orphan(name):
        yield False
        return
    try:
        descriptor = os.open(publisher.lock, _LOCK_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        yield True  # it goes last, at a publisher's end as in a sweep
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_dead = False  # held, or being looked at by another sweep
        else:
            is_dead = True
        yield is_dead
    finally:
        # A child that was forked meanwhile has the descriptor too, and would keep the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_orphan(name: str) -> bool:
    """Whether the name's publisher is certainly dead, by its number. One in another PID namespace has none
    here and counts as alive."""
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
