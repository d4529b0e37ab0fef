"""The rows that one call's caller has not read yet.

Owns how much of them there is, what waits for that, and that each is given up once. What all calls together
leave unread is ``scheduler.admission``'s. Used from the event loop only.
"""

from __future__ import annotations

import asyncio

from encoder_service.pipeline import Delivered
from encoder_service.scheduler.admission import UnreadBytes

# A call whose caller has this much to read starts no further item until some of it is read.
UNREAD_BYTES_PER_CALL = 64 << 20


class Unread:
    """The rows of one call that its caller has not read yet, as a part of what all callers have not. They
    are released when they were read, or the call is over."""

    def __init__(self, undelivered: UnreadBytes) -> None:
        self._undelivered = undelivered
        self._items: list[Delivered] = []
        self._num_bytes = 0
        self._room: asyncio.Event | None = None  # made when somebody has to wait

    async def wait_for_room(self) -> None:
        """Returns while the call has less than UNREAD_BYTES_PER_CALL to read."""
        while self._num_bytes >= UNREAD_BYTES_PER_CALL:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()

    def add(self, delivered: Delivered) -> None:
        encoded = delivered.encoded
        self._items.append(delivered)
        self._undelivered.add(encoded, encoded.spec.num_bytes)
        self._count(encoded.spec.num_bytes)

    def replace(self, delivered: Delivered, moved: Delivered) -> None:
        """The same rows elsewhere, held in place of ``delivered``; given up where the call is over."""
        if moved is delivered:
            return
        if self._remove(delivered):
            self.add(moved)
        else:
            moved.release()

    def remove(self, delivered: Delivered) -> None:
        """Read, or never to be. Twice is once."""
        self._remove(delivered)

    def _remove(self, delivered: Delivered) -> bool:
        """Whether it was there."""
        index = next((index for index, item in enumerate(self._items) if item is delivered), None)
        if index is None:
            return False
        del self._items[index]
        encoded = delivered.encoded
        self._undelivered.remove(encoded, encoded.spec.num_bytes)
        self._count(-encoded.spec.num_bytes)
        delivered.release()
        return True

    def clear(self) -> None:
        """The call is over: whatever its caller did not read is nobody's."""
        for delivered in list(self._items):
            self.remove(delivered)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._room is not None and self._num_bytes < UNREAD_BYTES_PER_CALL:
            self._room.set()
