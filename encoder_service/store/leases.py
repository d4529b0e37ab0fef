"""Leases: the right to read a slot until a time, given to whoever asked for the item.

Owns who may read what and until when. A lease is one holder of its slot (``arena.Arena.hold``), from grant
until its last reader has released it, its time is over, or its owner's connection is gone; the slot itself is
freed when nobody holds it, the store's entry included. Time comes from an injected clock. Not thread-safe:
used from the event loop only.

A lease that was given back leaves nobody reading. One that expired or whose owner vanished may still be read
by a process that has not noticed, so its slot gets a new generation at once and the late copy is found stale.
Where other leases on the slot are alive, that waits for the last of them: they hold the rows in place, so a
late copy is whole and right until then.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from encoder_service.errors import InternalError, InvalidRequest, Overloaded, StaleLease, UnknownLease
from encoder_service.store.arena import Slot
from encoder_service.store.integrity import Checked

LEASE_ID_BYTES = 16
MAX_READERS = 256
# Leases that ended are remembered, so that a late release is told from one that was never granted.
MAX_REMEMBERED = 8192


class LeasedArena(Protocol):
    """What leases need of ``arena.Arena``."""

    @property
    def closed(self) -> bool: ...
    def hold(self, slot: Slot) -> None: ...
    def drop(self, slot: Slot) -> bool: ...
    def published(self, slot: Slot) -> bool: ...
    def generation(self, slot: Slot) -> int: ...
    def num_holders(self, slot: Slot) -> int: ...
    def revoke(self, slot: Slot) -> int: ...


@dataclass(frozen=True)
class Lease:
    """num_readers: how many are to release it. expires_at_s, last_s: on the table's clock; no renewal goes
    beyond the latter."""

    lease_id: bytes
    arena: LeasedArena
    slot: Slot
    generation: int
    owner: Hashable
    num_readers: int
    expires_at_s: float
    last_s: float


@dataclass
class LeaseCounters:
    """granted: leases. released: given back by all readers. expired: out of time. revoked: their owner was
    gone. refused: not granted, the owner had too many. generations_revoked: new generations for slots that
    stayed."""

    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0
    revoked: int = 0
    refused: int = 0
    generations_revoked: int = 0


@dataclass
class _Grant:
    lease: Lease
    waiting: set[int]  # readers that have not released


@dataclass
class _SlotLeases:
    """Live leases on one slot; suspect: one that ended may still be read."""

    num_live: int = 0
    suspect: bool = False


@dataclass
class LeaseTable(Checked):
    """Every live lease, over all arenas.

    clock: seconds, monotonic. max_ttl_s bounds what a grant or renewal may ask for; max_age_s a lease's whole
    life, so that nobody pins a slot for ever by renewing; max_per_owner the leases of one connection. new_id:
    LEASE_ID_BYTES that nobody can guess.
    """

    clock: Callable[[], float]
    max_ttl_s: float
    max_per_owner: int
    new_id: Callable[[], bytes] = lambda: secrets.token_bytes(LEASE_ID_BYTES)
    max_age_s: float = math.inf
    counters: LeaseCounters = field(default_factory=LeaseCounters)
    _grants: dict[bytes, _Grant] = field(default_factory=dict)
    _owners: dict[Hashable, set[bytes]] = field(default_factory=dict)
    _slots: dict[Slot, _SlotLeases] = field(default_factory=dict)
    _expiries: list[tuple[float, bytes]] = field(default_factory=list)
    _ended: OrderedDict[bytes, str] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Live leases."""
        return len(self._grants)

    @property
    def num_slots(self) -> int:
        """Slots under lease."""
        return len(self._slots)

    @property
    def leased_bytes(self) -> int:
        """Of the slots under lease, each once."""
        return sum(slot.num_bytes for slot in self._slots)

    def num_live(self, slot: Slot) -> int:
        """Live leases on a slot."""
        leases = self._slots.get(slot)
        return leases.num_live if leases else 0

    def next_expiry_s(self) -> float | None:
        """When ``expire`` has work next, at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def grant(
        self, arena: LeasedArena, slot: Slot, owner: Hashable, *, ttl_s: float, num_readers: int = 1
    ) -> Lease:
        """A lease on published rows; ttl_s beyond max_ttl_s or max_age_s is cut to it.

        Raises InvalidRequest for a time or number of readers out of bounds, Overloaded when the owner has
        max_per_owner leases, InternalError for rows that are not readable.
        """
        self.expire()
        ttl_s = self._checked_ttl(ttl_s)
        if not 1 <= num_readers <= MAX_READERS:
            raise InvalidRequest(
                f"a lease for {num_readers} readers was asked for, 1 to {MAX_READERS} are possible",
                found=num_readers,
                allowed=MAX_READERS,
            )
        held = self._owners.get(owner, ())
        if len(held) >= self.max_per_owner:
            self.counters.refused += 1
            raise Overloaded(
                f"the connection has {len(held)} leases, {self.max_per_owner} are allowed; release some",
                found=len(held),
                allowed=self.max_per_owner,
            )
        if not arena.published(slot):
            raise InternalError(f"slot {slot.index} has no readable rows to lease", slot=slot.index)
        lease_id = self.new_id()
        while lease_id in self._grants or lease_id in self._ended:
            lease_id = self.new_id()
        arena.hold(slot)
        now_s = self.clock()
        last_s = now_s + self.max_age_s
        expires_at_s = min(now_s + ttl_s, last_s)
        lease = Lease(lease_id, arena, slot, arena.generation(slot), owner, num_readers, expires_at_s, last_s)
        self._grants[lease_id] = _Grant(lease, set(range(num_readers)))
        self._owners.setdefault(owner, set()).add(lease_id)
        self._slots.setdefault(slot, _SlotLeases()).num_live += 1
        self._schedule(lease)
        self.counters.granted += 1
        return lease

    def get(self, lease_id: bytes) -> Lease:
        """The live lease. Raises StaleLease when it ended, UnknownLease when it never was."""
        self.expire()
        return self._find(lease_id).lease

    def renew(self, lease_id: bytes, ttl_s: float, owner: Hashable | None = None) -> Lease:
        """The lease with at least ttl_s from now, or as much as its age leaves; never less time than it had.
        owner: see ``release``. Raises InvalidRequest, StaleLease when it ended, UnknownLease when it never
        was."""
        self.expire()
        ttl_s = self._checked_ttl(ttl_s)
        grant = self._find(lease_id)
        _check_owner(grant.lease, owner)
        expires_at_s = min(self.clock() + ttl_s, grant.lease.last_s)
        self.counters.renewed += 1
        if expires_at_s > grant.lease.expires_at_s:
            grant.lease = replace(grant.lease, expires_at_s=expires_at_s)
            self._schedule(grant.lease)
        return grant.lease

    def release(self, lease_id: bytes, reader: int | None = None, owner: Hashable | None = None) -> bool:
        """One reader is done; the last one ends the lease. Whether this released anything: again for the
        same reader, or for a lease that ended, it does not.

        reader: which of the lease's readers, so that a repeated release counts once; None is any that has
        not released. owner: whose lease the caller takes it for; None is whoever's it is. Raises
        UnknownLease, for another owner's lease too, and InvalidRequest for a reader that it does not have.
        """
        self.expire()
        grant = self._grants.get(lease_id)
        if grant is None:
            if lease_id in self._ended:
                return False
            raise _unknown(lease_id)
        _check_owner(grant.lease, owner)
        if reader is None:
            grant.waiting.pop()
        elif not 0 <= reader < grant.lease.num_readers:
            raise InvalidRequest(
                f"reader {reader} released a lease of {grant.lease.num_readers} readers",
                found=reader,
                allowed=grant.lease.num_readers - 1,
            )
        elif reader in grant.waiting:
            grant.waiting.remove(reader)
        else:
            return False
        if not grant.waiting:
            self._end(lease_id, "released", suspect=False)
            self.counters.released += 1
        return True

    def take_back(self, lease_id: bytes) -> None:
        """A lease that nobody was told of: all of its readers are done. Nothing for one that ended."""
        if lease_id in self._grants:
            self._end(lease_id, "it was taken back", suspect=False)
            self.counters.released += 1

    def release_all(self, owner: Hashable) -> int:
        """The owner's connection is gone, and with it every lease of it; how many."""
        lease_ids = list(self._owners.get(owner, ()))
        for lease_id in lease_ids:
            self._end(lease_id, "its connection closed", suspect=True)
        self.counters.revoked += len(lease_ids)
        return len(lease_ids)

    def expire(self) -> int:
        """Ends every lease whose time is over; how many. Every other call does this first."""
        now, num_expired = self.clock(), 0
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            grant = self._grants.get(lease_id)
            if grant is not None and grant.lease.expires_at_s <= now:
                self._end(lease_id, "it expired", suspect=True)
                num_expired += 1
        self.counters.expired += num_expired
        return num_expired

    def integrity_steps(self) -> Iterator[None]:
        """Leases, owners and slots agree, every lease holds its slot, and no live lease is stale."""
        scheduled = set()
        for expiry in self._expiries:
            scheduled.add(expiry)
            yield
        by_slot: dict[Slot, int] = {}
        for lease_id, grant in self._grants.items():
            lease = grant.lease
            by_slot[lease.slot] = by_slot.get(lease.slot, 0) + 1
            assert lease.lease_id == lease_id
            assert grant.waiting, "a lease that every reader released is alive"
            assert lease_id in self._owners[lease.owner]
            assert lease.expires_at_s <= lease.last_s
            assert lease_id not in self._ended
            assert lease.arena.closed or lease.arena.generation(lease.slot) == lease.generation
            assert lease.arena.num_holders(lease.slot) >= by_slot[lease.slot]
            assert (lease.expires_at_s, lease_id) in scheduled
            yield
        for slot, leases in self._slots.items():
            assert by_slot.get(slot) == leases.num_live
            yield
        assert len(by_slot) == len(self._slots)
        assert all(len(held) <= self.max_per_owner for held in self._owners.values())
        assert sum(map(len, self._owners.values())) == len(self._grants)
        assert len(self._ended) <= MAX_REMEMBERED

    def stamp(self) -> tuple[int, ...]:
        """Another one after every change."""
        return (len(self._expiries), *vars(self.counters).values())

    def _find(self, lease_id: bytes) -> _Grant:
        grant = self._grants.get(lease_id)
        if grant is None:
            if (why := self._ended.get(lease_id)) is not None:
                raise StaleLease(f"lease {lease_id.hex()} is over: {why}", lease_id=lease_id.hex())
            raise _unknown(lease_id)
        return grant

    def _end(self, lease_id: bytes, why: str, *, suspect: bool) -> None:
        """Forgets a lease. suspect: somebody may still read under it."""
        lease = self._grants.pop(lease_id).lease
        self._ended[lease_id] = why
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        held = self._owners[lease.owner]
        held.remove(lease_id)
        if not held:
            del self._owners[lease.owner]
        leases = self._slots[lease.slot]
        leases.num_live -= 1
        leases.suspect |= suspect
        if not leases.num_live:
            del self._slots[lease.slot]
            # Where the lease is the last holder, freeing the slot ends its generation anyway.
            if (
                leases.suspect
                and lease.arena.num_holders(lease.slot) > 1
                and lease.arena.published(lease.slot)
            ):
                lease.arena.revoke(lease.slot)
                self.counters.generations_revoked += 1
        lease.arena.drop(lease.slot)

    def _schedule(self, lease: Lease) -> None:
        heapq.heappush(self._expiries, (lease.expires_at_s, lease.lease_id))
        # Renewals and releases leave their old times behind; rebuilt before those outnumber the live ones.
        if len(self._expiries) > 2 * len(self._grants) + 64:
            self._expiries = [
                (grant.lease.expires_at_s, lease_id) for lease_id, grant in self._grants.items()
            ]
            heapq.heapify(self._expiries)

    def _checked_ttl(self, ttl_s: float) -> float:
        if not ttl_s > 0:
            raise InvalidRequest(f"a lease of {ttl_s} s was asked for, more than 0 is needed", found=ttl_s)
        return min(ttl_s, self.max_ttl_s)


def _check_owner(lease: Lease, owner: Hashable | None) -> None:
    """Another's lease looks exactly like one that never was."""
    if owner is not None and owner != lease.owner:
        raise _unknown(lease.lease_id)


def _unknown(lease_id: bytes) -> UnknownLease:
    return UnknownLease(f"no lease {lease_id.hex()} is known", lease_id=lease_id.hex())
