"""Descriptors that come with a client's requests, until the request takes them that they came with.

Owns received descriptors and the rule that each has its request: on a stream socket the kernel ends a read
after the bytes that descriptors came with, so that they arrive in the order of their requests. Room is given
for one at a time; the kernel closes what is more.
"""

from __future__ import annotations

import array
import socket
from collections import deque

from encoder_service.transport.pixel_book import close_apart

MAX_WAITING = 8
LOST = -1
"""Stands for a descriptor that this process had no room for."""
_ROOM_BYTES = socket.CMSG_LEN(array.array("i").itemsize)


class UnaskedDescriptors(Exception):
    """The client sent descriptors that belong to no request: its connection ends."""


class DescriptorInbox:
    """Of one connection."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def receive(self, connection: socket.socket, max_bytes: int) -> bytes:
        """Reads once, as ``recv`` does; keeps what descriptor came. Raises OSError, UnaskedDescriptors."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, ancillary, received_flags, _ = connection.recvmsg(max_bytes, _ROOM_BYTES, flags)
        found: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                found.extend(numbers)
        was_cut = bool(received_flags & socket.MSG_CTRUNC)
        self._waiting.extend(found)
        if was_cut and not found:
            self._waiting.append(LOST)
        if (was_cut and found) or len(self._waiting) > MAX_WAITING:
            raise UnaskedDescriptors("more descriptors than requests for them")
        return data

    def take(self) -> int | None:
        """The oldest, the caller's to close; LOST for one that did not arrive; None when there is none."""
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        while self._waiting:
            descriptor = self._waiting.popleft()
            if descriptor != LOST:
                close_apart(descriptor)
