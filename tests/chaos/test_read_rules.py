"""The read rules, step by step: every order of a writer's and a reader's steps.

Actors run in threads of their own and stop at a barrier before each step; one of them goes on at a time, in
all orders, by replaying each prefix with every other choice. Evictor and writer run the store's own code.
Work of the device (copies, forward passes) is queued on streams, which are actors too: it runs at any time
between its launch and the wait for its event. The reader looks at the arena through its descriptors only.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch

from encoder_service.store.allocator import RangeAllocator
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.control_page import ControlPage
from encoder_service.store.directory import Directory
from encoder_service.store.embedding_store import EmbeddingStore, Location, Partition
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import EncodedItem, Grid
from tests.reference_reader import ReferenceReader, reader_of

ROW_BYTES = 512
HALF = ROW_BYTES // 2
OLD, NEW = b"old" + bytes(29), b"new" + bytes(29)
CONTENT = {OLD: bytes([1]) * ROW_BYTES, NEW: bytes([2]) * ROW_BYTES}


class Stopped(BaseException):
    """The run is over; a thread that waits at a barrier ends."""


Choose = Callable[[int, list[str]], int]
"""From the step's number and the names of the actors that can go on."""


class Schedule:
    """Runs actors one step at a time. choose: which of the enabled actors goes on at each step. ``taken``:
    its choices, and among how many."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.taken: list[tuple[int, int]] = []
        self.trace: list[str] = []
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[str, Callable[[], bool]]] = {}
        self._running: set[str] = set()
        self._is_over = False
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._local = threading.local()

    def start(self, actor: str, function: Callable[[], None]) -> None:
        def run() -> None:
            self._local.actor = actor
            try:
                self.step("start")
                function()
            except Stopped:
                pass
            except BaseException as error:
                self._errors.append(error)
            finally:
                with self._changed:
                    self._running.discard(actor)
                    self._changed.notify_all()

        self._running.add(actor)
        self._threads.append(threading.Thread(target=run, name=actor, daemon=True))

    def step(self, label: str, enabled: Callable[[], bool] = lambda: True) -> None:
        """A barrier; other threads than actors pass it."""
        actor = getattr(self._local, "actor", None)
        if actor is None:
            return
        with self._changed:
            self._waiting[actor] = label, enabled
            self._running.discard(actor)
            self._changed.notify_all()
            self._changed.wait_for(lambda: actor not in self._waiting or self._is_over)
            if self._is_over:
                raise Stopped
            self._running.add(actor)

    def run(self) -> None:
        """Until no actor can go on. Raises the first error of an actor."""
        for thread in self._threads:
            thread.start()
        try:
            while True:
                with self._changed:
                    assert self._changed.wait_for(lambda: not self._running, 20), self.trace
                    if self._errors:
                        raise self._errors[0]
                    enabled = sorted(name for name, (_, test) in self._waiting.items() if test())
                    new = [name for name in enabled if self._waiting[name][0] == "start"]
                    if not enabled:
                        return
                    if new:  # all actors are at their first step before the order matters
                        actor = new[0]
                    else:
                        choice = self._choose(len(self.taken), enabled)
                        self.taken.append((choice, len(enabled)))
                        actor = enabled[choice]
                    self.trace.append(f"{actor}: {self._waiting.pop(actor)[0]}")
                    self._running.add(actor)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()


@dataclass
class Stream:
    """Device work in order. Its owner enqueues; the schedule runs it."""

    schedule: Schedule
    queue: list[Callable[[], None]] = field(default_factory=list)
    num_expected: int = 2
    num_done: int = 0

    def run(self) -> None:
        for _ in range(self.num_expected):
            self.schedule.step("device work", lambda: bool(self.queue))
            self.queue.pop(0)()
            self.num_done += 1

    def is_done(self) -> bool:
        """Whether the event behind all of its work has completed."""
        return self.num_done == self.num_expected


@dataclass
class Scene:
    """One run: an arena for one item, with the old item in it."""

    schedule: Schedule
    arena: Arena
    store: EmbeddingStore
    reader: ReferenceReader
    write_stream: Stream
    copy_stream: Stream
    announced: list[tuple[bytes, Location]] = field(default_factory=list)
    accepted: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_lost: int = 0


def expected(key: bytes) -> EncodedItem:
    rows = torch.empty(1, ROW_BYTES // 4, device="meta")
    return EncodedItem(key, bytes(32), Grid(1, 2, 2), rows, 0)


# -- writers ---------------------------------------------------------------------------------------------


def evict(scene: Scene) -> None:
    """The old item goes, for whatever reason."""
    tier = scene.store.partition("").host
    entry = tier.find(("", OLD))
    assert entry is not None
    tier.remove(entry)


def write(scene: Scene) -> None:
    """Takes the range as soon as the allocator has it."""
    step = scene.schedule.step
    step("reserve", lambda: scene.arena.largest_free_bytes >= ROW_BYTES)
    reservation = scene.store.reserve("", expected(NEW))
    assert reservation is not None
    target = reservation.destination.view(torch.uint8).flatten()
    source = torch.frombuffer(bytearray(CONTENT[NEW]), dtype=torch.uint8)
    for half in (slice(0, HALF), slice(HALF, ROW_BYTES)):
        scene.write_stream.queue.append(partial(_copy_half, target, source, half))
    step("publish", scene.write_stream.is_done)
    held = scene.store.commit(reservation)
    step("announce")
    scene.announced.append((NEW, held.announce()))
    held.drop()


def _copy_half(target: torch.Tensor, source: torch.Tensor, half: slice) -> None:
    target[half].copy_(source[half])


# -- readers ---------------------------------------------------------------------------------------------


def find_location(scene: Scene, key: bytes) -> tuple[int, int, int] | None:
    """Slot, generation, offset: of the last announcement, or as the directory lists it."""
    for announced, location in scene.announced:
        if announced == key:
            return location.slot_index, location.generation, location.offset_bytes
    record = scene.reader.find("", key)
    return None if record is None else (record.slot_index, record.generation, record.offset_bytes)


def read(scene: Scene) -> None:
    """Looks for the new item, then for the old one, and copies what it finds."""
    step = scene.schedule.step
    step("find")
    key = NEW
    location = find_location(scene, NEW)
    if location is None:
        key, location = OLD, find_location(scene, OLD)
    if location is None:
        return
    slot_index, generation, offset = location
    copied = bytearray(ROW_BYTES)
    for half in (slice(0, HALF), slice(HALF, ROW_BYTES)):

        def copy(half: slice = half) -> None:
            copied[half] = scene.reader.data[offset + half.start : offset + half.stop]

        scene.copy_stream.queue.append(copy)
    step("compare", scene.copy_stream.is_done)
    if scene.reader.is_current(slot_index, generation):
        scene.accepted.append((key, bytes(copied)))
    else:
        scene.num_lost += 1


# -- all orders ------------------------------------------------------------------------------------------


def with_barrier(schedule: Schedule, target: type, name: str) -> AbstractContextManager[object]:
    """A barrier before each call of a method."""
    method = getattr(target, name)

    def stopped(*arguments: object) -> object:
        schedule.step(name)
        return method(*arguments)

    return mock.patch.object(target, name, stopped)


def play(choose: Choose, *, is_announced: bool) -> Scene:
    schedule = Schedule(choose)
    arena = Arena(HostMemory(PROBE_BYTES + ROW_BYTES), max_slots=3)
    # Room for one item: pages are larger.
    filler = arena.allocate(arena.largest_free_bytes - ROW_BYTES)
    assert filler is not None
    store = EmbeddingStore(Partition(arena), on_copy_error=lambda _: False)
    reservation = store.reserve("", expected(OLD))
    assert reservation is not None
    reservation.destination.view(torch.uint8).fill_(1)
    held = store.commit(reservation)
    with reader_of(arena) as reference:
        scene = Scene(schedule, arena, store, reference, Stream(schedule), Stream(schedule))
        if is_announced:
            scene.announced.append((OLD, held.announce()))
        held.drop()
        schedule.start("evictor", lambda: evict(scene))
        schedule.start("writer", lambda: write(scene))
        schedule.start("reader", lambda: read(scene))
        schedule.start("write stream", scene.write_stream.run)
        schedule.start("copy stream", scene.copy_stream.run)
        try:
            with (
                with_barrier(schedule, ControlPage, "retire"),
                with_barrier(schedule, Directory, "remove"),  # put begins with it
                with_barrier(schedule, RangeAllocator, "free"),
            ):
                schedule.run()
        finally:
            store.close()
    return scene


Play = Callable[[Choose], Scene]


def all_orders(run: Play) -> Iterator[Scene]:
    """Depth first over all choices."""
    stack: list[list[int]] = [[]]
    while stack:
        prefix = stack.pop()
        scene = run(lambda number, _, prefix=prefix: prefix[number] if number < len(prefix) else 0)  # type: ignore[misc]
        yield scene
        taken = scene.schedule.taken
        for number in range(len(prefix), len(taken)):
            before = [choice for choice, _ in taken[:number]]
            stack.extend([*before, other] for other in range(1, taken[number][1]))


def wrong_reads(scene: Scene) -> list[bytes]:
    return [key for key, copied in scene.accepted if copied != CONTENT[key]]


@pytest.mark.parametrize("is_announced", [True, False], ids=["by location", "by directory"])
def test_p20_p21_no_order_of_steps_gives_wrong_rows(is_announced: bool) -> None:
    run = partial(play, is_announced=is_announced)
    num_orders = read_old = read_new = lost = 0
    for scene in all_orders(run):
        assert wrong_reads(scene) == [], "\n".join(scene.schedule.trace)
        num_orders += 1
        read_old += (OLD, CONTENT[OLD]) in scene.accepted
        read_new += (NEW, CONTENT[NEW]) in scene.accepted
        lost += scene.num_lost
    assert read_old
    assert read_new
    assert lost
    assert num_orders >= 250


# -- at full speed ---------------------------------------------------------------------------------------


def rewrite_for_ever(arena: Arena, seed: int) -> None:
    """Evicts and writes items whose bytes all are one number, in a slot or in several."""
    torch.set_num_threads(1)  # OpenMP hangs in a fork of a process that has used its threads
    store = EmbeddingStore(Partition(arena), on_copy_error=lambda _: False)
    chance = random.Random(seed)
    while True:
        number = chance.randrange(256)
        rows = torch.empty(chance.choice((1, 16, 64)), 1024, device="meta")
        item = EncodedItem(bytes([number]) * 32, bytes([number]) * 32, Grid(1, 2, 2), rows, 0)
        reservation = store.reserve("", item)
        assert reservation is not None
        reservation.destination.view(torch.uint8).fill_(number)
        store.commit(reservation).drop()


def test_p21_p25_a_reader_beside_a_writer_in_another_process_takes_no_torn_copy() -> None:
    """Also when the writer is killed in the middle of a store."""
    num_read = 0
    for seed in range(4):
        arena = Arena(HostMemory(1 << 20), max_slots=16)
        with reader_of(arena) as reader:
            pid = os.fork()
            if not pid:
                try:
                    rewrite_for_ever(arena, seed)
                finally:
                    os._exit(1)
            try:
                enough = num_read + 500
                while num_read < enough:
                    for number in range(256):
                        record = reader.find("", bytes([number]) * 32)
                        if record is None:
                            continue
                        assert record.content_digest == bytes([number]) * 32
                        copied = reader.read(record)
                        num_read += copied is not None
                        assert copied is None or copied == bytes([number]) * record.rows_bytes
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        arena.close()
