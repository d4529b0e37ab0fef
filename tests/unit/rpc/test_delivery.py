"""How rows are delivered: as a place in an arena, or inline."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from encoder_service.rpc import delivery
from encoder_service.rpc.delivery import Delivery, LossRate, RowsRequest
from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import EmbeddingStore, Partition
from encoder_service.types import CacheTier
from tests.reference_reader import reader_of
from tests.unit.service.rig import Rig, image, running
from tests.unit.store.arenas import Clock, device_arena, host_arena

pytestmark = pytest.mark.anyio

# ``image`` with side 16 gives 64 rows of 16 float32.
ITEM_BYTES = 4096
DEVICE = RowsRequest("", "device", False)
AGAIN = RowsRequest("", "host", True)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """With room for eight items on the host and four on the device."""
    partition = Partition(host_arena(8 * ITEM_BYTES), device_arena(4 * ITEM_BYTES))
    async with running(Rig(EmbeddingStore(partition, on_copy_error=lambda error: False))) as rig:
        yield rig
    rig.store.close()


@pytest.fixture
def found(rig: Rig) -> Delivery:
    return Delivery(rig.pipeline, rig.metrics)


def sample(rig: Rig, name: str, **labels: str) -> float:
    return rig.metrics.registry.get_sample_value(name, labels) or 0.0


async def is_placed(rig: Rig, found: Delivery, namespace: str = "") -> bool:
    """Whether a caller that has mapped the host arena gets a place."""
    encoded = await rig.pipeline.encode(image(3, side=16), namespace=namespace)
    delivered, place = await found.prepare(encoded, RowsRequest(namespace, "host", False))
    delivered.release()
    return place is not None


@pytest.mark.parametrize("tier", ["host", "device"])
async def test_rows_have_a_place_where_their_caller_reads(rig: Rig, found: Delivery, tier: TierName) -> None:
    delivered, place = await found.prepare(
        await rig.pipeline.encode(image(3, side=16)), RowsRequest("", tier, False)
    )
    assert place is not None
    assert place.tier == delivered.held.tier == tier
    (arena,) = (arena for _, arena in rig.store.arenas() if arena.kind == tier)
    assert (place.arena_id, place.instance) == (arena.arena_id, arena.instance)
    rows = delivered.encoded.rows.clone()
    delivered.release()
    assert rig.store.num_unread() == 1, "announced rows are evicted last, though nothing holds them"
    with reader_of(arena) as reader:
        copied = reader.data[place.offset_bytes : place.offset_bytes + ITEM_BYTES]
        assert reader.is_current(place.slot_index, place.generation)
    assert torch.equal(torch.frombuffer(bytearray(copied), dtype=torch.float32).view(64, 16), rows)
    rig.store.touch("", delivered.encoded.key, place.generation)
    assert rig.store.num_unread() == 0


async def test_inline_rows_are_in_host_memory(rig: Rig, found: Delivery) -> None:
    delivered, place = await found.prepare(
        await rig.pipeline.encode(image(3, side=16)), RowsRequest("", None, False)
    )
    assert place is None
    assert delivered.held.tier == "host"
    assert sample(rig, "ve_inline_fallbacks_total", reason="large") == 0
    delivered.release()


async def test_items_above_a_quarter_of_the_arena_go_inline(
    rig: Rig, found: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.store.max_announced_bytes("device") >= ITEM_BYTES
    monkeypatch.setattr(EmbeddingStore, "max_announced_bytes", lambda *_: ITEM_BYTES - 1)
    delivered, place = await found.prepare(await rig.pipeline.encode(image(3, side=16)), DEVICE)
    assert place is None
    assert delivered.held.tier == "host"
    assert sample(rig, "ve_inline_fallbacks_total", reason="large") == 1
    delivered.release()


async def test_rows_without_room_go_inline(rig: Rig, found: Delivery) -> None:
    held = [await rig.pipeline.encode(image(value, side=16)) for value in range(1, 5)]
    assert {each.held.tier for each in held} == {"device"}
    other = await rig.pipeline.encode(image(9, side=16))
    assert other.held.tier == "host", "callers hold the device arena"
    delivered, place = await found.prepare(other, DEVICE)
    assert place is None
    assert sample(rig, "ve_inline_fallbacks_total", reason="no_room") == 1
    for each in (*held, delivered):
        each.release()


async def test_p21_after_a_lost_read_rows_come_inline_and_are_counted(rig: Rig, found: Delivery) -> None:
    first, place = await found.prepare(await rig.pipeline.encode(image(3, side=16)), AGAIN)
    assert (place, first.tier) == (None, CacheTier.MISS)
    assert sample(rig, "ve_encodes_repeated_total") == 1
    second, place = await found.prepare(await rig.pipeline.encode(image(3, side=16)), AGAIN)
    assert (place, second.tier) == (None, CacheTier.DEVICE)
    assert sample(rig, "ve_encodes_repeated_total") == 1
    for each in (first, second):
        each.release()


async def test_p18_losses_of_one_namespace_leave_the_others_as_they_are(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.pipeline, "clock", Clock())
    found = Delivery(rig.pipeline, rig.metrics)

    assert await is_placed(rig, found, "a")
    found.count_reads("a", 0, 1)
    assert not await is_placed(rig, found, "a")
    assert await is_placed(rig, found, "b")
    for _ in range(100):
        assert await is_placed(rig, found, "b")
    found.count_reads("b", 0, 1)
    assert await is_placed(rig, found, "b"), "its own reads count, not those lost elsewhere"


async def test_p17_losses_are_kept_of_a_bounded_number_of_namespaces(
    rig: Rig, found: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "MAX_NAMESPACES", 2)
    for namespace in ("a", "b", "a", "c"):
        found.count_reads(namespace, 0, 1)
    assert not await is_placed(rig, found, "a")
    assert await is_placed(rig, found, "b"), "used the longest ago, and forgotten"


def test_losses_count_against_the_places_of_this_second_and_the_last() -> None:
    clock = Clock()
    losses = LossRate(clock)
    for _ in range(200):
        losses.count_announced()
    clock.now_s += 1.0
    losses.count_reported(0, 2)
    assert not losses.is_high()
    losses.count_reported(0, 1)
    assert losses.is_high()
    clock.now_s += 2.5
    assert not losses.is_high()
    losses.count_reported(0, 1)
    assert losses.is_high(), "nothing was placed for two seconds"
