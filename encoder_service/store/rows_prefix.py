"""The rows of a clip that is being encoded, readable from the first one on as far as they have come.

Owns how far that is and who waits for more. Used from the event loop only.
"""

from __future__ import annotations

import asyncio

from encoder_service.types import EncodedItem


class RowsPrefix:
    """item: whose rows [R, W] are being filled in. num_ready: of them, from the first on. is_ended: no more
    will come, whether or not these are all. num_readers: how many read them as they come."""

    def __init__(self, item: EncodedItem) -> None:
        self.item = item
        self.num_ready = 0
        self.is_ended = False
        self.num_readers = 0
        self._more = asyncio.Event()

    def add(self, num_rows: int) -> None:
        """So many more are written."""
        self.num_ready += num_rows
        self._wake()

    def end(self) -> None:
        """The last rows came, or never will. Twice is once."""
        self.is_ended = True
        self._wake()

    async def beyond(self, num_rows: int) -> int:
        """How many are ready once that is more than ``num_rows``, or once no more will come."""
        while self.num_ready <= num_rows and not self.is_ended:
            await self._more.wait()
        return self.num_ready

    def _wake(self) -> None:
        """Everybody who waits; who waits from now on waits for the next time."""
        self._more.set()
        self._more = asyncio.Event()
