"""When rows come inline because the server keeps refusing them in any other way, and for how long.

Owns the counting and the pauses. A refused item costs a second call, so a few in a row end in a pause; what
comes after the pause is a trial, whose first refusal begins a longer one. No clock of its own, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RefusalBackoff"]


@dataclass
class RefusalBackoff:
    """max_refusals: calls in a row that begin the first pause. turn: counts the pauses; a call that began
    before the last one says nothing about what came after."""

    max_refusals: int = 3
    first_pause_s: float = 5.0
    max_pause_s: float = 300.0
    turn: int = 0
    num_refused: int = 0
    _pause_s: float = 0.0
    _ends_at_s: float = 0.0

    def refused(self, turn: int, now_s: float) -> float | None:
        """A call of this turn was refused: the pause that begins now, in seconds, or None."""
        if turn != self.turn:
            return None
        self.num_refused += 1
        if self.num_refused < self.max_refusals and not self._pause_s:
            return None
        self._pause_s = min(2 * self._pause_s, self.max_pause_s) or self.first_pause_s
        self._ends_at_s = now_s + self._pause_s
        self.turn += 1
        return self._pause_s

    def why(self, name: str, refusal: str) -> str:
        """What a client is told of the pause."""
        return (
            f"rows by {name} were refused {self.num_refused} times in a row, the next probe is "
            f"{self._pause_s:g} s after the last: {refusal}"
        )

    def worked(self, turn: int) -> None:
        """Rows of a call of this turn were read."""
        if turn == self.turn:
            self.forget()

    @property
    def is_calm(self) -> bool:
        """Whether nothing was refused lately: ``worked`` would change nothing."""
        return not self.num_refused and not self._pause_s

    def forget(self) -> None:
        """What was refused was refused by another server, or to another session. Begins a new turn."""
        self.turn += 1 if self.num_refused else 0
        self.num_refused, self._pause_s, self._ends_at_s = 0, 0.0, 0.0

    def paused(self, now_s: float) -> bool:
        return self._pause_s > 0 and now_s < self._ends_at_s
