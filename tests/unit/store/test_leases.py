"""Leases on slots: who may read what until when, and that nothing leaks or is read late."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from encoder_service.errors import InternalError, InvalidRequest, Overloaded, StaleLease, UnknownLease
from encoder_service.store import leases as leases_module
from encoder_service.store.arena import Arena, Slot
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.leases import MAX_READERS, Lease, LeaseTable
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import Mapping, map_host

MAX_TTL_S = 30.0
MAX_PER_OWNER = 8


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(HostMemory(1 << 18), max_slots=64)
    yield arena
    arena.check_integrity()
    arena.close()


@pytest.fixture
def table(clock: Clock) -> Iterator[LeaseTable]:
    table = LeaseTable(clock, max_ttl_s=MAX_TTL_S, max_per_owner=MAX_PER_OWNER)
    yield table
    table.check_integrity()


def published(arena: Arena, num_bytes: int = 1024) -> Slot:
    slot = arena.allocate(num_bytes)
    assert slot is not None
    arena.publish(slot)
    return slot


# Whose lease, and for how long at most


def test_who_names_an_owner_is_held_to_it(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5, num_readers=2)
    for call in (
        lambda: table.release(lease.lease_id, None, "b"),
        lambda: table.release(lease.lease_id, 1, "b"),
        lambda: table.renew(lease.lease_id, 20, "b"),
    ):
        with pytest.raises(UnknownLease) as refused:
            call()
        with pytest.raises(UnknownLease) as unknown:
            table.release(bytes(16), None, "b")
        assert type(refused.value) is type(unknown.value)
        assert refused.value.message.replace(lease.lease_id.hex(), bytes(16).hex()) == unknown.value.message
    assert table.get(lease.lease_id) == lease
    assert table.renew(lease.lease_id, 20, "a").expires_at_s == 1020.0
    assert table.release(lease.lease_id, 0, "a")
    assert table.release(lease.lease_id), "the id alone is enough for those who have it"
    assert not table.release(lease.lease_id, None, "b"), "over for everyone"
    arena.drop(slot)


def test_renewals_end_with_the_leases_age(arena: Arena, clock: Clock) -> None:
    table = LeaseTable(clock, max_ttl_s=MAX_TTL_S, max_per_owner=MAX_PER_OWNER, max_age_s=70.0)
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=MAX_TTL_S)
    for now_s, expires_at_s in ((1025.0, 1055.0), (1050.0, 1070.0), (1069.0, 1070.0)):
        clock.now_s = now_s
        assert table.renew(lease.lease_id, MAX_TTL_S).expires_at_s == expires_at_s
        table.check_integrity()
    clock.now_s = 1070.0
    with pytest.raises(StaleLease, match="expired"):
        table.renew(lease.lease_id, MAX_TTL_S)
    assert table.counters.expired == 1
    assert arena.drop(slot)


def test_a_grant_is_never_longer_than_the_age(arena: Arena, clock: Clock) -> None:
    table = LeaseTable(clock, max_ttl_s=MAX_TTL_S, max_per_owner=MAX_PER_OWNER, max_age_s=3.0)
    slot = published(arena)
    assert table.grant(arena, slot, "a", ttl_s=MAX_TTL_S).expires_at_s == 1003.0
    table.release_all("a")
    arena.drop(slot)


# One lease


def test_a_lease_holds_its_slot_until_released(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5)
    assert (lease.generation, lease.expires_at_s) == (arena.generation(slot), 1005.0)
    assert len(lease.lease_id) == 16
    assert not arena.drop(slot), "the store's entry goes, the lease stays"
    assert arena.num_holders(slot) == 1
    assert table.release(lease.lease_id)
    assert arena.num_holders(slot) == 0
    assert (len(table), table.num_slots, table.leased_bytes) == (0, 0, 0)


def test_a_release_leaves_the_generation_so_that_other_readers_go_on(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5)
    table.release(lease.lease_id)
    assert arena.generation(slot) == lease.generation
    assert table.counters.generations_revoked == 0
    arena.drop(slot)


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_a_lease_ends_with_its_last_reader(arena: Arena, table: LeaseTable, num_readers: int) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5, num_readers=num_readers)
    arena.drop(slot)
    for reader in range(num_readers):
        assert len(table) == 1
        assert table.release(lease.lease_id, reader)
        assert not table.release(lease.lease_id, reader), "the same reader counts once"
    assert len(table) == 0
    assert arena.num_holders(slot) == 0
    assert not table.release(lease.lease_id)


def test_readers_without_a_number_count_too(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5, num_readers=3)
    assert table.release(lease.lease_id)
    assert table.release(lease.lease_id)
    assert len(table) == 1
    assert table.release(lease.lease_id)
    assert (len(table), table.counters.released) == (0, 1)
    arena.drop(slot)


def test_p21_an_expired_lease_is_stale_at_once(arena: Arena, table: LeaseTable, clock: Clock) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5)
    clock.now_s += 4.999
    assert table.expire() == 0
    clock.now_s += 0.001
    assert table.expire() == 1
    assert arena.generation(slot) != lease.generation
    assert arena.published(slot), "the rows stay in the store"
    assert table.grant(arena, slot, "a", ttl_s=5).generation == arena.generation(slot)
    with pytest.raises(StaleLease, match="is over: it expired"):
        table.renew(lease.lease_id, 5)
    assert not table.release(lease.lease_id)


def test_expiry_is_noticed_without_anyone_asking_for_it(
    arena: Arena, table: LeaseTable, clock: Clock
) -> None:
    lease = table.grant(arena, published(arena), "a", ttl_s=5)
    clock.now_s += 6
    with pytest.raises(StaleLease):
        table.get(lease.lease_id)
    assert table.counters.expired == 1


def test_an_expiry_beside_a_live_lease_leaves_that_one_valid(
    arena: Arena, table: LeaseTable, clock: Clock
) -> None:
    slot = published(arena)
    short = table.grant(arena, slot, "a", ttl_s=5)
    long = table.grant(arena, slot, "b", ttl_s=20)
    assert table.num_live(slot) == 2
    clock.now_s += 10
    assert table.expire() == 1
    assert arena.generation(slot) == long.generation
    table.release(long.lease_id)
    assert arena.generation(slot) != short.generation, "now nothing holds the rows for the late reader"
    arena.drop(slot)


def test_a_renewed_lease_lives_on(arena: Arena, table: LeaseTable, clock: Clock) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5)
    clock.now_s += 4
    renewed = table.renew(lease.lease_id, 5)
    assert renewed.expires_at_s == 1009.0
    assert table.renew(lease.lease_id, 1).expires_at_s == 1009.0, "a renewal never shortens"
    clock.now_s += 4
    assert table.expire() == 0
    assert table.get(lease.lease_id).generation == lease.generation
    clock.now_s += 1
    assert table.expire() == 1


def test_a_lost_connection_takes_its_leases_and_no_others(arena: Arena, table: LeaseTable) -> None:
    slots = [published(arena) for _ in range(3)]
    mine = [table.grant(arena, slot, "a", ttl_s=5, num_readers=2) for slot in slots]
    theirs = table.grant(arena, slots[0], "b", ttl_s=5)
    assert table.release_all("a") == 3
    assert table.release_all("a") == 0
    assert arena.generation(slots[0]) == theirs.generation
    for lease in mine[1:]:
        assert arena.generation(lease.slot) != lease.generation
    with pytest.raises(StaleLease, match="is over: its connection closed"):
        table.get(mine[0].lease_id)
    assert table.counters.revoked == 3
    table.release(theirs.lease_id)


# Bounds and mistakes


def test_one_connection_has_so_many_leases(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    leases = [table.grant(arena, slot, "a", ttl_s=5) for _ in range(MAX_PER_OWNER)]
    with pytest.raises(Overloaded, match="has 8 leases, 8 are allowed"):
        table.grant(arena, slot, "a", ttl_s=5)
    table.grant(arena, slot, "b", ttl_s=5)
    table.release(leases[0].lease_id)
    table.grant(arena, slot, "a", ttl_s=5)
    assert (table.counters.refused, table.leased_bytes) == (1, 1024)


def test_times_and_readers_are_bounded(arena: Arena, table: LeaseTable) -> None:
    slot = published(arena)
    assert table.grant(arena, slot, "a", ttl_s=1e9).expires_at_s == 1000 + MAX_TTL_S
    for ttl_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="more than 0 is needed"):
            table.grant(arena, slot, "a", ttl_s=ttl_s)
    for num_readers in (0, -1, MAX_READERS + 1):
        with pytest.raises(InvalidRequest, match=f"for {num_readers} readers .* 1 to 256"):
            table.grant(arena, slot, "a", ttl_s=1, num_readers=num_readers)
    lease = table.grant(arena, slot, "a", ttl_s=1, num_readers=2)
    for reader in (-1, 2):
        with pytest.raises(InvalidRequest, match=f"reader {reader} released a lease of 2 readers"):
            table.release(lease.lease_id, reader)


def test_an_unknown_lease_is_unknown(table: LeaseTable) -> None:
    for use in (table.get, table.release, lambda lease_id: table.renew(lease_id, 1)):
        with pytest.raises(UnknownLease, match="no lease 00000000000000000000000000000000 is known"):
            use(bytes(16))


def test_only_readable_rows_are_leased(arena: Arena, table: LeaseTable) -> None:
    slot = arena.allocate(100)
    assert slot is not None
    with pytest.raises(InternalError, match="slot 0 has no readable rows"):
        table.grant(arena, slot, "a", ttl_s=5)
    arena.publish(slot)
    arena.drop(slot)
    with pytest.raises(InternalError, match="was freed"):
        table.grant(arena, slot, "a", ttl_s=5)
    assert len(table) == 0


def test_no_two_leases_have_one_id(arena: Arena, clock: Clock) -> None:
    ids = iter([b"a" * 16, b"a" * 16, b"b" * 16, b"a" * 16, b"b" * 16, b"c" * 16])
    table = LeaseTable(clock, max_ttl_s=5, max_per_owner=8, new_id=lambda: next(ids))
    slot = published(arena)
    first, second = (table.grant(arena, slot, "a", ttl_s=5) for _ in range(2))
    assert (first.lease_id, second.lease_id) == (b"a" * 16, b"b" * 16)
    table.release(first.lease_id)
    assert table.grant(arena, slot, "a", ttl_s=5).lease_id == b"c" * 16, "nor one that ended lately"
    table.check_integrity()


def test_what_is_remembered_of_ended_leases_is_bounded(
    arena: Arena, table: LeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "MAX_REMEMBERED", 3)
    slot = published(arena)
    leases = [table.grant(arena, slot, "a", ttl_s=5) for _ in range(5)]
    for lease in leases:
        table.release(lease.lease_id)
    with pytest.raises(UnknownLease):
        table.get(leases[1].lease_id)
    with pytest.raises(StaleLease, match="is over: released"):
        table.get(leases[2].lease_id)


def test_renewing_for_ever_needs_no_more_memory(arena: Arena, table: LeaseTable, clock: Clock) -> None:
    lease = table.grant(arena, published(arena), "a", ttl_s=5)
    for _ in range(10_000):
        clock.now_s += 1
        table.renew(lease.lease_id, 5)
    assert len(table._expiries) < 100
    assert table.next_expiry_s() is not None
    table.check_integrity()


def test_a_lease_that_nobody_was_told_of_is_taken_back_for_all_readers(
    arena: Arena, table: LeaseTable
) -> None:
    slot = published(arena)
    lease = table.grant(arena, slot, "a", ttl_s=5, num_readers=3)
    table.take_back(lease.lease_id)
    table.take_back(lease.lease_id)
    table.take_back(bytes(16))
    assert (len(table), table.counters.released, table.counters.generations_revoked) == (0, 1, 0)
    assert arena.generation(slot) == lease.generation, "nobody reads under it"
    assert not table.release(lease.lease_id)
    table.check_integrity()


def test_leases_outlive_a_closed_arena(clock: Clock) -> None:
    arena = Arena(HostMemory(1 << 16), max_slots=4)
    table = LeaseTable(clock, max_ttl_s=5, max_per_owner=8)
    lease = table.grant(arena, published(arena), "a", ttl_s=5)
    other = table.grant(arena, published(arena), "a", ttl_s=5)
    arena.close()
    table.check_integrity()
    table.release(lease.lease_id)
    clock.now_s += 6
    assert table.expire() == 1
    assert not table.release(other.lease_id)
    table.check_integrity()
    arena.check_integrity()


# Many


@dataclass
class Reading:
    """An importer in the middle of its copy."""

    lease: Lease
    content: int
    copied: torch.Tensor
    num_copied: int = 0


@dataclass
class Importer:
    """Copies rows byte range by byte range through real mappings, while the other side goes on."""

    mapping: Mapping
    page: ControlPageReader
    readings: list[Reading] = field(default_factory=list)
    num_whole: int = 0
    num_stale: int = 0

    def step(self, reading: Reading) -> bool:
        """Copies a quarter; whether the copy is complete and was judged."""
        slot = reading.lease.slot
        start = slot.offset_bytes + reading.num_copied
        end = min(start + max(1, slot.num_bytes // 4), slot.offset_bytes + slot.num_bytes)
        reading.copied[reading.num_copied : end - slot.offset_bytes] = self.mapping.tensor[start:end]
        reading.num_copied = end - slot.offset_bytes
        if reading.num_copied < slot.num_bytes:
            return False
        whole = bool((reading.copied == reading.content).all())
        if self.page.unchanged(slot.index, reading.lease.generation):
            assert whole, "a copy of mixed tenants was taken for good"
            self.num_whole += 1
        else:
            self.num_stale += 1
        return True


class Interleaving:
    """A store of small entries over one arena, its leases, importers, and a plain model of them all."""

    def __init__(self, seed: int, *, read: bool) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.arena = Arena(HostMemory(1 << 16), max_slots=24)
        self.table = LeaseTable(self.clock, max_ttl_s=MAX_TTL_S, max_per_owner=6)
        self.cached: list[Slot] = []
        self.contents: dict[Slot, int] = {}
        # The model: of each lease its slot, owner, readers that wait and end.
        self.model: dict[bytes, tuple[Slot, int, int, float]] = {}
        self.leases: dict[bytes, Lease] = {}
        self.ended: list[bytes] = []
        self.read = read
        self.importer: Importer | None = None
        if read:
            fd, page_fd = self.arena.export_fd(), self.arena.export_page_fd()
            geometry = self.arena.geometry
            self.importer = Importer(
                map_host(fd, geometry.size_bytes),
                ControlPageReader(page_fd, geometry.page_bytes, arena_id=geometry.arena_id),
            )
            os.close(fd)
            os.close(page_fd)

    def expire_model(self) -> None:
        for lease_id, (_, _, _, end) in list(self.model.items()):
            if end <= self.clock.now_s:
                self.forget(lease_id)

    def forget(self, lease_id: bytes) -> None:
        del self.model[lease_id]
        self.ended.append(lease_id)
        del self.ended[:-50]

    def put(self) -> None:
        """A new entry, written over whatever freed bytes it gets, evicting unleased ones until it fits."""
        num_bytes = self.random.randrange(1, 9000)
        slot = self.arena.allocate(num_bytes)
        while slot is None:
            unpinned = [slot for slot in self.cached if self.arena.num_holders(slot) == 1]
            if not unpinned:
                return
            victim = unpinned[0]
            self.cached.remove(victim)
            assert self.arena.drop(victim)
            del self.contents[victim]
            slot = self.arena.allocate(num_bytes)
        if self.read:
            content = self.random.randrange(256)
            self.arena.view(slot, (num_bytes,), torch.uint8).fill_(content)
            self.contents[slot] = content
        else:
            self.contents[slot] = 0
        self.arena.publish(slot)
        self.cached.append(slot)

    def remove(self) -> None:
        """The store lets an entry go although it may be leased."""
        if self.cached:
            slot = self.cached.pop(self.random.randrange(len(self.cached)))
            if self.arena.drop(slot):
                del self.contents[slot]

    def grant(self) -> None:
        if not self.cached:
            return
        slot = self.random.choice(self.cached)
        owner, readers = self.random.randrange(5), self.random.choice((1, 1, 2, 4))
        ttl_s = self.random.uniform(0.1, 10)
        try:
            lease = self.table.grant(self.arena, slot, owner, ttl_s=ttl_s, num_readers=readers)
        except Overloaded:
            assert sum(held == owner for _, held, _, _ in self.model.values()) == 6
            return
        assert lease.lease_id not in self.leases
        self.model[lease.lease_id] = (slot, owner, readers, self.clock.now_s + ttl_s)
        self.leases[lease.lease_id] = lease
        if self.importer:
            copied = torch.zeros(slot.num_bytes, dtype=torch.uint8)
            self.importer.readings.append(Reading(lease, self.contents[slot], copied))

    def renew(self) -> None:
        if self.model:
            lease_id = self.random.choice(list(self.model))
            slot, owner, readers, end = self.model[lease_id]
            ttl_s = self.random.uniform(0.1, 10)
            self.table.renew(lease_id, ttl_s)
            self.model[lease_id] = (slot, owner, readers, max(end, self.clock.now_s + ttl_s))

    def release(self) -> None:
        if not self.model:
            return
        lease_id = self.random.choice(list(self.model))
        slot, owner, readers, end = self.model[lease_id]
        assert self.table.release(lease_id)
        self.model[lease_id] = (slot, owner, readers - 1, end)
        if readers == 1:
            self.forget(lease_id)

    def release_again(self) -> None:
        if self.ended:
            assert not self.table.release(self.random.choice(self.ended))

    def disconnect(self) -> None:
        owner = self.random.randrange(5)
        gone = [lease_id for lease_id, (_, held, _, _) in self.model.items() if held == owner]
        assert self.table.release_all(owner) == len(gone)
        for lease_id in gone:
            self.forget(lease_id)

    def pass_time(self) -> None:
        self.clock.now_s += self.random.expovariate(1.0)
        self.expire_model()
        self.table.expire()

    def read_on(self) -> None:
        if self.importer and self.importer.readings:
            # Mostly the latest, which come in time; the others come too late as a rule.
            latest = -self.random.randint(1, min(3, len(self.importer.readings)))
            position = self.random.choice(
                (latest, latest, self.random.randrange(len(self.importer.readings)))
            )
            if self.importer.step(self.importer.readings[position]):
                self.importer.readings.pop(position)

    def run(self, num_steps: int, check_every: int) -> None:
        actions = [self.put, self.remove, self.grant, self.renew, self.release, self.release_again]
        actions += [self.disconnect, self.pass_time, self.read_on]
        weights = [8, 3, 12, 6, 10, 1, 1, 4, 40 if self.read else 0]
        for step, action in enumerate(self.random.choices(actions, weights, k=num_steps)):
            action()
            if step % check_every == 0:
                self.check()
        self.check()

    def check(self) -> None:
        self.arena.check_integrity()
        self.table.check_integrity()
        assert set(self.model) == set(self.table._grants)
        holders: dict[Slot, int] = defaultdict(int)
        for slot, _, _, _ in self.model.values():
            holders[slot] += 1
        for slot in self.cached:
            holders[slot] += 1
        assert holders == self.arena._holders
        self.contents = {slot: content for slot, content in self.contents.items() if slot in holders}

    def finish(self) -> None:
        """Everything let go: nothing is left."""
        for owner in range(5):
            self.table.release_all(owner)
        for slot in self.cached:
            self.arena.drop(slot)
        assert (len(self.table), self.table.num_slots, len(self.arena)) == (0, 0, 0)
        assert self.arena.largest_hole_bytes == self.arena.capacity_bytes // 256 * 256
        self.table.check_integrity()
        self.arena.check_integrity()
        counters = self.table.counters
        assert counters.granted == counters.released + counters.expired + counters.revoked
        if self.importer:
            self.importer.mapping.close()
            self.importer.page.close()
        self.arena.close()


@pytest.mark.parametrize("seed", range(4))
def test_p21_no_late_read_is_taken_for_good_under_random_interleavings(seed: int) -> None:
    run = Interleaving(seed, read=True)
    run.run(12_000, check_every=101)
    importer = run.importer
    assert importer is not None
    assert importer.num_whole > 200
    assert importer.num_stale > 50, "the run has to include late reads"
    run.finish()


def test_operations_stay_cheap_and_leave_nothing() -> None:
    run = Interleaving(11, read=False)
    run.run(60_000, check_every=2000)
    run.finish()


@pytest.mark.extended
def test_a_million_operations_leave_nothing() -> None:
    gc.collect()
    run = Interleaving(12, read=False)
    run.run(1_000_000, check_every=20_000)
    assert run.table.counters.granted > 100_000
    run.finish()


READ_WHILE_WRITTEN = """
import sys, torch
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import map_host
fd, size, page_fd, page_size, offset, num_bytes = map(int, sys.argv[1:7])
torch.set_num_threads(1)
mapping = map_host(fd, size)
page = ControlPageReader(page_fd, page_size, arena_id=bytes.fromhex(sys.argv[7]))
print("reading", flush=True)
whole = stale = mixed = 0
told = False
rows = mapping.tensor[offset : offset + num_bytes]
while not page.closed:
    generation = page._words[16]
    copied = rows.clone()
    is_whole = bool((copied == copied[0]).all())
    if page.unchanged(0, generation):
        whole += 1
        assert is_whole, "a copy of mixed tenants was taken for good"
    else:
        stale += 1
    mixed += not is_whole
    if not told and whole and stale and mixed:
        print("seen", flush=True)
        told = True
print(whole, stale, mixed)
"""


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """One that reads until the arena is closed would be waited for, for ever, where the test fails before."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def test_p21_a_reader_in_another_process_never_takes_a_torn_copy() -> None:
    """The slot is rewritten as fast as it goes while the reader copies it, with no word between them, until
    the reader has had copies of every kind, and fifty times."""
    num_bytes = 1 << 20
    arena = Arena(HostMemory(1 << 21), max_slots=1)
    geometry = arena.geometry
    fd, page_fd = arena.export_fd(), arena.export_page_fd()
    slot = arena.allocate(num_bytes)
    assert slot is not None
    numbers = [fd, geometry.size_bytes, page_fd, geometry.page_bytes, slot.offset_bytes, num_bytes]
    with (
        subprocess.Popen(
            [sys.executable, "-c", READ_WHILE_WRITTEN, *map(str, numbers), geometry.arena_id.hex()],
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            pass_fds=[fd, page_fd],
            stdout=subprocess.PIPE,
            text=True,
        ) as reader,
        ThreadPoolExecutor(1) as thread,
        ending(reader),
    ):
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        seen = thread.submit(reader.stdout.readline)
        started_s = time.monotonic()
        content = 0
        while content <= 50 or not seen.done() or time.monotonic() < started_s + 1.5:
            assert time.monotonic() < started_s + 240, f"{content} writes, and a kind of copy lacks"
            content += 1
            for quarter in arena.view(slot, (4, num_bytes // 4), torch.uint8):
                quarter.fill_(content % 256)
                time.sleep(0.0001)
            arena.publish(slot)
            time.sleep((0.0, 0.002, 0.0, 0.05)[content % 4])
            arena.drop(slot)
            slot = arena.allocate(num_bytes)
            assert slot is not None
        arena.close()
        assert seen.result() == "seen\n"
        whole, stale, mixed = map(int, reader.stdout.read().split())
    assert reader.returncode == 0
    os.close(fd)
    os.close(page_fd)
    assert whole > 0
    assert stale > 0
    assert mixed > 0, "the run has to tear copies"
