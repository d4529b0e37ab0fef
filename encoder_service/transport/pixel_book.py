"""Segments that the broker was given: sealed memfds with pixels, until they are consumed or their owner goes.

Owns their descriptors, what may be had at a time by one connection and by all, and who may consume which.
The memory is the publisher's (its control group is charged); what is bounded here is what it can make us
hold. Written by the broker's thread, read by the event loop: thread-safe.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from encoder_service.transport.pixel_segments import PixelCounters, PixelSegment, SegmentRef, refuse

SEGMENT_ID_BYTES = 16
MAX_SEGMENTS = 1024
MAX_SEGMENTS_PER_OWNER = 64
OWNER_SHARE = 4
"""One connection may have a quarter of the bytes."""
NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class PublishRefused(Exception):
    """Why a descriptor is not taken. reason is stable."""

    def __init__(self, reason: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class _Key(NamedTuple):
    owner_id: str
    namespace: str


@dataclass(frozen=True, slots=True)
class _Held:
    key: _Key
    descriptor: int
    num_bytes: int


class SegmentBook:
    """Segments by id. An id is random, told to the publishing connection alone, and good for requests that
    name that connection, in its namespace."""

    def __init__(self, max_bytes: int, counters: PixelCounters) -> None:
        """max_bytes: of all segments together."""
        self.max_bytes = max_bytes
        self._counters = counters
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}
        self._num_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._bytes_of.total()

    # -- the broker's thread ---------------------------------------------------------------------------

    def add(self, owner_id: str, namespace: str, descriptor: int, size_bytes: int) -> bytes:
        """The new segment's id. The descriptor is the book's from here on, also when it is refused. Raises
        PublishRefused."""
        try:
            num_bytes = self._check(descriptor, size_bytes)
            with self._lock:
                self._check_room(owner_id, num_bytes)
                segment_id = secrets.token_bytes(SEGMENT_ID_BYTES)
                self._held[segment_id] = _Held(_Key(owner_id, namespace), descriptor, num_bytes)
                self._num_of[owner_id] += 1
                self._bytes_of[owner_id] += num_bytes
            self._counters.add(published=1)
        except PublishRefused as error:
            close_apart(descriptor)
            self._counters.add_refused(error.reason)
            raise
        return segment_id

    def remove(self, owner_id: str, segment_id: bytes) -> bool:
        """Whether this owner had it."""
        with self._lock:
            held = self._held.get(segment_id)
            if held is None or held.key.owner_id != owner_id:
                return False
            self._forget(segment_id)
        os.close(held.descriptor)
        return True

    def drop_owner(self, owner_id: str) -> None:
        """Its connection has ended."""
        with self._lock:
            gone = [each for each, held in self._held.items() if held.key.owner_id == owner_id]
            descriptors = [self._forget(segment_id).descriptor for segment_id in gone]
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Nothing is taken any more. Twice is once."""
        with self._lock:
            self._closed = True
            descriptors = [self._forget(segment_id).descriptor for segment_id in list(self._held)]
        for descriptor in descriptors:
            os.close(descriptor)

    # -- the event loop --------------------------------------------------------------------------------

    def attach(self, ref: SegmentRef, namespace: str) -> PixelSegment:
        """The segment: the request's alone when it ends it, a duplicate otherwise. Raises
        TransportUnavailable, alike for one that is not there and for another connection's."""
        with self._lock:
            held = self._held.get(ref.segment_id)
            if held is None or held.key != _Key(ref.owner_id, namespace):
                raise refuse(
                    self._counters,
                    "NOT_PUBLISHED",
                    f"no segment {ref.segment_id[:SEGMENT_ID_BYTES].hex()} of that connection is held in "
                    f"namespace {namespace!r}",
                )
            if ref.ends:
                self._forget(ref.segment_id)
                descriptor = held.descriptor
            else:
                try:
                    descriptor = fcntl.fcntl(held.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
                except OSError as error:
                    raise refuse(self._counters, "NOT_OPENED", f"no descriptor: {error.strerror}") from error
        return PixelSegment(descriptor, self._counters)

    # -- with the lock held ----------------------------------------------------------------------------

    def _forget(self, segment_id: bytes) -> _Held:
        held = self._held.pop(segment_id)
        owner_id = held.key.owner_id
        self._num_of[owner_id] -= 1
        self._bytes_of[owner_id] -= held.num_bytes
        if not self._num_of[owner_id]:
            del self._num_of[owner_id], self._bytes_of[owner_id]
        return held

    def _check_room(self, owner_id: str, num_bytes: int) -> None:
        if self._closed:
            raise PublishRefused("BROKER_STOPPING", "the broker is stopping", retryable=True)
        share = self.max_bytes // OWNER_SHARE
        for what, found, allowed, retryable in (
            ("the segment has {} bytes, at most {} are taken", num_bytes, share, False),
            ("this connection would have {} segments, at most {} are taken", self._num_of[owner_id] + 1,
             MAX_SEGMENTS_PER_OWNER, True),
            ("this connection would have {} bytes, at most {} are taken",
             self._bytes_of[owner_id] + num_bytes, share, True),
            ("the broker would hold {} segments, at most {} are", len(self._held) + 1, MAX_SEGMENTS, True),
            ("the broker would hold {} bytes, at most {} are", self._bytes_of.total() + num_bytes,
             self.max_bytes, True),
        ):  # fmt: skip
            if found > allowed:
                raise PublishRefused("TOO_MANY_SEGMENTS", what.format(found, allowed), retryable=retryable)

    def _check(self, descriptor: int, size_bytes: int) -> int:
        """The memfd's size. Asks for the seals first: what has none may be a file whose server does not
        answer, and nothing else is done with it here."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise PublishRefused("NOT_SEALED", "the descriptor is no memfd") from error
        if seals & NEEDED_SEALS != NEEDED_SEALS:
            raise PublishRefused(
                "NOT_SEALED",
                f"the memfd has seals {seals:#x}, {NEEDED_SEALS:#x} are needed (F_SEAL_SHRINK, F_SEAL_GROW)",
            )
        found = os.fstat(descriptor).st_size
        if found != size_bytes or not found:
            raise PublishRefused("WRONG_SIZE", f"the memfd has {found} bytes, {size_bytes} were announced")
        return found


def close_apart(descriptor: int) -> None:
    """Closes a descriptor that a stranger sent. The last close of a file may wait for whoever serves it, as
    FUSE does: only what the kernel serves from memory is closed on this thread."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        threading.Thread(target=os.close, args=(descriptor,), name="close-apart", daemon=True).start()
    else:
        os.close(descriptor)
