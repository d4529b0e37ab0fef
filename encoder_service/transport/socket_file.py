"""The broker's listening socket and its file.

Owns the path's checks, what to do about a file that is already there, permissions and the unlink. Raises
ConfigurationError with the path in it for everything that stops a start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)

MAX_PATH_BYTES = 107
"""sun_path has 108 bytes, the last of them is a zero."""
LOCK_WAIT_S = 5.0
LOCK_POLL_S = 0.02
DYING_S = 3.0
"""Seconds that a killed process may take to end: until then its sockets are listened on."""
DYING_POLL_S = 0.02


def check_path(path: str) -> None:
    """Raises ConfigurationError for a path that no client in another container could connect to."""
    if path.startswith(("\0", "@")):
        raise ConfigurationError(
            f"broker socket {path!r}: abstract sockets belong to a network namespace and have no "
            "permissions; give a path"
        )
    if not path.startswith("/"):
        raise ConfigurationError(f"broker socket {path!r}: the path must be absolute")
    if "\0" in path:
        raise ConfigurationError(f"broker socket {path!r}: a path has no zero byte")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"broker socket {path}: the path has {num_bytes} bytes, a unix socket's has at most "
            f"{MAX_PATH_BYTES}",
            found=num_bytes,
            allowed=MAX_PATH_BYTES,
        )
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ConfigurationError(f"broker socket {path}: the folder {folder} does not exist")


class ListeningSocket:
    """Bound, with its permissions set before the first client can connect, and listening."""

    def __init__(self, path: str, *, mode: int = 0o660, gid: int | None = None, backlog: int = 1024) -> None:
        check_path(path)
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._identity: tuple[int, int] | None = None
        try:
            self.socket.setblocking(False)
            with contextlib.suppress(OSError):  # said below
                stays_in_use(path)  # of one that was killed just now, before anybody else is kept waiting
            with _folder_lock(os.path.dirname(path)):
                _remove_stale(path)
                self.socket.bind(path)
                found = os.lstat(path)
                self._identity = (found.st_dev, found.st_ino)
                # Nobody connects before listen(), so nobody does before the permissions are right.
                if gid is not None:
                    os.chown(path, -1, gid)
                os.chmod(path, mode)
                self.socket.listen(backlog)
        except OSError as error:
            self.close()
            raise ConfigurationError(f"broker socket {path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def is_in_place(self) -> bool:
        """Whether the path still leads here."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def close(self) -> None:
        """Removes the file, unless another socket has taken its place. Does nothing the second time."""
        if self.is_in_place():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._identity = None  # the inode's number may be another file's from here on
        self.socket.close()


def _remove_stale(path: str) -> None:
    """Unlinks a socket that nobody listens on. Raises ConfigurationError for anything else that is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigurationError(f"broker socket {path}: a file that is no socket is in its place")
    try:
        in_use = _is_in_use(path)
    except OSError as error:
        raise ConfigurationError(
            f"broker socket {path}: cannot tell whether it is in use: {error.strerror}"
        ) from error
    if in_use:
        raise ConfigurationError(f"broker socket {path}: another process listens on it")
    log.warning("removing the socket of a broker that is gone", path=path)
    Path(path).unlink(missing_ok=True)


def stays_in_use(path: str) -> bool:
    """Whether somebody listens on this socket, and after ``DYING_S`` still does. Raises OSError where that
    cannot be asked."""
    ends_s = time.monotonic() + DYING_S
    while _is_in_use(path):
        if time.monotonic() >= ends_s:
            return True
        time.sleep(DYING_POLL_S)
    return False


def _is_in_use(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass  # its queue of connections is full: somebody listens
    return True


@contextlib.contextmanager
def _folder_lock(folder: str) -> Iterator[None]:
    """Two starts in one folder look and bind one after the other. Whoever can open the folder can hold this
    lock, so it is waited for a short while only."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ends_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_s:
                    log.warning("somebody holds the folder's lock", folder=folder, waited_s=LOCK_WAIT_S)
                    break
                time.sleep(LOCK_POLL_S)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(descriptor)
