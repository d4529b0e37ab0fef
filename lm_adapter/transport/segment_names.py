"""Names of shared memory segments that say who made them, and the sweep of what dead publishers left.

``<prefix>.<boot>.<pid namespace>.<pid>.<start time>.<random>[.<lock>]``: the first eight hexadecimal digits
of the kernel's boot id, the inode of the publisher's PID namespace, its PID there, the clock tick of its
start (/proc/PID/stat, field 22), and eight random bytes in hexadecimal. The lock names a file of the same
folder that the publisher holds while it lives (``segment_lock``), by which its death is seen where its PID
means nothing. The service sweeps by the same rule (``encoder_service.transport.pixel_names``); a contract
test holds the two equal.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_lock_name", "is_orphan", "judged", "new_lock_name", "new_name", "sweep"]

_log = logging.getLogger(__name__)

_PATTERN = re.compile(
    r"(?P<process>[\w.-]*\.(?P<boot>[0-9a-f]{8})\.(?P<pid_namespace>\d{1,20})\.(?P<pid>\d{1,10})"
    r"\.(?P<start>\d{1,20}))\.(?:[0-9a-f]{16}(?:\.(?P<lock>[0-9a-f]{16}))?|lock\.(?P<own>[0-9a-f]{16}))",
    re.ASCII,
)
_LOCK_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def new_name(prefix: str, lock: str = "") -> str:
    """A name that nobody had, of this process. lock: the last field of the file that it holds, if any."""
    name = f"{_process(prefix)}.{secrets.token_hex(8)}"
    return f"{name}.{lock}" if lock else name


def new_lock_name(prefix: str) -> str:
    """A name for a file that this process is to hold."""
    return f"{_process(prefix)}.lock.{secrets.token_hex(8)}"


@contextlib.contextmanager
def judged(name: str, folder: int) -> Iterator[bool]:
    """Whether the publisher of a name in the folder, an open descriptor, is certainly dead: by its number
    where it has one here, and by the lock that it held, if any. The lock is held here until the block ends,
    so that no process that begins takes the file that is being removed. A publisher in another PID namespace
    that tells of no lock counts as alive."""
    match = _PATTERN.fullmatch(name)
    token = match and (match["own"] or match["lock"])
    if match is None or not token or match["boot"] != _boot():
        yield is_orphan(name)
        return
    if int(match["pid_namespace"]) == _pid_namespace() and not is_orphan(name):
        yield False
        return
    try:
        descriptor = os.open(f"{match['process']}.lock.{token}", _LOCK_FLAGS, dir_fd=folder)
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
    here and counts as alive, as does a name that does not say."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return False
    if match["boot"] != _boot():
        return True
    pid = int(match["pid"])
    if int(match["pid_namespace"]) != _pid_namespace() or pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return False
    except PermissionError:
        pass  # it lives, or another with its number does
    found = _life_of(str(pid))
    # Not readable (/proc may hide other users' processes): alive, for all that is known.
    return found is not None and (found[0] or found[1] != int(match["start"]))


def sweep(folder: str, prefix: str) -> int:
    """Unlinks this user's segments under the prefix whose publishers are dead; how many."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        names = [name for name in os.listdir(descriptor) if name.startswith(prefix)]
        num_swept = 0
        # Locks last: without its lock a name says that its publisher is dead.
        for is_lock, name in sorted((is_lock_name(name), name) for name in names):
            with judged(name, descriptor) as is_dead:
                if is_dead and _sweep_one(name, descriptor) and not is_lock:
                    num_swept += 1
        return num_swept
    finally:
        os.close(descriptor)


def is_lock_name(name: str) -> bool:
    match = _PATTERN.fullmatch(name)
    return match is not None and match["own"] is not None


def _sweep_one(name: str, folder: int) -> bool:
    """Whether this sweep removed it."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        _log.debug("segment %s of a dead publisher stays: %s", name, error.strerror)
        return False
    _log.info("segment %s of a dead publisher was swept", name)
    return True


def _process(prefix: str) -> str:
    _, start = _life_of("self") or (False, 0)
    return f"{prefix}.{_boot()}.{_pid_namespace()}.{os.getpid()}.{start}"


def _life_of(pid: str) -> tuple[bool, int] | None:
    """Whether a process has ended without its parent's asking, and when it started; None when the kernel does
    not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command, in parentheses, may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return (fields[0] in "ZX", int(fields[19])) if len(fields) > 19 else None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
