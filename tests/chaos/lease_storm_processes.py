"""Processes of a lease storm: forked from one that has imported everything, so that a restart takes as long
as a start of the product and not of Python.

Owns their namespaces, the GPU that they see, their kills and their ends. The process that forks never starts
CUDA, gRPC or a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1

ISOLATE = ("unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc")
"""A command's start that puts it in PID, IPC and mount namespaces of its own."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """A process; inside its own namespaces, where it has them, runs another, its child."""

    name: str
    pid: int

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Waits; the exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """By the strongest signal; returns when nothing of it runs any more."""
        inner = children_of(self.pid)
        for pid in (*inner, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.reap()
        ends_s = time.monotonic() + 20
        while any(_runs(pid) for pid in inner) and time.monotonic() < ends_s:
            time.sleep(0.001)


def fork(name: str, work: Callable[[], None], *, visible_device: str | None, isolated: bool) -> Child:
    """A process that does ``work`` and ends with it; it ends with this one too. visible_device: what
    CUDA_VISIBLE_DEVICES says in it."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Child(name, pid)
    code = 1
    try:
        die_with(parent)
        if visible_device is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_device
        code = _isolated(work) if isolated else _done(work)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def can_isolate() -> bool:
    """Whether this user may make namespaces; asks another process, so that this one need not be forked."""
    try:
        done = subprocess.run([*ISOLATE, "true"], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if parent and os.getppid() != parent:
        os._exit(1)


def _done(work: Callable[[], None]) -> int:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _isolated(work: Callable[[], None]) -> int:
    """In process, IPC and mount namespaces of its own, as a pod: the inner process is number 1 in there."""
    _check(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNS))
    pid = os.fork()
    if pid:
        return abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    code = 1
    try:
        die_with(0)
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
        code = _done(work)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def children_of(pid: int) -> list[int]:
    """Processes that this one started, by the numbers of this process's namespace."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
