"""Which rows a client has read without asking, gathered until it tells the encoder.

Owns the counts between two messages. Noting a read is all that a reader waits for; when a message goes out
is ``broker_link``'s. What is not told when the connection ends is not told at all: only figures and the order
of use hang on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["Uses"]

MAX_NOTED = 1 << 16
"""Reads that wait to be told; those before them are forgotten."""
_KINDS = {"host": pb.ARENA_KIND_HOST, "device": pb.ARENA_KIND_DEVICE}


class Uses:
    """Reads of one kind of memory. ``note`` and ``note_stale`` on any thread, without a lock: a deque's ends
    are safe to use from several. ``take`` on one at a time."""

    def __init__(self, kind: str, wake: Callable[[], None]) -> None:
        """wake: called after the first read since ``take`` found none; must be cheap."""
        self._kind = _KINDS[kind]
        self._wake = wake
        self._keys: deque[bytes] = deque(maxlen=MAX_NOTED)
        self._stale: deque[None] = deque(maxlen=MAX_NOTED)
        self._asleep = True

    def note(self, key: bytes) -> None:
        """Rows of this key were read."""
        self._keys.append(key)
        if self._asleep:
            self._asleep = False
            self._wake()

    def note_stale(self) -> None:
        """Rows were copied in vain."""
        self._stale.append(None)
        if self._asleep:
            self._asleep = False
            self._wake()

    def take(self, max_uses: int) -> list[pb.BrokerUsed]:
        """What came since the last time, in messages of at most max_uses keys. None: the next read wakes."""
        if not self._keys and not self._stale:
            self._asleep = True
            if not self._keys and not self._stale:  # a read in between did not wake
                return []
        num_stale = len(self._stale)
        for _ in range(num_stale):
            self._stale.popleft()
        num_reads: dict[bytes, int] = {}
        for _ in range(len(self._keys)):
            key = self._keys.popleft()
            # In order of the last read: what was read last is the most recently used.
            num_reads[key] = num_reads.pop(key, 0) + 1
        uses = [pb.BrokerUse(key=key, num_reads=count) for key, count in num_reads.items()]
        messages = [
            pb.BrokerUsed(kind=self._kind, uses=uses[start : start + max_uses])
            for start in range(0, max(len(uses), 1), max_uses)
        ]
        messages[-1].num_stale = num_stale
        return messages
