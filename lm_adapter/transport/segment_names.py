"""Names of shared memory segments that say who made them, and the sweep of what dead publishers left.

``<prefix>.<boot>.<pid namespace>.<pid>.<start time>.<random>``: the first eight hexadecimal digits of the
kernel's boot id, the inode of the publisher's PID namespace, its PID there, the clock tick of its start
(/proc/PID/stat, field 22), and eight random bytes in hexadecimal. The service sweeps by the same rule
(``encoder_service.transport.pixel_names``); a contract test holds the two equal.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from pathlib import Path

__all__ = ["is_orphan", "new_name", "sweep"]

_log = logging.getLogger(__name__)

_PATTERN = re.compile(
    r"[\w.-]*\.(?P<boot>[0-9a-f]{8})\.(?P<pid_namespace>\d{1,20})\.(?P<pid>\d{1,10})\.(?P<start>\d{1,20})"
    r"\.[0-9a-f]{16}",
    re.ASCII,
)


def new_name(prefix: str) -> str:
    """A name that nobody had, of this process."""
    _, start = _life_of("self") or (False, 0)
    return f"{prefix}.{_boot()}.{_pid_namespace()}.{os.getpid()}.{start}.{secrets.token_hex(8)}"


def is_orphan(name: str) -> bool:
    """Whether the name's publisher is certainly dead. One in another PID namespace cannot be judged from here
    and counts as alive, as does a name that does not say."""
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
    num_swept = 0
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    for name in names:
        if not (name.startswith(prefix) and is_orphan(name)):
            continue
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                continue
            os.unlink(path)
        except OSError as error:
            _log.debug("segment %s of a dead publisher stays: %s", name, error.strerror)
        else:
            num_swept += 1
            _log.info("segment %s of a dead publisher was swept", name)
    return num_swept


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
