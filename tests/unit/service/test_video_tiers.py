"""Clips whose rows the engine writes into the device arena, piece by piece: whose the room is, until when."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from encoder_service import clip_run
from encoder_service.clip_run import RowsAhead
from encoder_service.errors import InternalError
from encoder_service.store.arena import Arena
from encoder_service.store.rows_prefix import RowsPrefix
from encoder_service.store.tiers import TieredStore, tier_of
from encoder_service.types import CacheTier
from tests.fakes import FakePreprocessor
from tests.unit.service.test_pipeline import Rig, until
from tests.unit.service.test_video_pieces import (
    PIECE_FRAMES,
    SIDE,
    Turnstile,
    clip,
    clip_rules,
    rows_of,
)
from tests.unit.store.device_like import tiered

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """With room for a few clips on the device and on the host."""
    monkeypatch.setattr(FakePreprocessor, "clips", clip_rules())
    store = tiered(1 << 14, 1 << 14)
    rig = Rig(store)
    rig.pipeline.admission.max_bytes = 1 << 20
    object.__setattr__(rig.pipeline._clips, "max_piece_patches", PIECE_FRAMES * SIDE * SIDE)
    yield rig
    rig.tower.gate.set()
    await rig.pipeline.drain(10)
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    for _ in range(5):
        await asyncio.sleep(0)  # what the engine said last
    while pending := [*store._spilling.values(), *store._moves.values()]:
        await asyncio.wait(pending)
    store.check_integrity()
    for part in store.parts():
        assert len(part.arena) == len(part), "somebody kept rows or room"
        assert all(part.arena.num_holders(slot) == 1 for slot in part.arena._holders)
    assert rig.pipeline.admission.num_patches == 0
    store.close()


def store_of(rig: Rig) -> TieredStore:
    store = rig.pipeline.store
    assert isinstance(store, TieredStore)
    return store


def device_arena(rig: Rig) -> Arena:
    (arena,) = (part.arena for part in store_of(rig).parts() if part.arena.geometry.kind == "device")
    return arena


async def test_pieces_are_written_into_one_slot(rig: Rig) -> None:
    item, colours = clip(PIECE_FRAMES * 3 + 1)
    first = await rig.pipeline.encode(item)
    again = await rig.pipeline.encode(item)
    assert (first.tier, again.tier) == (CacheTier.MISS, CacheTier.DEVICE)
    for delivered in (first, again):
        assert delivered.held is not None
        assert tier_of(delivered.held) == "device"
        assert torch.equal(delivered.encoded.rows, rows_of(colours))
        assert delivered.encoded.clip is not None
        delivered.release()
    lowered = await rig.pipeline.placed(await rig.pipeline.encode(item), "", "host")
    assert torch.equal(lowered.encoded.rows, rows_of(colours))
    assert lowered.encoded.clip == first.encoded.clip
    lowered.release()
    assert len(device_arena(rig).directory) == 0  # it could not tell a clip's timestamps


async def test_a_caller_who_reads_ahead_has_them_on_the_host(rig: Rig) -> None:
    item, colours = clip(PIECE_FRAMES * 3)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item, rows_ahead=True))
    turnstile.open(1)
    delivered = await asyncio.wait_for(encoding, 10)
    assert isinstance(delivered.ahead, RowsAhead)
    assert not delivered.ahead.item.rows.is_meta
    turnstile.open(10)
    await delivered.ahead.whole()
    assert torch.equal(delivered.encoded.rows, rows_of(colours))
    delivered.release()
    kept = await rig.pipeline.encode(item)
    assert kept.tier is not CacheTier.MISS
    assert torch.equal(kept.encoded.rows, rows_of(colours))
    kept.release()


class Late:
    """A clip whose rows go to the store, joined after its first piece by a caller who reads them as they
    come."""

    def __init__(self, rig: Rig, num_pieces: int) -> None:
        self.item, colours = clip(PIECE_FRAMES * num_pieces)
        self.rows = rows_of(colours)
        self.turnstile = Turnstile(rig)
        self.first = asyncio.ensure_future(rig.pipeline.encode(self.item))
        self._rig = rig

    async def join(self) -> RowsAhead:
        await until(lambda: self.turnstile.num_entered)
        self.turnstile.open(1)
        await until(lambda: self.turnstile.num_entered > 1)
        delivered = await asyncio.wait_for(self._rig.pipeline.encode(self.item, rows_ahead=True), 10)
        assert delivered.tier is CacheTier.IN_FLIGHT
        assert delivered.ahead is not None
        return delivered.ahead

    async def read(self, ahead: RowsAhead) -> None:
        """To the last row; all that come are right."""
        ready = 0
        while ready < len(self.rows):
            ready = await asyncio.wait_for(ahead.beyond(ready), 10)
            assert torch.equal(ahead.item.rows[:ready], self.rows[:ready])


async def test_who_joins_a_clip_late_has_its_rows_as_they_come(rig: Rig) -> None:
    late = Late(rig, 6)
    ahead = await late.join()
    ready = await ahead.beyond(0)
    assert 0 < ready < len(late.rows)
    assert not late.first.done()
    another = await asyncio.wait_for(rig.pipeline.encode(late.item, rows_ahead=True), 10)
    assert another.ahead is not None
    late.turnstile.open(20)
    await asyncio.gather(late.read(ahead), late.read(another.ahead))
    await ahead.whole()
    delivered = await late.first
    assert torch.equal(delivered.encoded.rows, late.rows)
    for one in (ahead, another, delivered):
        one.release()
    again = await rig.pipeline.encode(late.item)
    assert again.tier is CacheTier.DEVICE
    again.release()
    assert rig.pipeline.flights.counters.started == 1


async def test_who_joins_late_learns_of_a_failure_and_nothing_stays_reserved(rig: Rig) -> None:
    late = Late(rig, 6)
    ahead = await late.join()
    rig.tower.fails_with = RuntimeError("no more")
    late.turnstile.open(20)
    with pytest.raises(InternalError, match="no more"):
        await late.read(ahead)
    with pytest.raises(InternalError, match="no more"):
        await late.first
    ahead.release()


async def test_rows_that_cannot_be_copied_ahead_fail_their_reader_alone(rig: Rig) -> None:
    late = Late(rig, 5)
    ahead = await late.join()
    ahead._prefix.item = replace(ahead.item, rows=torch.empty(0))
    late.turnstile.open(20)
    with pytest.raises(InternalError, match="the clip ended with"):
        await late.read(ahead)
    delivered = await late.first
    assert torch.equal(delivered.encoded.rows, late.rows)
    ahead.release()
    delivered.release()


@pytest.mark.parametrize("leaves", ["first", "late", "both"])
async def test_of_two_callers_of_a_clip_either_may_leave(rig: Rig, leaves: str) -> None:
    late = Late(rig, 6)
    ahead = await late.join()
    if leaves != "late":
        late.first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late.first
    if leaves != "first":
        ahead.release()
    late.turnstile.open(20)
    if leaves == "first":
        await late.read(ahead)
        await ahead.whole()
        ahead.release()
    elif leaves == "late":
        delivered = await late.first
        assert torch.equal(delivered.encoded.rows, late.rows)
        delivered.release()
    await until(lambda: len(rig.pipeline.flights) == 0)
    await until(lambda: rig.pipeline.flights.counters.abandoned == (leaves == "both"))


class Gate:
    """Holds up what copies rows ahead, before it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = asyncio.Event()
        follow = clip_run.Pieces._follow

        async def held_up(pieces: clip_run.Pieces, *given: RowsPrefix) -> None:
            await self.opened.wait()
            await follow(pieces, *given)

        monkeypatch.setattr(clip_run.Pieces, "_follow", held_up)


@pytest.mark.parametrize("leaves", [False, True], ids=["reads on", "leaves"])
async def test_rows_are_not_waited_for_by_who_has_a_lease_on_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """They are held for as long as they are copied, and not longer."""
    gate = Gate(monkeypatch)
    late = Late(rig, 4)
    await until(lambda: late.turnstile.num_entered)
    joining = asyncio.ensure_future(rig.pipeline.encode(late.item, rows_ahead=True))
    await asyncio.sleep(0)
    late.turnstile.open(20)
    delivered = await asyncio.wait_for(late.first, 10)
    assert torch.equal(delivered.encoded.rows, late.rows)
    delivered.release()
    joined = await asyncio.wait_for(joining, 10)
    assert joined.ahead is not None
    whole = asyncio.ensure_future(joined.ahead.whole())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not whole.done(), "the rows are not where they are read"
    if leaves:
        whole.cancel()
        joined.release()
    gate.opened.set()
    if not leaves:
        await late.read(joined.ahead)
        await whole
        joined.release()
    await until(lambda: not rig.pipeline._clips.following)
    kept = await rig.pipeline.encode(late.item)
    assert kept.tier is CacheTier.DEVICE
    kept.release()


async def test_nothing_is_copied_for_readers_who_have_left(rig: Rig) -> None:
    """The next who comes has the rows from the first one on."""
    late = Late(rig, 6)
    gone = await late.join()
    gone.release()
    gone.release()
    late.turnstile.open(1)
    await until(lambda: not rig.pipeline._clips.following)
    assert not late.first.done()
    ahead = (await asyncio.wait_for(rig.pipeline.encode(late.item, rows_ahead=True), 10)).ahead
    assert ahead is not None
    assert ahead._prefix is not gone._prefix
    late.turnstile.open(20)
    await late.read(ahead)
    ahead.release()
    (await late.first).release()


async def test_without_room_on_the_host_rows_come_at_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> RowsPrefix:
        raise RuntimeError("not enough memory: you tried to allocate 407896064 bytes")

    monkeypatch.setattr(clip_run, "on_host", full)
    late = Late(rig, 3)
    await until(lambda: late.turnstile.num_entered)
    joining = asyncio.ensure_future(rig.pipeline.encode(late.item, rows_ahead=True))
    late.turnstile.open(20)
    for delivered in await asyncio.wait_for(asyncio.gather(joining, late.first), 10):
        assert delivered.ahead is None
        assert torch.equal(delivered.encoded.rows, late.rows)
        delivered.release()


@pytest.mark.parametrize("joins", [False, True], ids=["alone", "joined"])
async def test_nothing_of_a_clip_is_kept_alive_behind_its_end(rig: Rig, joins: bool) -> None:
    """Without the help of the garbage collector, which an idle service may not run for long."""
    gc.collect()
    gc.disable()
    try:
        late = Late(rig, 4)
        frames = weakref.ref(late.item.content.frames_THWC)  # type: ignore[union-attr]
        buffer = None
        if joins:
            ahead = await late.join()
            buffer = weakref.ref(ahead.item.rows)
            late.turnstile.open(20)
            await late.read(ahead)
            ahead.release()
            del ahead
        late.turnstile.open(20)
        (await late.first).release()
        del late
        await until(lambda: frames() is None and (buffer is None or buffer() is None))
    finally:
        gc.enable()


async def test_a_clip_that_fails_half_way_leaves_no_room_taken(rig: Rig) -> None:
    item, _ = clip(PIECE_FRAMES * 5)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    turnstile.open(1)
    await until(lambda: turnstile.num_entered > 1)
    rig.tower.fails_with = RuntimeError("no more")
    turnstile.open(20)
    with pytest.raises(InternalError, match="no more"):
        await encoding
    await until(lambda: len(device_arena(rig)) == 0)


async def test_p21_room_is_the_engines_until_its_last_piece_ended(rig: Rig) -> None:
    """The caller leaves while a piece is being written: nobody is given that room before it has ended."""
    item, _ = clip(PIECE_FRAMES * 4)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: turnstile.num_entered)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    await until(lambda: len(rig.pipeline.flights) == 0 and rig.pipeline.admission.num_patches == 0)
    assert len(device_arena(rig)) == 1
    turnstile.open(20)
    await until(lambda: len(device_arena(rig)) == 0)
