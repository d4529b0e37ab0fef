"""Checks of bookkeeping in steps, so that whoever has a loop to serve makes them a few at a time.

Owns what such a check is. What has to hold is said where it is kept up; when a check is made, and that
nothing changes between its steps, is its caller's (``transport.idle_check``).
"""

from __future__ import annotations

from collections.abc import Iterator


class Checked:
    """Something with invariants."""

    def integrity_steps(self) -> Iterator[None]:
        """A check in steps of a few microseconds, and of one for each thing that is kept. Raises
        AssertionError where something is wrong, and anything at all where it changed in between."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """All steps at once. Raises AssertionError."""
        for _ in self.integrity_steps():
            pass
