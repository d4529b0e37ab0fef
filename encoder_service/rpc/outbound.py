"""The rows of one call that its caller has not read yet, and the bound on them.

Owns them from the moment they are ready until they were written to the transport or the call ends. What all
calls together may leave unread is ``scheduler.admission``'s. Used from the event loop only.
"""

from __future__ import annotations

import asyncio

from encoder_service.pipeline import EncodeResult
from encoder_service.scheduler.admission import UnreadBytes

# A call whose caller has this much to read starts no further item until it has read some of it.
MAX_BYTES_PER_CALL = 64 << 20


class OutboundBudget:
    """One call's."""

    def __init__(self, unread: UnreadBytes) -> None:
        self._unread = unread
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Returns while the call has less than MAX_BYTES_PER_CALL to read."""
        while self._num_bytes >= MAX_BYTES_PER_CALL:
            self._has_room.clear()
            await self._has_room.wait()

    def add(self, delivered: EncodeResult) -> None:
        """Rows are ready: they count until ``remove``."""
        encoded = delivered.encoded
        self._unread.add(encoded, encoded.spec.num_bytes)
        self._num_bytes += encoded.spec.num_bytes

    def remove(self, delivered: EncodeResult) -> None:
        """The rows were written, or will not be: releases them. Once for each ``add``."""
        encoded = delivered.encoded
        self._unread.remove(encoded, encoded.spec.num_bytes)
        self._num_bytes -= encoded.spec.num_bytes
        delivered.release()
        if self._num_bytes < MAX_BYTES_PER_CALL:
            self._has_room.set()
