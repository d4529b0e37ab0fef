"""Reads one item's rows out of an arena: range checked, copied or borrowed, generation compared, given back.

Owns what makes rows from shared memory as trustworthy as rows from the stream. The same code for host and
device arenas; what differs is their mappings'. The generation is compared after the last byte was read: a
slot that has another tenant by then makes the rows stale, and they are thrown away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_adapter.errors import EncoderError, InvalidRows, ItemFailed, StaleRows
from lm_adapter.leases import LeaseRecord, LeaseReturns
from lm_adapter.transport.arenas import AttachedArena
from lm_adapter.transport.buffers import Bytes, RowsHandling
from lm_adapter.transport.device_lease import Event

if TYPE_CHECKING:
    from lm_adapter.transport.shared_transport import SharedTransport

__all__ = ["MAX_SHARED_ATTEMPTS", "TRANSPORT_UNAVAILABLE", "Reading", "Receiver", "Unreadable", "read_rows"]

MAX_SHARED_ATTEMPTS = 3
"""Of one item, before it is asked for inline."""
TRANSPORT_UNAVAILABLE = "TRANSPORT_UNAVAILABLE"
_ABORTED, _FAILED_PRECONDITION = 10, 9


class Unreadable(EncoderError):
    """These rows cannot be had in this way. stale: another lease on them may well be read."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message, reason="STALE_LEASE" if stale else TRANSPORT_UNAVAILABLE, retryable=True)
        self.stale = stale

    def as_failure(self) -> ItemFailed:
        """For a caller who allows no other way."""
        if self.stale:
            return StaleRows(self.message)
        return ItemFailed(
            self.message, reason=self.reason, status=_FAILED_PRECONDITION, retryable=self.retryable
        )


class Reading:
    """Rows whose last word is not spoken: borrowed, or copied and not yet checked. Gives its lease back when
    it is confirmed, abandoned or forgotten, once."""

    def __init__(
        self,
        arena: AttachedArena,
        record: LeaseRecord,
        returns: LeaseReturns,
        reader: int,
        event: Event | None,
    ) -> None:
        """Takes one use of the arena over. event: of the copy; None for borrowed rows, whose readers are
        waited for when the reading is confirmed."""
        self._arena = arena
        self._record = record
        self._returns = returns
        self._reader = reader if record.num_readers > 1 else None
        self._event = event
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open = True
        self._stale = False
        self._may_be_read = False
        """Whether reads have begun that nobody has waited for."""

    def confirm(self, *, waits: bool = False) -> None:
        """Waits for the reads and compares the generation. Again after success: nothing. waits: for the lease
        to be on its way back as well. Raises StaleRows, each time, when the rows are not those of the lease.
        """
        with self._lock:
            if self._open:
                self._stale = True  # until the comparison was made: a wait that broke says nothing
                try:
                    if self._event is not None:
                        self._event.synchronize()
                    else:
                        self._arena.memory.finish()
                    self._may_be_read = False
                    record = self._record
                    self._stale = not self._arena.page.unchanged(record.slot_index, record.generation)
                finally:
                    self._end(now=True, waits=waits)
        if self._stale:
            raise StaleRows(
                f"the rows of key {self._record.key.hex()} changed while they were read: lease "
                f"{self._record.lease_id.hex()} of generation {self._record.generation} is over",
                details={"key": self._record.key.hex(), "generation": self._record.generation},
            )

    def abandon(self) -> None:
        """Without a check: the rows are not used."""
        with self._lock:
            if self._open:
                self._stale = True
                self._end(now=True)

    def __del__(self) -> None:
        # Forgotten: no call is made from wherever the interpreter happens to be.
        if getattr(self, "_open", False):
            self._end(now=False)

    def _end(self, *, now: bool, waits: bool = True) -> None:
        self._open = False
        if os.getpid() == self._pid:
            if self._may_be_read:
                self._arena.memory.give_up(self._event)
            self._arena.drop()
            record = self._record
            self._returns.give_back(
                record.lease_id, self._reader, owner_id=record.owner_id, now=now, waits=waits
            )


def read_rows(
    arena: AttachedArena,
    record: LeaseRecord,
    returns: LeaseReturns,
    handling: RowsHandling,
    out: Bytes | None,
) -> tuple[Bytes, Reading | None]:
    """The rows' bytes, and what is left to confirm: None for a copy that is whole. Takes one use of the arena
    over, and the lease. Raises Unreadable, InvalidRows."""
    reading = Reading(arena, record, returns, handling.reader, None)
    try:
        _check_place(arena, record)
        if arena.page.closed:
            raise Unreadable(f"arena {record.arena_id.hex()} is closed", stale=False)
        reading._may_be_read = True
        if handling.borrow:
            return arena.memory.borrow(record.offset_bytes, record.rows_bytes), reading
        payload, reading._event = arena.memory.copy(record.offset_bytes, record.rows_bytes, out)
        reading._may_be_read = reading._event is not None
        if handling.confirm_later:
            return payload, reading
        try:
            reading.confirm(waits=True)
        except StaleRows as error:
            raise Unreadable(error.message, stale=True) from None
        return payload, None
    except BaseException:
        reading.abandon()
        raise


def _check_place(arena: AttachedArena, record: LeaseRecord) -> None:
    end_bytes = record.offset_bytes + record.rows_bytes
    if end_bytes > arena.size_bytes:
        raise InvalidRows(
            "offset_bytes",
            f"rows end at byte {end_bytes} of their arena, which has {arena.size_bytes}",
            found=end_bytes,
            expected=arena.size_bytes,
        )
    if record.slot_index >= arena.page.num_slots:
        raise InvalidRows(
            "slot_index",
            f"slot {record.slot_index} of an arena with {arena.page.num_slots} slots",
            found=record.slot_index,
            expected=arena.page.num_slots,
        )


@dataclass(frozen=True)
class Receiver:
    """How the rows of one call are taken. indices: the wire's item index to the caller's. transport: None
    for inline."""

    handling: RowsHandling
    indices: Sequence[int]
    transport: SharedTransport | None = None
    inline_allowed: bool = True
    attempt: int = 1

    def out_of(self, index: int, num_bytes: int) -> Bytes | None:
        """See ``RowsHandling.out_of``."""
        return self.handling.out_of(self.indices[index], num_bytes)

    def may_ask_again(self, *, stale: bool) -> bool:
        """Whether an item that did not come in this way is asked for once more."""
        if self.transport is None:
            return False
        return self.inline_allowed or (stale and self.attempt < MAX_SHARED_ATTEMPTS)

    def read(self, index: int, record: LeaseRecord) -> tuple[Bytes, Reading | None]:
        """Raises Unreadable, InvalidRows, ItemFailed."""
        assert self.transport is not None
        try:
            out = self.out_of(index, record.rows_bytes)
        except ItemFailed:
            self.give_back(record)
            raise
        return self.transport.read(record, self.handling, out)

    @property
    def owner_id(self) -> bytes:
        """Of this call's leases."""
        return b"" if self.transport is None else self.transport.owner_id

    def give_back(self, record: LeaseRecord) -> None:
        """A lease whose rows this reader does not read."""
        if self.transport is not None:
            self.transport.give_back(record, self.handling)

    def give_back_unheard(self, lease_id: bytes, *, own: bool) -> None:
        """A lease of this call that the other readers will never hear of, for each of them. own: and for this
        one."""
        if self.transport is None or not lease_id:
            return
        owner_id, num_readers = self.transport.owner_id, self.handling.num_readers
        for reader in range(num_readers):
            if own or reader != self.handling.reader:
                named = reader if num_readers > 1 else None
                self.transport.returns.give_back(lease_id, named, owner_id=owner_id)
