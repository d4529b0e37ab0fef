"""The bytes of rows and the queue for them: without requests of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from lm_adapter.engines.vllm.scheduler.room import Room


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
