"""Clips in the pipeline without a wire: pieces, failures, callers that leave, whose the slot is."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from encoder_service.clips import MAX_PIECES_AHEAD
from encoder_service.errors import ClipTooLarge, InternalError
from encoder_service.ingest.qwen_vl import QwenClips
from encoder_service.ingest.settings import Normalisation, QwenVideoSettings, QwenVLSettings
from encoder_service.ingest.video.clip import Clip
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.store.arena import PROBE_BYTES
from encoder_service.store.embedding_store import EmbeddingStore, Partition
from encoder_service.types import CacheTier, ClipFacts, FrameArray, FrameItem, Grid, Item, Modality
from tests.fakes import FakePreprocessor
from tests.unit.service.rig import Rig, check_released, image, memory_store, num_slots, running, until
from tests.unit.store.arenas import device_arena, host_arena

pytestmark = pytest.mark.anyio

SIDE = 4
PIECE_FRAMES = 3
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


def clip_rules() -> QwenClips:
    """Of patches of one pixel, one frame deep."""
    images = QwenVLSettings(1, 2, 1, 4, 1 << 20, HALF)
    return QwenClips(QwenVideoSettings(4, 1 << 20, 2.0, 1, 768, 768, False), images, ClipLimits())


@pytest.fixture(params=["one tier", "two tiers", "no room"])
async def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Pieces of PIECE_FRAMES frames."""
    monkeypatch.setattr(FakePreprocessor, "clips", clip_rules())
    if request.param == "two tiers":
        partition = Partition(host_arena(1 << 14), device_arena(1 << 14))
        store = EmbeddingStore(partition, on_copy_error=lambda error: False)
    else:
        store = memory_store(PROBE_BYTES + 1 if request.param == "no room" else 1 << 20)
    rig = Rig(store, clip_piece_patches=PIECE_FRAMES * SIDE * SIDE, max_clip_patches=40 * SIDE * SIDE)
    rig.pipeline.admission.max_bytes = 1 << 20
    async with running(rig) as found:
        yield found
    check_released(rig.store)
    rig.store.close()


def has_room(rig: Rig) -> bool:
    return rig.store.max_bytes > 4096


def clip(num_frames: int, side: int = SIDE) -> tuple[Item, torch.Tensor]:
    """A clip that was sampled before, whose frames are of one colour each, and these."""
    colours = torch.randint(0, 256, (num_frames,), dtype=torch.uint8)
    frames = colours.view(-1, 1, 1, 1).expand(-1, side, side, 3).contiguous()
    at_s = tuple(index / 2 for index in range(num_frames))
    return Item(Modality.VIDEO, FrameArray(frames, None, at_s)), colours.float()


def rows_of(colours: torch.Tensor) -> torch.Tensor:
    """One colour's four rows after the other's, main level and the next."""
    main = colours.repeat_interleave(SIDE * SIDE // 4).view(-1, 1).expand(-1, 8)
    return torch.cat([main, main + 1], dim=1)


class Turnstile:
    """Lets one forward pass through at a time."""

    def __init__(self, rig: Rig) -> None:
        self._inner, self._turns = rig.tower.forward, threading.Semaphore(0)
        self.num_entered = 0
        rig.tower.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, inputs: Any) -> torch.Tensor:
        self.num_entered += 1
        assert self._turns.acquire(timeout=30)
        return self._inner(inputs)

    def open(self, times: int) -> None:
        self._turns.release(times)


async def test_rows_of_pieces_stand_in_the_clips_order(rig: Rig) -> None:
    item, colours = clip(random.randint(18, 24))
    first = await rig.pipeline.encode(item)
    assert torch.equal(first.encoded.rows, rows_of(colours))
    assert first.encoded.grid == Grid(len(colours), SIDE, SIDE)
    pieces = [grid.t for batch in rig.tower.batches for grid in batch]
    assert max(pieces) == PIECE_FRAMES
    assert sum(pieces) == len(colours)
    assert first.encoded.clip is not None
    assert first.encoded.clip.timestamps_s == item.content.timestamps_s  # type: ignore[union-attr]
    again = await rig.pipeline.encode(item)
    assert (again.tier is CacheTier.MISS) == (not has_room(rig))
    assert again.encoded.clip == first.encoded.clip
    assert torch.equal(again.encoded.rows, first.encoded.rows)
    on_host = await rig.pipeline.ensure_tier(again, "", "host")
    assert torch.equal(on_host.encoded.rows, rows_of(colours))
    assert on_host.encoded.clip == first.encoded.clip
    first.release()
    on_host.release()
    assert all(len(arena.directory) == 0 for _, arena in rig.store.arenas()), "a record has no timestamps"


async def test_a_failure_after_the_first_rows_leaves_nothing(rig: Rig) -> None:
    item, _ = clip(PIECE_FRAMES * 5)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    turnstile.open(1)
    await until(lambda: turnstile.num_entered > 1)
    rig.tower.fails_with = RuntimeError("no more")
    turnstile.open(20)
    with pytest.raises(InternalError, match="no more"):
        await encoding
    await until(lambda: num_slots(rig.store) == 0)


async def test_p20_a_caller_that_leaves_ends_the_clip_and_the_slot_is_the_engines_until_then(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Clip] = []
    monkeypatch.setattr(Clip, "close", lambda self, close=Clip.close: (closed.append(self), close(self)))
    item, _ = clip(PIECE_FRAMES * 8)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: turnstile.num_entered)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    await until(lambda: len(rig.pipeline.inflight) == 0 and closed)
    await until(lambda: rig.pipeline.admission.num_patches == 0)
    assert num_slots(rig.store) == has_room(rig)
    turnstile.open(20)
    await until(lambda: num_slots(rig.store) == 0)
    assert turnstile.num_entered <= 2, "pieces that had not begun are dropped"


async def test_p15_many_callers_share_one_reading_of_a_clip(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    inner = QwenClips.open

    def counted(self: QwenClips, *given: Any) -> Clip:
        opened.append(given)
        return inner(self, *given)

    monkeypatch.setattr(QwenClips, "open", counted)
    item, colours = clip(9)
    for delivered in await asyncio.gather(*(rig.pipeline.encode(item) for _ in range(6))):
        assert torch.equal(delivered.encoded.rows, rows_of(colours))
        delivered.release()
    assert len(opened) == 1


async def test_p28_pieces_and_images_share_a_batch(rig: Rig) -> None:
    turnstile = Turnstile(rig)
    item, _ = clip(PIECE_FRAMES * 2)
    blockers = [asyncio.ensure_future(rig.pipeline.encode(image(1)))]
    await until(lambda: turnstile.num_entered)
    others = [asyncio.ensure_future(rig.pipeline.encode(other)) for other in (item, image(3), image(4))]
    await until(lambda: len(rig.planner) >= 4)
    turnstile.open(20)
    for delivered in await asyncio.gather(*blockers, *others):
        delivered.release()
    assert any({grid.t for grid in batch} == {1, PIECE_FRAMES} for batch in rig.tower.batches)


async def test_p17_few_pieces_are_decoded_ahead_of_the_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    inner = Clip.pieces

    def counted(clip: Clip, max_patches: int) -> Iterator[FrameItem]:
        nonlocal num_read
        for piece in inner(clip, max_patches):
            num_read += 1
            yield piece

    monkeypatch.setattr(Clip, "pieces", counted)
    rig.tower.gate.clear()
    item, colours = clip(PIECE_FRAMES * 12)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: num_read == MAX_PIECES_AHEAD + 1)
    await asyncio.sleep(0.01)
    assert num_read == MAX_PIECES_AHEAD + 1
    rig.tower.gate.set()
    delivered = await encoding
    assert torch.equal(delivered.encoded.rows, rows_of(colours))
    delivered.release()


async def test_a_clip_over_the_limit_of_patches_is_refused_with_both_numbers(rig: Rig) -> None:
    item, _ = clip(41)
    with pytest.raises(ClipTooLarge, match=r"656 patches.*at most 640"):
        await rig.pipeline.encode(item)


async def test_a_prefetched_clip_is_announced_with_its_rows(rig: Rig) -> None:
    item, colours = clip(7)
    rig.tower.gate.clear()
    announced = await rig.pipeline.prefetch(item)
    assert announced.grid == Grid(7, SIDE, SIDE)
    assert announced.spec.num_rows == len(rows_of(colours))
    joined = await rig.pipeline.prefetch(item)
    assert announced.clip == joined.clip == ClipFacts(tuple(index / 2 for index in range(7)))
    fetching = asyncio.ensure_future(rig.pipeline.fetch(announced.key))
    await until(lambda: rig.pipeline.inflight.num_joined == 1)
    rig.tower.gate.set()
    delivered = await fetching
    assert torch.equal(delivered.encoded.rows, rows_of(colours))
    delivered.release()
    assert (await rig.pipeline.prefetch(item)).clip == announced.clip


async def test_nothing_of_a_clip_is_kept_alive_behind_its_end(rig: Rig) -> None:
    """Without the help of the garbage collector, which an idle service may not run for long."""
    gc.collect()
    gc.disable()
    try:
        item, _ = clip(12)
        frames = weakref.ref(item.content.frames_THWC)  # type: ignore[union-attr]
        (await rig.pipeline.encode(item)).release()
        del item
        await until(lambda: frames() is None)
    finally:
        gc.enable()
