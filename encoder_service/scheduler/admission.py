"""Admission: what may wait for the device, by patches and by bytes.

Owns the two counters that bound the queue. Fails fast instead of letting callers pile up. Not thread-safe:
used from the event loop only.
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
