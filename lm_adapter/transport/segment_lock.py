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
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _let_go, os.path.join(folder, name), descriptor, self._pid)

    @property
    def is_there(self) -> bool:
        """Whether this process holds it and its name still leads to it: cleaners of such folders exist."""
        return self._pid == os.getpid() and os.fstat(self._descriptor).st_nlink > 0

    def forget(self) -> None:
        """In a forked child: closes what it inherited. The lock stays the parent's."""
        if self._end.detach() is not None:
            os.close(self._descriptor)


_held: dict[tuple[str, str], _Held] = {}
_guard = threading.Lock()


def held_lock(folder: str, prefix: str) -> str:
    """The last field of names under the prefix: of a lock that this process holds in the folder, taken at the
    first call. Empty where the folder has no locks; such names are judged by their process's number alone."""
    with _guard:
        held = _held.get((folder, prefix))
        if held is None or not held.is_there:
            held = _take(folder, prefix)
            if held is None:
                return ""
            _held[folder, prefix] = held
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


def _let_go(path: str, descriptor: int, pid: int) -> None:
    """The name first: a lock that is free and still there is a dead publisher's."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(descriptor)


def _begin_in_child() -> None:
    global _guard
    _guard = threading.Lock()  # another thread of the parent may have had it
    for held in _held.values():
        held.forget()
    _held.clear()


os.register_at_fork(after_in_child=_begin_in_child)
