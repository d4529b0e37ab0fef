"""Listening sockets: one on a TCP address, and the unix socket that a process left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)

DYING_S = 3.0
"""Time that a killed process may take to end. Its sockets are in use until then."""
POLL_S = 0.02


def listen_tcp(address: str, backlog: int = 1) -> socket.socket:
    """A TCP socket that listens on host:port, of a name on its first address. backlog: connections that wait
    to be accepted. Raises ConfigurationError, whose details have the ``errno`` by its name."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with contextlib.ExitStack() as undo:
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            listening = undo.enter_context(socket.socket(family, kind))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(backlog)
        except OSError as error:
            reason = error.strerror or str(error)
            code = errno.errorcode.get(error.errno or 0, "")
            raise ConfigurationError(f"cannot listen on {address}: {reason}", errno=code) from None
        undo.pop_all()
    return listening


def remove_dead_socket(path: str) -> None:
    """Unlinks a socket without a listener. Waits up to DYING_S for a process that listens. Raises
    ConfigurationError if it still listens then, if the path is not a socket, if the folder is missing, and if
    this user may not use the socket."""
    where, folder = f"cannot listen on unix:{path}", os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{where}: the folder {folder} does not exist")
    if not os.path.lexists(path):
        return
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigurationError(f"{where}: the path is not a socket")
        ends_s = time.monotonic() + DYING_S
        while is_in_use(path):
            if time.monotonic() >= ends_s:
                raise ConfigurationError(f"{where}: another process listens there")
            time.sleep(POLL_S)
        log.warning("removing the socket of a process that is gone", path=path)
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{where}: {error.strerror or error}") from None


def is_in_use(path: str) -> bool:
    """Whether a process listens on this socket. Raises OSError if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass  # the listener's queue is full
        return True
