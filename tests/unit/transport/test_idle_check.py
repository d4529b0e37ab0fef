"""The idle check covers stores of any size, a moment of the loop at a time, and never sees a change."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from encoder_service.store.arena import Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.partitions import PartitionedStore
from encoder_service.transport import idle_check, shared_memory
from encoder_service.transport.broker_options import BrokerOptions
from encoder_service.transport.idle_check import IdleCheck
from encoder_service.transport.shared_memory import SharedMemory
from encoder_service.types import EncodedItem, Grid
from tests.unit.transport.broker_rig import OPEN, socket_folder

pytestmark = pytest.mark.anyio

NUM_ITEMS = 24_000


def filled_store(num_items: int) -> PartitionedStore:
    store = ArenaStore(Arena(HostMemory(num_items * 256 + (1 << 20)), max_slots=num_items + 100))
    rows = torch.zeros(1, 8)
    for _ in range(num_items):
        assert store.put("", EncodedItem(os.urandom(32), os.urandom(32), Grid(1, 2, 2), rows, 0))
    return PartitionedStore(store, {})


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "condition never came true"
        await asyncio.sleep(0.005)


@pytest.fixture
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SharedMemory]:
    monkeypatch.setattr(shared_memory, "BEAT_S", 0.02)
    monkeypatch.setattr(idle_check, "PAUSE_S", 0.0)
    with socket_folder() as folder:
        options = BrokerOptions(str(folder / "broker.sock"), "one", "host-1", access=OPEN)
        store = filled_store(NUM_ITEMS)
        found = SharedMemory(
            store, options, default_lease_s=5, max_lease_s=60, max_leases_per_client=NUM_ITEMS
        )
        found.start()
        gc.disable()  # a full collection in a process with torch holds everybody for a quarter second
        yield found
        gc.enable()
        await found.stop()


def misplace_a_record(store: ArenaStore) -> Callable[[], None]:
    listed, index = store.arena.directory._listed, NUM_ITEMS - 7
    right = listed[index]
    listed[index] = right._replace(offset_bytes=256)
    return lambda: listed.update({index: right})


def count_a_byte_too_many(store: ArenaStore) -> Callable[[], None]:
    store.num_bytes += 1
    return lambda: setattr(store, "num_bytes", store.num_bytes - 1)


def free_a_slot_that_is_in_use(store: ArenaStore) -> Callable[[], None]:
    free = store.arena._free_indexes
    right, free[-1] = free[-1], 5
    return lambda: free.__setitem__(-1, right)


def forget_an_entry_of_the_order(store: ArenaStore) -> Callable[[], None]:
    (member,) = store.shares._members.values()
    key, right = member.entries._new.popitem()
    return lambda: member.entries._new.update({key: right})


def lose_a_range(store: ArenaStore) -> Callable[[], None]:
    taken = store.arena._allocator._taken
    first = list(taken)[NUM_ITEMS // 2]
    right = taken.pop(first)
    return lambda: taken.update({first: right})


def move_an_items_rows(store: ArenaStore) -> Callable[[], None]:
    item = list(store._entries.values())[-1].item
    right = item.rows
    object.__setattr__(item, "rows", torch.zeros(1, 8))
    return lambda: object.__setattr__(item, "rows", right)


PLANTED: list[Callable[[ArenaStore], Callable[[], None]]] = [
    misplace_a_record,
    count_a_byte_too_many,
    free_a_slot_that_is_in_use,
    forget_an_entry_of_the_order,
    lose_a_range,
    move_an_items_rows,
]


@pytest.mark.parametrize("plant", [None, *PLANTED])
async def test_what_is_wrong_in_a_large_store_is_found_without_holding_the_loop(
    shared: SharedMemory, plant: Callable[[ArenaStore], Callable[[], None]] | None
) -> None:
    (part,) = shared.store.parts()
    assert len(part) == NUM_ITEMS
    undo = plant(part) if plant is not None else None
    turns: list[float] = []
    check = shared._idle_check
    assert check is not None
    turn = check._turn

    def timed() -> None:
        before_s = time.thread_time()
        turn()
        turns.append(time.thread_time() - before_s)

    check._turn = timed  # type: ignore[method-assign]
    await until(lambda: check.num_finished == 1)
    assert shared.num_integrity_failures == (plant is not None)
    if undo is None:
        assert len(turns) > 20
    else:
        undo()
        part.check_integrity()
    turns = turns[:-1]  # that may have written a log
    assert max(turns, default=0.0) < 0.01, "a whole check takes a quarter second"
    assert not turns or sorted(turns)[len(turns) * 9 // 10] < 0.002


async def test_every_change_gives_a_check_up_and_the_next_finds_all_well(shared: SharedMemory) -> None:
    """Stores, evictions, reads and leases in the middle of checks: none is taken for a mistake."""
    (part,) = shared.store.parts()
    check = shared._idle_check
    assert check is not None
    rows = torch.zeros(1, 8)
    shared.leases.grant(part.arena, next(iter(part._entries.values())).slot, "me", ttl_s=50)
    changes: list[Callable[[], Any]] = [
        lambda: part.put("", EncodedItem(os.urandom(32), os.urandom(32), Grid(1, 2, 2), rows, 0)),
        lambda: part.get("", next(iter(part._entries))[1]),
        lambda: part._remove(next(iter(part._entries))),
        lambda: shared.leases.grant(part.arena, list(part._entries.values())[-1].slot, "me", ttl_s=9),
        lambda: shared.leases.release_all("me"),
        lambda: part.arena.revoke(list(part._entries.values())[-1].slot),
    ]
    for number in range(24):
        await until(lambda: check._steps is not None)
        for _ in range(number % 7 * 5):
            await asyncio.sleep(0)
        if check._steps is None:
            continue
        changes[number % len(changes)]()
        await until(lambda: check._steps is None or check._began_at == shared._stamp())
    finished = check.num_finished
    await until(lambda: check.num_finished > finished)
    assert shared.num_integrity_failures == 0


async def test_a_check_waits_for_quiet_and_comes_once_for_each_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_check, "PAUSE_S", 0.0)
    stamp, is_idle, wrong, begun = [0], [True], [], [0]

    def steps() -> Iterator[None]:
        begun[0] += 1
        for _ in range(200):
            yield
        raise KeyError("not where it should be")

    check = IdleCheck(steps, lambda: stamp[0], lambda: is_idle[0], wrong.append)
    monkeypatch.setattr(idle_check, "TURN_S", 1e-9)
    for _ in range(2 * idle_check.QUIET_BEATS):
        check.beat()
    assert begun == [1]
    await until(lambda: check.num_finished == 1)
    assert len(wrong) == 1
    for _ in range(2 * idle_check.QUIET_BEATS):
        check.beat()
    assert begun == [1], "nothing has changed since"
    stamp[0] += 1
    for _ in range(idle_check.QUIET_BEATS + 1):
        check.beat()
    assert begun == [2]
    is_idle[0] = False
    await until(lambda: check._steps is None)
    is_idle[0] = True
    for _ in range(idle_check.QUIET_BEATS):
        check.beat()
    assert begun == [3], "one that was given up begins again"
    stamp[0] += 1
    check.beat()
    await until(lambda: check._steps is None)
    assert (check.num_finished, len(wrong)) == (1, 1), "the beat has not hidden the change"
    check.stop()
    check.stop()
