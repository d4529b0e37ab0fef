"""The bytes of rows and the queue for them, and the rows that requests share: without requests of vLLM."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lm_adapter.engines.vllm.file_items import FileItem
from lm_adapter.engines.vllm.rank_socket import StepRows
from lm_adapter.engines.vllm.scheduler.items import RequestItem
from lm_adapter.engines.vllm.scheduler.room import Room
from lm_adapter.engines.vllm.scheduler.rows import RowsEntry, SharedRows
from lm_adapter.items import Grid

# Room -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiter:
    """Takes bytes one after another, until it has as many as it needs."""

    room: Room[Waiter]
    name: int
    needed: int
    taken: int = 0

    def take(self) -> bool:
        while self.taken < self.needed and self.room.try_take(1):
            self.taken += 1
        return self.taken == self.needed

    def give_back(self, num_bytes: int) -> None:
        self.taken -= num_bytes
        self.needed -= num_bytes
        self.room.release(num_bytes)


def serve(room: Room[Waiter]) -> None:
    room.serve(lambda waiter: waiter.needed - waiter.taken, Waiter.take)


def test_a_waiter_joins_once_and_leaves_with_what_it_took() -> None:
    room: Room[Waiter] = Room(4)
    large, later = Waiter(room, 0, 6), Waiter(room, 1, 1)
    assert room.join(large, goes_first=False)
    assert not room.join(large, goes_first=True)
    room.join(later, goes_first=False)
    serve(room)
    assert room.is_in_portions(large)
    room.leave(large)
    room.leave(large)
    assert not room.is_in_portions(large)
    assert room.used_bytes == large.taken == 4
    assert room.waiters == [later]


def test_one_that_goes_first_is_behind_the_one_that_is_served_in_portions() -> None:
    room: Room[Waiter] = Room(4)
    in_portions, waiting, first = Waiter(room, 0, 6), Waiter(room, 1, 4), Waiter(room, 2, 4)
    room.join(in_portions, goes_first=False)
    serve(room)
    room.join(waiting, goes_first=False)
    room.join(first, goes_first=True)
    assert room.waiters == [in_portions, first, waiting]
    in_portions.give_back(3)
    serve(room)
    assert (in_portions.taken, first.taken) == (3, 0)  # the room is not empty yet
    in_portions.give_back(3)
    serve(room)
    assert room.waiters == [waiting]
    assert first.taken == 4


@pytest.mark.parametrize("seed", range(20))
def test_everybody_is_served_in_order_whatever_they_need(seed: int) -> None:
    """Each gives back what it has in parts; nobody gets more than is free, and nobody starves."""
    choice = random.Random(seed)
    room: Room[Waiter] = Room(10)
    names = itertools.count()
    holding: list[Waiter] = []
    served: list[int] = []
    joined: list[int] = []

    def step() -> None:
        before = room.waiters
        serve(room)
        served.extend(waiter.name for waiter in before[: len(before) - len(room.waiters)])
        holding.extend(waiter for waiter in before if waiter.taken and waiter not in holding)
        assert 0 <= room.used_bytes <= room.max_bytes
        assert room.used_bytes == sum(waiter.taken for waiter in holding)
        in_portions = [waiter for waiter in room.waiters if room.is_in_portions(waiter)]
        assert in_portions in ([], room.waiters[:1])
        assert all(not waiter.taken for waiter in room.waiters if waiter not in in_portions)

    for _ in range(300):
        if choice.random() < 0.5:
            waiter = Waiter(room, next(names), choice.choice([1, 3, 7, 25]))
            room.join(waiter, goes_first=False)
            joined.append(waiter.name)
        elif holding:
            waiter = choice.choice(holding)
            waiter.give_back(choice.randint(0, waiter.taken))
        step()
    while room.is_awaited or room.used_bytes:
        for waiter in holding:
            waiter.give_back(waiter.taken)
        step()
    assert served == joined


# Shared rows ----------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """What is ordered, and what the ranks have: identifiers by number."""

    ordered: list[RowsEntry] = field(default_factory=list)
    present: dict[int, str] = field(default_factory=dict)
    numbers: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def start(self, entry: RowsEntry) -> None:
        self.ordered.append(entry)

    def cancel(self, entry: RowsEntry) -> None:
        if entry in self.ordered:
            self.ordered.remove(entry)

    def drop(self, number: int) -> None:
        del self.present[number]

    def read(self, rows: SharedRows, entry: RowsEntry) -> None:
        """Every rank has read them."""
        self.ordered.remove(entry)
        number = self.numbers()
        self.present[number] = entry.item.identifier
        rows.arrived(entry, number, 1.0)

    def begin(self, step: StepRows) -> list[str]:
        """Returns the identifiers that the step hands over."""
        found = [self.present[number] for number, _ in step.hand_over]
        assert found == [name for _, name in step.hand_over]
        for number in step.drop:
            self.drop(number)
        return found


def item(name: str, num_bytes: int = 1, digest: bytes = b"digest") -> RequestItem:
    return RequestItem(name, 0, 1, Grid(1, 2, 2), num_bytes, FileItem(b"file", digest))


def shared_rows(max_bytes: int = 4) -> tuple[Room[object], Ranks, SharedRows]:
    room: Room[object] = Room(max_bytes)
    ranks = Ranks()
    return room, ranks, SharedRows(room, ranks)


def held(rows: SharedRows, name: str, request_id: str = "a") -> RowsEntry:
    entry = rows.hold(item(name), (request_id, 0), 0.0)
    assert entry is not None
    return entry


@pytest.mark.parametrize("seed", range(20))
def test_ranks_have_what_is_held_in_any_order_of_events(seed: int) -> None:
    """Holders come and go, reads end or fail, and steps begin later than they are made, or are flushed."""
    choice = random.Random(seed)
    room, ranks, rows = shared_rows(max_bytes=6)
    holders: dict[tuple[str, int], RowsEntry] = {}
    steps: list[StepRows] = []
    ids = itertools.count()
    for _ in range(500):
        event = choice.randrange(6)
        if event == 0:
            holder = (f"request {next(ids)}", 0)
            entry = rows.hold(item(f"item {choice.randrange(8)}"), holder, 0.0)
            if entry is not None:
                holders[holder] = entry
        elif event == 1 and holders:
            holder = choice.choice(list(holders))
            rows.let_go(holders.pop(holder), holder)
        elif event == 2 and ranks.ordered:
            ranks.read(rows, choice.choice(ranks.ordered))
        elif event == 3 and ranks.ordered:
            entry = choice.choice(ranks.ordered)
            rows.failed(entry)
            for holder in list(entry.holders):
                rows.let_go(holders.pop(holder), holder)
        elif event == 4:
            for holder, entry in holders.items():
                if entry.is_present and choice.random() < 0.3:
                    rows.hand_over(entry, holder[0])
            steps.append(rows.take_step()[0])
        elif not steps:
            rows.flush()
        while len(steps) > choice.randint(0, 2):
            ranks.begin(steps.pop(0))
        assert 0 <= room.used_bytes <= room.max_bytes
        assert all(rows.is_current(entry) for entry in holders.values())
        have = set(ranks.present)
        assert {entry.number for entry in holders.values() if entry.is_present} <= have
    for holder, entry in holders.items():
        rows.let_go(entry, holder)
    for step in steps:
        ranks.begin(step)
    rows.flush()
    assert (room.used_bytes, ranks.ordered, ranks.present) == (0, [], {})
