"""Batched reports of rows that were read from shared memory (``Touch``). Callers do not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence

from lm_adapter.errors import EncoderError

REPORT_INTERVAL_S = 0.1
MAX_REPORTED_ROWS = 256


class ReadReports:
    """Collects reads and reports them every REPORT_INTERVAL_S, or once there are MAX_REPORTED_ROWS."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Sequence[tuple[bytes, int]], int], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._send = send
        self._lock = threading.Lock()
        self._rows: list[tuple[bytes, int]] = []
        self._num_lost = 0
        self._is_scheduled = False
        self._is_closed = False
        self._sending: set[asyncio.Task[None]] = set()

    def note(self, key: bytes, generation: int, *, is_lost: bool) -> None:
        """Adds a read. is_lost: whether the copy failed because the slot had changed. Thread-safe."""
        with self._lock:
            if is_lost:
                self._num_lost += 1
            else:
                self._rows.append((key, generation))
            is_full = len(self._rows) == MAX_REPORTED_ROWS
            is_first, self._is_scheduled = not self._is_scheduled, True
            if self._is_closed or self._loop.is_closed():
                return
            if is_full:
                self._loop.call_soon_threadsafe(self._flush)
            elif is_first:
                self._loop.call_soon_threadsafe(self._loop.call_later, REPORT_INTERVAL_S, self._flush)

    def close(self) -> None:
        """Stops reporting and drops unreported reads. Must run on the loop."""
        with self._lock:
            self._is_closed = True
        for task in self._sending:
            task.cancel()

    def _flush(self) -> None:
        with self._lock:
            rows, num_lost = self._rows, self._num_lost
            self._rows, self._num_lost, self._is_scheduled = [], 0, False
        if (rows or num_lost) and not self._is_closed:
            for start in range(0, max(1, len(rows)), MAX_REPORTED_ROWS):
                portion = rows[start : start + MAX_REPORTED_ROWS]
                task = self._loop.create_task(self._report(portion, num_lost if start == 0 else 0))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _report(self, rows: Sequence[tuple[bytes, int]], num_lost: int) -> None:
        # A report is only a hint for eviction, so a failed report is not repeated.
        with contextlib.suppress(EncoderError):
            await self._send(rows, num_lost)
