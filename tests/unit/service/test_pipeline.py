"""The pipeline without a wire: identity, lookup, single-flight, cancellation, draining, namespaces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
import torch

from bench.harness.waiting import wait_until
from encoder_service.errors import (
    DeadlineExceeded,
    Draining,
    ImageTooLarge,
    InvalidDigest,
    InvalidOption,
    QueueFull,
    UndecodableImage,
    UnknownKey,
    UnsupportedContent,
)
from encoder_service.inflight import InFlightEncode
from encoder_service.ingest.preprocessor import OpenItem
from encoder_service.pipeline import holder_of
from encoder_service.scheduler.admission import UndeliveredBytes
from encoder_service.types import (
    CacheTier,
    DigestOnly,
    EncodedFile,
    EncodedItem,
    FrameItem,
    Grid,
    Item,
    LoadedPixels,
    Modality,
    PixelValues,
    PreprocessOptions,
)
from tests.fakes import PATCH_DIM, fake_image
from tests.unit.service.rig import Rig, image, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as rig:
        yield rig


async def test_miss_then_hit_gives_the_same_rows(rig: Rig) -> None:
    first = await rig.pipeline.encode(image())
    second = await rig.pipeline.encode(image())
    assert (first.tier, second.tier) == (CacheTier.MISS, CacheTier.HOST)
    assert torch.equal(first.encoded.rows, second.encoded.rows)
    assert first.encoded.key == second.encoded.key
    assert (rig.fake.num_opened, rig.fake.num_loads) == (1, 1)
    assert first.timings.decode_ms == 1.0
    assert first.timings.resize_ms == 2.0
    assert first.timings.tower_ms > 0
    assert second.timings.tower_ms == 0.0


async def test_p15_concurrent_callers_share_one_encode(rig: Rig) -> None:
    rig.fake.gate.clear()
    callers = [asyncio.ensure_future(rig.pipeline.encode(image())) for _ in range(20)]
    await until(lambda: rig.pipeline.inflight.num_joined == 19)
    rig.fake.gate.set()
    results = await asyncio.gather(*callers)
    assert rig.fake.num_loads == 1
    assert sorted(result.tier.value for result in results) == ["in_flight"] * 19 + ["miss"]
    assert len({result.encoded.rows.data_ptr() for result in results}) == 1
    observed = rig.metrics.registry.get_sample_value
    for stage, times in (("decode", 1.0), ("tower", 1.0), ("total", 20.0)):
        assert observed("ve_stage_seconds_count", {"stage": stage}) == times


async def test_p17_no_new_encode_while_callers_leave_too_much_unread(rig: Rig) -> None:
    held = (await rig.pipeline.encode(image(1))).encoded
    undelivered = rig.pipeline.undelivered = UndeliveredBytes(held.spec.num_bytes)
    for _ in range(2):
        undelivered.add(held, held.spec.num_bytes, holder_of(""))
    assert undelivered.num_bytes == held.spec.num_bytes
    with pytest.raises(QueueFull, match=f"{held.spec.num_bytes} bytes of rows wait to be read"):
        await rig.pipeline.encode(image(2))
    assert (await rig.pipeline.encode(image(1))).tier is CacheTier.HOST
    undelivered.remove(held, held.spec.num_bytes)
    assert undelivered.num_bytes == held.spec.num_bytes
    undelivered.remove(held, held.spec.num_bytes)
    assert (await rig.pipeline.encode(image(2))).tier is CacheTier.MISS


async def test_p15_the_encode_goes_on_when_the_first_caller_leaves(rig: Rig) -> None:
    rig.fake.gate.clear()
    first = asyncio.ensure_future(rig.pipeline.encode(image()))
    await until(lambda: rig.fake.num_loads == 1)
    second = asyncio.ensure_future(rig.pipeline.encode(image()))
    await until(lambda: rig.pipeline.inflight.num_joined == 1)
    first.cancel()
    rig.fake.gate.set()
    assert (await second).tier is CacheTier.IN_FLIGHT
    assert rig.fake.num_loads == 1


async def test_p17_cancelled_items_never_pile_up_behind_a_long_batch(rig: Rig) -> None:
    rig.tower.gate.clear()
    blocker = asyncio.ensure_future(rig.pipeline.encode(image(1)))
    await until(lambda: rig.tower.num_entered)
    for value in range(2, 5):
        caller = asyncio.ensure_future(rig.pipeline.encode(image(value)))
        await until(lambda: len(rig.planner) == 1)
        caller.cancel()
        await until(lambda: rig.pipeline.admission.num_patches == 16)
        assert len(rig.planner) == 0
    rig.tower.gate.set()
    await blocker


async def test_p34_headers_are_read_on_workers(rig: Rig) -> None:
    """A hostile header of a small file takes 100 ms."""
    threads: list[threading.Thread] = []
    original = rig.fake.open_image

    def open_image(data: bytes, options: PreprocessOptions) -> OpenItem:
        threads.append(threading.current_thread())
        return original(data, options)

    rig.fake.open_image = open_image  # type: ignore[method-assign]
    (await rig.pipeline.encode(image())).release()
    assert threads
    assert threading.current_thread() not in threads


async def test_pixels_that_disagree_with_the_header_fail_the_item(rig: Rig) -> None:
    frames = FrameItem(torch.zeros(1, 40, 40, 3, dtype=torch.uint8), Grid(1, 40, 40))
    opened = OpenItem(Grid(1, 4, 4), 1, lambda: LoadedPixels(frames, 0.0, 0.0))
    rig.preprocessor.open = lambda item: opened  # type: ignore[method-assign]
    with pytest.raises(
        UndecodableImage, match=r"header gives grid \(1, 4, 4\), its pixels give \(1, 40, 40\)"
    ):
        await rig.pipeline.encode(image())


async def test_a_caller_who_comes_back_at_once_starts_a_new_encode(rig: Rig) -> None:
    rig.fake.gate.clear()
    first = asyncio.ensure_future(rig.pipeline.encode(image()))
    await until(lambda: rig.fake.num_loads == 1)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.ensure_future(rig.pipeline.encode(image()))
    await asyncio.sleep(0.01)
    rig.fake.gate.set()
    assert (await second).tier is CacheTier.MISS


async def test_p10_the_callers_digest_is_authoritative_inside_its_namespace(rig: Rig) -> None:
    digest = bytes(range(32))
    first = await rig.pipeline.encode(image(1, content_digest=digest))
    second = await rig.pipeline.encode(image(2, content_digest=digest))
    other = await rig.pipeline.encode(image(2, content_digest=digest), namespace="other")
    assert first.encoded.content_digest == digest
    assert second.tier is CacheTier.HOST
    assert torch.equal(first.encoded.rows, second.encoded.rows)
    assert other.tier is CacheTier.MISS
    assert other.encoded.key != first.encoded.key


async def test_p18_no_namespace_sees_anothers_keys(rig: Rig) -> None:
    held = await rig.pipeline.encode(image(), namespace="a")
    key = held.encoded.key
    assert isinstance(rig.pipeline.lookup(key, namespace="a"), EncodedItem)
    assert rig.pipeline.lookup(key, namespace="b") is None
    with pytest.raises(UnknownKey):
        await rig.pipeline.fetch(key, namespace="b")


async def test_digest_only_is_served_from_the_store_or_fails(rig: Rig) -> None:
    digest = bytes(32)
    wanted = Item(Modality.IMAGE, DigestOnly(), digest)
    with pytest.raises(UnknownKey):
        await rig.pipeline.encode(wanted)
    await rig.pipeline.encode(image(content_digest=digest))
    assert (await rig.pipeline.encode(wanted)).tier is CacheTier.HOST
    with pytest.raises(InvalidDigest, match="needs a content_digest"):
        await rig.pipeline.encode(Item(Modality.IMAGE, DigestOnly()))


async def test_fetch_waits_for_an_encode_in_flight_and_serves_what_is_held(rig: Rig) -> None:
    rig.fake.gate.clear()
    announced = await rig.pipeline.prefetch(image())
    assert announced.grid == Grid(1, 4, 4)
    assert announced.spec.num_rows == 4
    assert isinstance(rig.pipeline.lookup(announced.key), InFlightEncode)
    fetching = asyncio.ensure_future(rig.pipeline.fetch(announced.key))
    await asyncio.sleep(0.01)
    rig.fake.gate.set()
    assert (await fetching).tier is CacheTier.IN_FLIGHT
    assert (await rig.pipeline.fetch(announced.key)).tier is CacheTier.HOST
    assert not (await rig.pipeline.prefetch(image())).rows.is_meta
    with pytest.raises(UnknownKey):
        await rig.pipeline.fetch(bytes(32))
    with pytest.raises(InvalidDigest, match="key has 3 bytes, needs 32"):
        await rig.pipeline.fetch(b"abc")


async def test_a_prefetch_outlives_the_callers_that_joined_it(rig: Rig) -> None:
    rig.fake.gate.clear()
    announced = await rig.pipeline.prefetch(image())
    joined = asyncio.ensure_future(rig.pipeline.encode(image()))
    await until(lambda: rig.pipeline.inflight.num_joined == 1)
    joined.cancel()
    await asyncio.sleep(0)
    rig.fake.gate.set()
    await until(lambda: isinstance(rig.pipeline.lookup(announced.key), EncodedItem))


async def test_a_prefetch_that_fails_early_says_so_and_later_is_quiet(rig: Rig) -> None:
    with pytest.raises(UndecodableImage):
        await rig.pipeline.prefetch(Item(Modality.IMAGE, EncodedFile(b"<html>")))
    rig.tower.fails_with = RuntimeError("late")
    await rig.pipeline.prefetch(image())
    await until(lambda: len(rig.pipeline.inflight) == 0)


async def test_failures_reach_every_caller_and_are_not_remembered(rig: Rig) -> None:
    bad = Item(Modality.IMAGE, EncodedFile(b"<html>"))
    results = await asyncio.gather(*(rig.pipeline.encode(bad) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, UndecodableImage) for result in results)
    with pytest.raises(UndecodableImage):
        await rig.pipeline.encode(bad)
    assert rig.fake.num_opened == 2


async def test_a_joined_encode_keeps_the_later_deadline(rig: Rig) -> None:
    rig.fake.gate.clear()
    soon = asyncio.ensure_future(rig.pipeline.encode(image(), deadline_s=time.monotonic() + 0.05))
    # Joins in the turn of the loop in which the encode begins, however late that is.
    patient = asyncio.ensure_future(rig.pipeline.encode(image()))
    with pytest.raises(DeadlineExceeded):
        await soon
    rig.fake.gate.set()
    assert (await patient).tier is CacheTier.IN_FLIGHT


@pytest.mark.parametrize("deadline_s", [None, 600.0])
async def test_a_caller_does_not_join_what_was_dropped_for_an_earlier_deadline(
    rig: Rig, deadline_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is late: the deadline passes by the engine's clock alone."""
    ahead_s = 0.0
    monkeypatch.setattr(rig.engine, "_clock", lambda: time.monotonic() + ahead_s)
    rig.tower.gate.clear()
    blocker = asyncio.ensure_future(rig.pipeline.encode(image(1)))
    await until(lambda: rig.tower.num_entered)
    soon_s = time.monotonic() + 60
    soon = asyncio.ensure_future(rig.pipeline.encode(image(2), deadline_s=soon_s))
    await until(lambda: len(rig.planner) == 1)
    ahead_s = 100.0
    rig.tower.gate.set()
    wait_until(lambda: rig.engine.counters.dropped_items, "the drop")
    late = None if deadline_s is None else time.monotonic() + deadline_s
    patient = asyncio.ensure_future(rig.pipeline.encode(image(2), deadline_s=late))
    with pytest.raises(DeadlineExceeded):
        await soon
    assert (await patient).tier is CacheTier.MISS
    await blocker


async def test_full_queues_refuse_at_once(rig: Rig) -> None:
    rig.tower.gate.clear()
    waiting = [asyncio.ensure_future(rig.pipeline.encode(image(value, side=16))) for value in range(4)]
    await until(lambda: rig.pipeline.admission.num_patches == 1024)
    with pytest.raises(QueueFull, match="holds 1024 patches of 1366, the item needs 16"):
        await rig.pipeline.encode(image(9))
    with pytest.raises(QueueFull, match="content bytes"):
        await rig.pipeline.encode(Item(Modality.IMAGE, EncodedFile(b"FAKE" + bytes(5000))))
    rig.tower.gate.set()
    await asyncio.gather(*waiting)
    assert (await rig.pipeline.encode(image(9))).tier is CacheTier.MISS


async def test_limits_and_wrong_items(rig: Rig) -> None:
    with pytest.raises(ImageTooLarge, match=r"has 1024 patches .* at most 512 are taken"):
        await rig.pipeline.encode(image(side=32))
    with pytest.raises(InvalidOption):
        await rig.pipeline.encode(image(options=PreprocessOptions(max_patches=3)))
    with pytest.raises(UnsupportedContent):
        await rig.pipeline.encode(Item(Modality.VIDEO, EncodedFile(fake_image(4, 4))))


async def test_a_grid_beyond_any_memory_is_too_large(rig: Rig) -> None:
    """No tensor can describe its rows."""
    pixels = PixelValues(torch.zeros(1, PATCH_DIM), Grid(1 << 31, 1 << 31, 1 << 31))
    with pytest.raises(ImageTooLarge, match="at most"):
        await rig.pipeline.encode(Item(Modality.IMAGE, pixels))


async def test_p37_draining_refuses_new_work_finishes_old_and_still_serves_what_is_held(rig: Rig) -> None:
    await rig.pipeline.encode(image(1))
    rig.fake.gate.clear()
    running = asyncio.ensure_future(rig.pipeline.encode(image(2)))
    await until(lambda: len(rig.pipeline.inflight) == 1)
    draining = asyncio.ensure_future(rig.pipeline.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await rig.pipeline.encode(image(3))
    assert (await rig.pipeline.encode(image(1))).tier is CacheTier.HOST
    rig.fake.gate.set()
    assert await draining
    assert (await running).tier is CacheTier.MISS


async def test_draining_cuts_off_what_outlives_the_grace(rig: Rig) -> None:
    rig.tower.gate.clear()
    running = asyncio.ensure_future(rig.pipeline.encode(image(2)))
    await until(lambda: len(rig.pipeline.inflight) == 1)
    assert not await rig.pipeline.drain(0.02)
    with pytest.raises(Draining, match="stopped before") as caught:
        await running
    assert caught.value.retryable
