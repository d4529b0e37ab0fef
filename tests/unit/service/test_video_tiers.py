"""Clips whose rows the engine writes into the device arena, piece by piece: whose the room is, until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from encoder_service.clip_run import RowsAhead
from encoder_service.errors import InternalError
from encoder_service.store.arena import Arena
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
