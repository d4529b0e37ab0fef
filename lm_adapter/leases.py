"""Leases on rows: the record that every reader of one result needs, and giving leases back.

Owns what is said of a lease, not how its rows are read: that is ``transport``'s. A lease that is not given
back expires by itself, so nothing here ever waits, retries or fails a caller.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lm_adapter.types import Grid
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["LeaseRecord", "LeaseReturns"]

MAX_RETURNS_AT_ONCE = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One item's rows and where they lie, as plain data: an engine sends it to its ranks in any way it likes,
    and each reads with ``client.read_shared(record, reader=rank)``.

    transport: ``device``, ``host``, or ``inline`` where the rows lie nowhere that others could read: those
    fetch them by key. num_readers: how many are to read; the slot is kept until the last has, or until
    expires_at_unix_ms. owner_id: whom the lease was granted to; every reader names it when it gives the lease
    back, since it has a session of its own.
    """

    key: bytes
    content_digest: bytes
    grid_thw: Grid
    num_rows: int
    width: int
    dtype: str
    num_deepstack_levels: int
    rows_bytes: int
    timestamps_s: tuple[float, ...] = ()
    chunk_grids: tuple[Grid, ...] = ()
    transport: str = "inline"
    num_readers: int = 1
    lease_id: bytes = b""
    arena_id: bytes = b""
    slot_index: int = 0
    generation: int = 0
    offset_bytes: int = 0
    expires_at_unix_ms: int = 0
    owner_id: bytes = b""


class LeaseReturns:
    """Gives leases back in the background, those of a while in one call: while one Release is on its way,
    others gather for the next. Thread-safe; a forked child gives nothing back."""

    def __init__(self, send: Callable[[pb.ReleaseRequest, Callable[[], None]], None]) -> None:
        """send(request, done): starts a Release and returns at once; done is called at its end, on any
        thread, whatever came of it. What it raises is logged."""
        self.post: Callable[[pb.ReleaseRequest], bool] = lambda _: False
        """Gives leases back in a way that is over at once; tried first. False: not possible now."""
        self.soon: Callable[[Callable[[], None]], bool] = lambda _: False
        """Has something done in a moment, on the thread that it is called on. False: to be done now."""
        self._send = send
        self._pid = os.getpid()
        self._pending: deque[tuple[bytes, int | None, bytes]] = deque()
        # Held while a Release is on its way, by no thread in particular.
        self._sending = threading.Lock()

    def give_back(
        self,
        lease_id: bytes,
        reader: int | None = None,
        *,
        owner_id: bytes = b"",
        now: bool = True,
        waits: bool = True,
    ) -> None:
        """reader: which of several; None where there is one. owner_id: the lease's. now=False: with the
        next one, for callers that must not make a call, such as a finalizer. waits=False: in a moment where
        that can be, for callers with rows in hand."""
        if not lease_id or os.getpid() != self._pid:
            return
        self._pending.append((lease_id, reader, owner_id))
        if now and (waits or not self.soon(self._pump)):
            self._pump()

    def flush(self, timeout_s: float) -> None:
        """Waits until what is pending went out, or for this long."""
        if os.getpid() != self._pid:
            return
        ends_s = time.monotonic() + timeout_s
        while True:
            self._pump()
            if not self._sending.acquire(timeout=max(0.0, ends_s - time.monotonic())):
                return
            self._sending.release()
            # What a pump left here while the lock was held above goes out with the next turn.
            if not self._pending:
                return

    def _pump(self) -> None:
        while self._pending and self._sending.acquire(blocking=False):
            request = self._next_request()
            if not request.lease_ids:
                self._sending.release()
                continue
            if self.post(request):
                self._sending.release()
                continue
            try:
                self._send(request, self._sent)
            except Exception as error:
                # The leases expire by themselves, or went with the connection.
                _log.debug("%d leases were not given back: %s", len(request.lease_ids), error)
                self._sending.release()

    def _sent(self) -> None:
        self._sending.release()
        self._pump()

    def _next_request(self) -> pb.ReleaseRequest:
        """Leases of one owner with one reader number, as many as wait in a row."""
        request = pb.ReleaseRequest()
        named: tuple[int | None, bytes] | None = None
        while self._pending and len(request.lease_ids) < MAX_RETURNS_AT_ONCE:
            lease_id, reader, owner_id = self._pending.popleft()
            if named is not None and named != (reader, owner_id):
                self._pending.appendleft((lease_id, reader, owner_id))
                break
            named = (reader, owner_id)
            request.lease_ids.append(lease_id)
        if named is not None:
            reader, request.owner_id = named
            if reader is not None:
                request.reader = reader
        return request
