"""Clips in the pipeline without a wire: pieces, rows ahead of the rest, failures, callers that leave."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from encoder_service.clip_run import MAX_PIECES_AHEAD, RowsAhead
from encoder_service.errors import ClipTooLarge, InternalError, UndecodableClip, UnsupportedContent
from encoder_service.ingest.qwen_vl import QwenClips
from encoder_service.ingest.settings import Normalisation, QwenVideoSettings, QwenVLSettings
from encoder_service.ingest.video.clip import Clip
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.types import CacheTier, EncodedFile, FrameArray, Grid, Item, Modality, PreprocessOptions
from tests.fakes import FakePreprocessor
from tests.unit.ingest import clip_files
from tests.unit.service.test_pipeline import Rig, image, until

pytestmark = pytest.mark.anyio

SIDE = 4
PIECE_FRAMES = 3
HALF = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


def clip_rules() -> QwenClips:
    """Of patches of one pixel, one frame deep."""
    images = QwenVLSettings(1, 2, 1, 4, 1 << 20, HALF)
    return QwenClips(QwenVideoSettings(4, 1 << 20, 2.0, 1, 768, 768, False), images, ClipLimits())


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Pieces of PIECE_FRAMES frames."""
    FakePreprocessor.clips = clip_rules()
    rig = Rig()
    rig.pipeline.admission.max_bytes = 1 << 20
    object.__setattr__(rig.pipeline._clips, "max_piece_patches", PIECE_FRAMES * SIDE * SIDE)
    object.__setattr__(rig.pipeline._clips, "max_patches", 40 * SIDE * SIDE)
    yield rig
    FakePreprocessor.clips = None
    rig.tower.gate.set()
    await rig.pipeline.drain(10)
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    rig.pipeline.store.check_integrity()
    assert rig.pipeline.admission.num_patches == 0
    assert rig.pipeline.admission.num_bytes == 0
    assert rig.pipeline.load.num_patches == 0
    assert len(rig.pipeline.flights) == 0


def clip(num_frames: int, side: int = SIDE) -> tuple[Item, torch.Tensor]:
    """A clip that was sampled before, whose frames are of one colour each, and these."""
    colours = torch.randint(0, 256, (num_frames,), dtype=torch.uint8)
    frames = colours.view(-1, 1, 1, 1).expand(-1, side, side, 3).contiguous()
    at_s = tuple(place / 2 for place in range(num_frames))
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
    item, colours = clip(random.randint(7, 20))
    first = await rig.pipeline.encode(item)
    assert torch.equal(first.encoded.rows, rows_of(colours))
    assert first.encoded.grid == Grid(len(colours), SIDE, SIDE)
    pieces = [grid.t for batch in rig.tower.batches for grid in batch]
    assert max(pieces) == PIECE_FRAMES
    assert sum(pieces) == len(colours)
    assert first.encoded.clip is not None
    assert first.encoded.clip.timestamps_s == item.content.timestamps_s  # type: ignore[union-attr]
    again = await rig.pipeline.encode(item)
    assert again.tier is CacheTier.HOST
    assert again.encoded.clip == first.encoded.clip
    assert torch.equal(again.encoded.rows, first.encoded.rows)


async def test_rows_are_ready_before_the_clip_is(rig: Rig) -> None:
    item, colours = clip(PIECE_FRAMES * 4)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item, rows_ahead=True))
    await until(lambda: turnstile.num_entered)
    turnstile.open(1)
    delivered = await asyncio.wait_for(encoding, 10)
    ahead = delivered.ahead
    assert ahead is not None
    ready = await ahead.beyond(0)
    assert 0 < ready < len(ahead.item.rows)
    expected = rows_of(colours)
    assert torch.equal(ahead.item.rows[:ready], expected[:ready])
    turnstile.open(10)
    while ready < len(expected):
        ready = await asyncio.wait_for(ahead.beyond(ready), 10)
        assert torch.equal(ahead.item.rows[:ready], expected[:ready])
    await ahead.whole()
    delivered.release()
    delivered.release()
    assert rig.pipeline.store.get("", delivered.encoded.key) is not None


async def test_a_failure_after_the_first_rows_reaches_their_reader(rig: Rig) -> None:
    item, _ = clip(PIECE_FRAMES * 5)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item, rows_ahead=True))
    turnstile.open(1)
    delivered = await asyncio.wait_for(encoding, 10)
    assert delivered.ahead is not None
    rig.tower.fails_with = RuntimeError("no more")
    turnstile.open(20)

    async def read_on(ahead: RowsAhead) -> None:
        ready = 0
        while ready < len(ahead.item.rows):
            ready = await asyncio.wait_for(ahead.beyond(ready), 10)

    with pytest.raises(InternalError, match="no more"):
        await read_on(delivered.ahead)
    delivered.release()
    assert rig.pipeline.store.get("", delivered.encoded.key) is None


async def test_a_caller_that_leaves_ends_the_clip(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Clip] = []
    monkeypatch.setattr(Clip, "close", lambda self, close=Clip.close: (closed.append(self), close(self)))
    item, _ = clip(PIECE_FRAMES * 8)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: turnstile.num_entered)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    turnstile.open(20)
    await until(lambda: len(rig.pipeline.flights) == 0 and closed)
    await until(lambda: rig.pipeline.admission.num_patches == 0)
    await until(lambda: rig.pipeline.flights.counters.abandoned == 1)


async def test_a_reader_of_first_rows_that_leaves_ends_the_clip_too(rig: Rig) -> None:
    item, _ = clip(PIECE_FRAMES * 6)
    turnstile = Turnstile(rig)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item, rows_ahead=True))
    turnstile.open(1)
    delivered = await asyncio.wait_for(encoding, 10)
    delivered.release()
    turnstile.open(20)
    await until(lambda: len(rig.pipeline.flights) == 0)
    assert rig.pipeline.store.get("", delivered.encoded.key) is None


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
    found = await asyncio.gather(
        *(rig.pipeline.encode(item, rows_ahead=place % 2 == 0) for place in range(6))
    )
    assert len(opened) == 1
    for delivered in found:
        if delivered.ahead is not None:
            await delivered.ahead.whole()
        assert torch.equal(delivered.encoded.rows, rows_of(colours))
        delivered.release()


async def test_p28_pieces_and_images_share_a_batch(rig: Rig) -> None:
    turnstile = Turnstile(rig)
    item, _ = clip(PIECE_FRAMES * 2)
    blockers = [asyncio.ensure_future(rig.pipeline.encode(image(1)))]
    await until(lambda: turnstile.num_entered)
    others = [asyncio.ensure_future(rig.pipeline.encode(each)) for each in (item, image(3), image(4))]
    await until(lambda: rig.engine.queued_items >= 4)
    turnstile.open(20)
    await asyncio.gather(*blockers, *others)
    assert any({grid.t for grid in batch} == {1, PIECE_FRAMES} for batch in rig.tower.batches)


async def test_p17_few_pieces_are_decoded_ahead_of_the_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(
        Clip,
        "_read_piece",
        lambda self, most, inner=Clip._read_piece: (read.append(most), inner(self, most))[1],
    )
    rig.tower.gate.clear()
    item, colours = clip(PIECE_FRAMES * 12)
    encoding = asyncio.ensure_future(rig.pipeline.encode(item))
    await until(lambda: len(read) == MAX_PIECES_AHEAD + 1)
    await asyncio.sleep(0)
    assert len(read) == MAX_PIECES_AHEAD + 1
    rig.tower.gate.set()
    assert torch.equal((await encoding).encoded.rows, rows_of(colours))


async def test_a_clip_over_the_limit_of_patches_is_refused_with_both_numbers(rig: Rig) -> None:
    item, _ = clip(41)
    with pytest.raises(ClipTooLarge, match=r"656 patches.*at most 640"):
        await rig.pipeline.encode(item)


async def test_a_damaged_file_fails_alone(rig: Rig) -> None:
    data = clip_files.encode(clip_files.moving(10))
    broken = Item(Modality.VIDEO, EncodedFile(data[: len(data) // 2]))
    good, colours = clip(5)
    found, refused = await asyncio.gather(
        rig.pipeline.encode(good), rig.pipeline.encode(broken), return_exceptions=True
    )
    assert isinstance(refused, UndecodableClip)
    assert not isinstance(found, BaseException)
    assert torch.equal(found.encoded.rows, rows_of(colours))


async def test_a_checkpoint_without_settings_of_clips_takes_none(rig: Rig) -> None:
    FakePreprocessor.clips = None
    with pytest.raises(UnsupportedContent, match="no settings for clips"):
        await rig.pipeline.encode(clip(3)[0])


async def test_p11_rate_and_timestamps_are_in_the_key(rig: Rig) -> None:
    frames = torch.randint(0, 256, (8, SIDE, SIDE, 3), dtype=torch.uint8)
    contents = [
        FrameArray(frames, 2.0),
        FrameArray(frames, 4.0),
        FrameArray(frames),
        FrameArray(frames, None, tuple(range(8))),
        FrameArray(frames, None, tuple(2.0 * place for place in range(8))),
    ]
    items = [Item(Modality.VIDEO, content) for content in contents]
    items.append(Item(Modality.VIDEO, contents[0], options=PreprocessOptions(max_frames=3)))
    found = [(await rig.pipeline.encode(item)).encoded for item in items]
    assert len({each.key for each in found}) == len(items)
    assert len({each.content_digest for each in found}) == 1
    assert found[3].clip is not None
    assert found[3].clip.timestamps_s == tuple(range(8))
    assert found[-1].grid.t == 3


async def test_a_prefetched_clip_is_announced_with_its_rows(rig: Rig) -> None:
    item, colours = clip(7)
    announced = await rig.pipeline.prefetch(item)
    assert announced.grid == Grid(7, SIDE, SIDE)
    assert announced.num_rows == len(rows_of(colours))
    delivered = await rig.pipeline.fetch(announced.key)
    assert torch.equal(delivered.encoded.rows, rows_of(colours))
