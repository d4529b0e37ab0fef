"""The file that a publisher of named segments holds while it lives.

One per process, folder and prefix, under a shared ``flock`` since before the first segment: the kernel lets
go of it with the process, however that ends, and sweeps in other PID namespaces see that
(``segment_names``). Owns the file: it is removed at the interpreter's end, behind the segments, which
finalizers end in the reverse order of their making. A forked child lets go of what it inherited, so that its
parent's death is seen, and takes a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import weakref

from lm_adapter.transport import segment_names

__all__ = ["held_lock"]

_log = logging.getLogger(__name__)
_MODE = 0o600
_MAX_TRIES = 8


class _Held:
    """A file under its lock."""

    def __init__(self, folder: str, name: str, descriptor: int) -> None:
        self.token = name.rpartition(".")[2]
        self._descriptor = descriptor
        self._file = _identity(descriptor)
        self._pid = os.getpid()
        path = os.path.join(folder, name)
        self._end = weakref.finalize(self, _let_go, path, descriptor, self._file, self._pid)

    def renew(self) -> bool:
        """Tells cleaners of such folders, which go by a file's last change, that it is in use. Whether this
        process holds it and its name still leads to it."""
        if self._pid != os.getpid() or _identity(self._descriptor) != self._file:
            return False
        os.utime(self._descriptor)
        return os.fstat(self._descriptor).st_nlink > 0

    def forget(self) -> None:
        """In a forked child: closes what it inherited. The lock stays the parent's."""
        if self._end.detach() is not None:
            _close(self._descriptor, self._file)


_held: dict[tuple[str, str], _Held] = {}
_guard = threading.RLock()
"""Of a kind that a finalizer or a signal handler which publishes finds open in its own thread."""


def held_lock(folder: str, prefix: str) -> str:
    """The last field of names under the prefix: of a lock that this process holds in the folder, taken at the
    first call. Empty where the folder has no locks; such names are judged by their process's number alone."""
    with _guard:
        held = _held.get((folder, prefix))
        if held is None or not held.renew():
            made = _take(folder, prefix)
            meanwhile = _held.get((folder, prefix))
            if meanwhile is not None and meanwhile is not held:
                held = meanwhile  # by a signal handler or a finalizer, in the midst of this; made goes again
            elif made is None:
                return ""
            else:
                held = _held[folder, prefix] = made
        return held.token


def _take(folder: str, prefix: str) -> _Held | None:
    """Again where a sweep came between a file's making and its lock: it looks at the file for a moment, or
    has removed it."""
    for _ in range(_MAX_TRIES):
        name = segment_names.new_lock_name(prefix)
        path = os.path.join(folder, name)
        descriptor = -1
        try:
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE
            )
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0:
                return _Held(folder, name, descriptor)
        except BlockingIOError:
            pass
        except OSError as error:
            _log.info("segments in %s are published without a lock: %s", folder, error.strerror)
            _discard(path, descriptor)
            return None
        _discard(path, descriptor)
    _log.info("segments in %s are published without a lock: %d were taken away", folder, _MAX_TRIES)
    return None


def _discard(path: str, descriptor: int) -> None:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _let_go(path: str, descriptor: int, file: tuple[int, int] | None, pid: int) -> None:
    """The name first: a lock that is free and still there is a dead publisher's. In another process than its
    own, of a fork that Python was not told of, the name stays."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _close(descriptor, file)


def _close(descriptor: int, file: tuple[int, int] | None) -> None:
    """Unless something else closed it: its number may be another file's by now."""
    if _identity(descriptor) == file:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Device and inode; None where nothing is open."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _begin_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for held in _held.values():
        held.forget()
    _held.clear()


# No other thread is at a file of which the child would know nothing.
os.register_at_fork(
    before=lambda: _guard.acquire(),
    after_in_parent=lambda: _guard.release(),
    after_in_child=_begin_in_child,
)
