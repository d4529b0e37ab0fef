"""The rows of one call that its caller has not read yet, and their limit.

Owns rows from the moment they are ready until they are written to the transport or the call ends.
``scheduler.admission`` limits the unread rows of all calls together. Used from the event loop only.
"""

from __future__ import annotations

import asyncio

from encoder_service.pipeline import EncodeResult
from encoder_service.scheduler.admission import UnreadBytes

# A call with this many unread bytes starts no further item until its caller has read some of them.
MAX_BYTES_PER_CALL = 64 << 20


class OutboundBudget:
    """The unread rows of one call."""

    def __init__(self, unread: UnreadBytes) -> None:
        self._unread = unread
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Waits until the call has less than MAX_BYTES_PER_CALL unread."""
        while self._num_bytes >= MAX_BYTES_PER_CALL:
            self._has_room.clear()
            await self._has_room.wait()

    def add(self, delivered: EncodeResult) -> None:
        """Counts rows that are ready, until ``remove``."""
        encoded = delivered.encoded
        self._unread.add(encoded, encoded.spec.num_bytes)
        self._num_bytes += encoded.spec.num_bytes

    def remove(self, delivered: EncodeResult) -> None:
        """Releases rows that were written or never will be. Call once for each ``add``."""
        encoded = delivered.encoded
        self._unread.remove(encoded, encoded.spec.num_bytes)
        self._num_bytes -= encoded.spec.num_bytes
        delivered.release()
        if self._num_bytes < MAX_BYTES_PER_CALL:
            self._has_room.set()
