"""Log lines on their way out, so that nobody who logs waits for whoever reads.

Owns a thread that writes, a bounded queue in front of it, and the count of lines that were lost: those that
found the queue full because nobody takes them (a pipe that is not read, a stopped terminal), and those that
could not be written (a full disk, a pipe whose reader is gone). What a line says is ``logs``'s.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

MAX_WAITING_BYTES = 4 << 20
RETRY_S = 0.5
"""The longest between attempts to write to a pipe that is full and does not block."""
PAUSE_S = 0.01
"""The shortest: not every system means by "writable" that there is room for a line."""


class LineWriter:
    """Lines to one file descriptor. Thread-safe."""

    def __init__(
        self,
        descriptor: int,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        write: Callable[[int, memoryview], int] = os.write,
        on_lost: Callable[[int], None] = lambda _lost: None,
    ) -> None:
        """on_lost: told, once a line could be written again, how many were lost so far."""
        self.lost: Counter[str] = Counter()
        self._descriptor, self._write, self._on_lost = descriptor, write, on_lost
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_torn = self._is_closed = False
        self._told = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log-lines", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Takes the line, or loses it; either at once."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if self._is_closed:
                self.lost["closed"] += 1
            elif self._waiting_bytes + len(data) > self._max_waiting_bytes:
                self.lost["full"] += 1
            else:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was taken is written, or lost, or for this long; whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flushes and ends the thread; it is left behind where it cannot be ended in time. False then."""
        ends_s = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (data := self._next()) is not None:
            is_written = self._write_whole(data)
            with self._changed:
                self._is_writing = False
                self._waiting_bytes -= len(data)
                if not is_written:
                    self.lost["failed"] += 1
                total = self.lost.total()
                tells = is_written and total != self._told
                if tells:
                    self._told = total
                self._changed.notify_all()
            if tells:
                self._on_lost(total)

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._is_writing = True
            return self._waiting.popleft()

    def _write_or_wait(self, data: memoryview) -> int | None:
        """Bytes that were taken; None where there was no room and may be some now, 0 where there will be
        none. Raises OSError and ValueError, of the wait too."""
        try:
            return self._write(self._descriptor, data)
        except BlockingIOError:
            if self._is_closed:
                return 0
            select.select([], [self._descriptor], [], RETRY_S)
            time.sleep(PAUSE_S)
            return None

    def _write_whole(self, data: bytes) -> bool:
        """What was left of a line that failed in its middle is ended before the next."""
        rest = memoryview(b"\n" + data if self._is_torn else data)
        started = len(rest)
        while rest:
            try:
                num_written = self._write_or_wait(rest)
            except (OSError, ValueError):
                num_written = 0
            if num_written == 0:  # tried again at once, a descriptor that takes nothing would take a core
                self._is_torn = self._is_torn or len(rest) < started
                return False
            rest = rest[num_written or 0 :]
        self._is_torn = False
        return True
