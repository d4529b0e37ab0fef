"""Rows of one item while they come: a prefill begins with the first and waits where it needs more.

Owns who waits for whom. The client that fetches tells ``on_rows`` from its own thread; the engine's thread
asks ``wait`` for as many rows as the next chunk takes. What rows look like is ``types``', which ones a chunk
takes is ``splice``'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lm_adapter.errors import DeadlineExceeded
from lm_adapter.types import EncodedRows, Outcome

__all__ = ["ArrivingRows"]


class ArrivingRows:
    """Thread-safe. One thread fetches, ``arriving.run(lambda: client.encode_one(item,
    on_rows=arriving.on_rows))``; another reads."""

    def __init__(self, index: int = 0) -> None:
        """index: of the item in the client's call."""
        self._index = index
        self._changed = threading.Condition()
        self._rows: EncodedRows | None = None
        self._num_ready = 0
        self._error: Exception | None = None

    # -- the client's thread ---------------------------------------------------------------------------

    def run(self, call: Callable[[], Outcome]) -> None:
        """The call, and what became of it told to whoever waits; raises nothing that they are told."""
        try:
            self.end(call())
        except Exception as error:
            self.fail(error)

    def on_rows(self, index: int, rows: EncodedRows, num_ready: int) -> None:
        """For the client to call; word of other items is not for this object."""
        if index == self._index:
            with self._changed:
                if self._rows is None:
                    self._rows = rows
                self._num_ready = num_ready
                self._changed.notify_all()

    def end(self, outcome: Outcome) -> None:
        """What the item came to. Rows that never came in parts, such as leased ones, are all there now."""
        if not isinstance(outcome, EncodedRows):
            self.fail(outcome)
            return
        with self._changed:
            if self._rows is None:
                self._rows = outcome
            self._num_ready = outcome.num_rows
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """No more rows come. Who waits, or asks for rows that are not there, gets this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- the reader's thread ---------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Rows that are in place, from the first on."""
        return self._num_ready

    def begin(self, timeout_s: float) -> EncodedRows:
        """The item's grid, timestamps and buffer, as soon as they are known; of the buffer only the first
        ``num_ready`` rows have been written. Raises as ``wait``."""
        self.wait(0, timeout_s)
        assert self._rows is not None
        return self._rows

    def wait(self, num_rows: int, timeout_s: float = 60.0) -> None:
        """Returns when the first ``num_rows`` rows are in place. Raises what the item failed with, and
        DeadlineExceeded after this time."""
        ends_s = time.monotonic() + timeout_s
        with self._changed:
            while self._rows is None or self._num_ready < num_rows:
                if self._error is not None:
                    raise self._error
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._num_ready} rows came within {timeout_s:g} s, {num_rows} are needed"
                    )
                self._changed.wait(left_s)
