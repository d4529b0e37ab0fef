"""Admission: what may wait for the device, by patches and by bytes.

Owns the counters that bound the queue, and the one of rows that callers have not read yet. Fails fast
instead of letting callers pile up. Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

from encoder_service.errors import QueueFull

RETRY_AFTER_MS = 200


class Permit:
    """The right of one item to wait; grows once its patches are known, given back exactly once."""

    def __init__(self, admission: Admission, num_bytes: int) -> None:
        self._admission = admission
        self.num_bytes = num_bytes
        self.num_patches = 0
        self._released = False

    def add_patches(self, num_patches: int) -> None:
        """Takes room for the item's patches. Raises QueueFull; the bytes stay held until ``release``."""
        self._admission._take_patches(num_patches)
        self.num_patches += num_patches

    def release(self) -> None:
        """Gives everything back; a second call does nothing."""
        if not self._released:
            self._released = True
            self._admission._give_back(self.num_patches, self.num_bytes)


class Undelivered:
    """Rows that are encoded and that some caller has not read yet: what slow readers keep in memory beside
    the store. However many callers wait for the same rows, they count once.

    max_bytes: from here on no new encode starts. What was admitted before still ends.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_readers: dict[int, int] = {}

    def add(self, rows: object, num_bytes: int) -> None:
        """One more caller waits to read ``rows``; it holds them until ``remove``."""
        readers = self._num_readers.get(id(rows), 0)
        self._num_readers[id(rows)] = readers + 1
        if not readers:
            self.num_bytes += num_bytes

    def remove(self, rows: object, num_bytes: int) -> None:
        """A caller has read ``rows``, or has left."""
        self._num_readers[id(rows)] -= 1
        if not self._num_readers[id(rows)]:
            del self._num_readers[id(rows)]
            self.num_bytes -= num_bytes

    def check_room(self) -> None:
        """Raises QueueFull with both numbers while callers leave too much unread."""
        if self.num_bytes >= self.max_bytes:
            raise QueueFull(
                f"{self.num_bytes} bytes of rows wait to be read, at most {self.max_bytes} may",
                retry_after_ms=RETRY_AFTER_MS,
                undelivered_bytes=self.num_bytes,
                max_bytes=self.max_bytes,
            )


class Admission:
    """Bounds on admitted, unfinished work."""

    def __init__(self, max_patches: int, max_bytes: int) -> None:
        self.max_patches = max_patches
        self.max_bytes = max_bytes
        self.num_patches = 0
        self.num_bytes = 0

    def acquire(self, num_bytes: int) -> Permit:
        """A permit for an item whose content holds ``num_bytes``. Raises QueueFull with both numbers."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise QueueFull(
                f"queue holds {self.num_bytes} content bytes of {self.max_bytes}, the item needs {num_bytes}",
                retry_after_ms=RETRY_AFTER_MS,
                held_bytes=self.num_bytes,
                needed_bytes=num_bytes,
                max_bytes=self.max_bytes,
            )
        self.num_bytes += num_bytes
        return Permit(self, num_bytes)

    def _take_patches(self, num_patches: int) -> None:
        if self.num_patches + num_patches > self.max_patches:
            raise QueueFull(
                f"queue holds {self.num_patches} patches of {self.max_patches}, the item needs {num_patches}",
                retry_after_ms=RETRY_AFTER_MS,
                held_patches=self.num_patches,
                needed_patches=num_patches,
                max_patches=self.max_patches,
            )
        self.num_patches += num_patches

    def _give_back(self, num_patches: int, num_bytes: int) -> None:
        self.num_patches -= num_patches
        self.num_bytes -= num_bytes
        assert self.num_patches >= 0
        assert self.num_bytes >= 0
