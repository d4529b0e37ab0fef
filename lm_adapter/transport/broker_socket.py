"""The client's end of the broker's socket: connect, send and receive within a time, not across a fork.

Owns the calls that wait, each with its end on the monotonic clock, and which sockets a forked child has to
close. What is said over a socket is ``broker_link``'s.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections.abc import Sequence

from lm_adapter.transport.broker_errors import BrokerError, BrokerRefused, BrokerUnavailable
from lm_adapter.transport.broker_frames import ReceivedReply, ReplyReader

__all__ = ["MAX_PATH_BYTES", "close", "connect", "receive_reply", "send_all"]

MAX_PATH_BYTES = 107

# Every socket of this process, also those whose handshake is under way.
_sockets: dict[int, socket.socket] = {}


def connect(path: str, ends_s: float) -> socket.socket:
    """Raises BrokerUnavailable, BrokerRefused."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise BrokerRefused(
            f"{path}: the path has {num_bytes} bytes, a unix socket's has at most {MAX_PATH_BYTES}",
            reason="PATH_TOO_LONG",
        )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _sockets[id(connection)] = connection
    try:
        # While the broker's queue of connections is full, connect waits; with a timeout it does not forever.
        connection.settimeout(max(0.001, ends_s - time.monotonic()))
        _connect_when_there_is_room(connection, path, ends_s)
        connection.setblocking(True)
    except OSError as error:
        close(connection)
        raise _connect_error(path, error) from error
    except BaseException:
        close(connection)
        raise
    return connection


def _connect_when_there_is_room(connection: socket.socket, path: str, ends_s: float) -> None:
    """A socket with a timeout is a non-blocking one to the kernel: a full queue is EAGAIN at once."""
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.01)
        else:
            return


def _connect_error(path: str, error: OSError) -> BrokerError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return BrokerRefused(f"{path}: {error.strerror}", reason="PERMISSION_DENIED")
    reason = {errno.ENOENT: "NO_SOCKET", errno.ECONNREFUSED: "NOT_LISTENING", errno.EAGAIN: "TIMEOUT"}
    found = "TIMEOUT" if isinstance(error, TimeoutError) else reason.get(error.errno or 0, "CONNECTION_LOST")
    return BrokerUnavailable(f"{path}: {error.strerror or error}", reason=found)


def send_all(connection: socket.socket, frame: bytes, ends_s: float, descriptors: Sequence[int] = ()) -> None:
    """The descriptors go with the first byte. Raises OSError, or BrokerUnavailable when the broker takes
    nothing until the end of the time."""
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
    rest = memoryview(frame)
    while rest:
        try:
            rest = rest[connection.sendmsg([rest], rights if descriptors else [], flags) :]
            descriptors = ()
        except BlockingIOError:
            _wait(connection, select.POLLOUT, ends_s, "the broker takes no requests")


def receive_reply(connection: socket.socket, reader: ReplyReader, ends_s: float) -> ReceivedReply | None:
    """The first reply; None at the end of the stream. Raises OSError, BrokerUnavailable, BrokerViolation."""
    while (reply := reader.next_reply()) is None:
        try:
            if not reader.receive(connection):
                return None
        except BlockingIOError:
            _wait(connection, select.POLLIN, ends_s, "the broker does not answer")
    return reply


def _wait(connection: socket.socket, event: int, ends_s: float, complaint: str) -> None:
    poll = select.poll()
    poll.register(connection, event)
    if not poll.poll(max(0.0, ends_s - time.monotonic()) * 1000):
        raise BrokerUnavailable(complaint, reason="TIMEOUT")


def close(connection: socket.socket) -> None:
    """Closes a socket that ``connect`` made."""
    connection.close()
    _sockets.pop(id(connection), None)


def _close_all_in_child() -> None:
    """A child's copy of the socket would keep the connection, and its leases, beyond the parent's end."""
    for connection in list(_sockets.values()):
        connection.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_all_in_child)
