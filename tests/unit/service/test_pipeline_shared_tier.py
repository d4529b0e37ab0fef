"""The pipeline with a tier that replicas share: when it is asked, by whom, and that it is never needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from encoder_service.errors import DeadlineExceeded, UnknownKey
from encoder_service.pipeline import Pipeline
from encoder_service.store.embedding_store import Held
from encoder_service.types import CacheTier, DigestOnly, EncodedItem, Grid, Item
from tests.unit.service.test_pipeline import Rig, image, until

pytestmark = pytest.mark.anyio


class DictTier:
    """gate: cleared, it answers nothing."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, bytes], EncodedItem] = {}
        self.looks: list[tuple[str, float | None]] = []
        self.puts: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, namespace: str, key: bytes, *, within_s: float | None = None) -> EncodedItem | None:
        self.looks.append((namespace, within_s))
        await self.gate.wait()
        return self.items.get((namespace, key))

    async def grids(
        self, namespace: str, keys: Sequence[bytes], *, within_s: float | None = None
    ) -> Mapping[bytes, Grid]:
        self.looks.append((namespace, within_s))
        return {key: self.items[namespace, key].grid for key in keys if (namespace, key) in self.items}

    def put(self, namespace: str, held: Held) -> None:
        self.puts.append(namespace)
        self.items[namespace, held.item.key] = held.item
        held.drop()

    async def stop(self) -> None:
        return None


def share(pipeline: Pipeline, tier: DictTier) -> None:
    pipeline.shared_tier = tier
    pipeline.__post_init__()


@pytest.fixture
async def rigs() -> AsyncIterator[tuple[Rig, Rig, DictTier]]:
    """Two replicas and what they share."""
    tier = DictTier()
    first, second = Rig(), Rig()
    for rig in (first, second):
        share(rig.pipeline, tier)
    yield first, second, tier
    tier.gate.set()
    for rig in (first, second):
        rig.preprocessor.gate.set()
        await rig.pipeline.drain(10)
        assert rig.engine.stop(10)
        rig.workers.shutdown()
        rig.pipeline.store.check_integrity()
        assert len(rig.pipeline.flights) == 0
        assert rig.pipeline.admission.num_bytes == rig.pipeline.admission.num_patches == 0


async def test_what_one_replica_made_the_other_does_not_make(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    made = await first.pipeline.encode(image())
    found = await second.pipeline.encode(image())
    again = await second.pipeline.encode(image())
    assert (made.tier, found.tier, again.tier) == (CacheTier.MISS, CacheTier.SHARED, CacheTier.HOST)
    assert torch.equal(found.encoded.rows, made.encoded.rows)
    assert (second.preprocessor.num_probes, second.preprocessor.num_loads, second.tower.batches) == (0, 0, [])
    assert tier.puts == [""]
    assert len(tier.looks) == 2
    assert found.timings.store_ms > 0


async def test_p15_concurrent_callers_share_one_look(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    await first.pipeline.encode(image())
    tier.looks.clear()
    tier.gate.clear()
    callers = [asyncio.ensure_future(second.pipeline.encode(image())) for _ in range(10)]
    await until(lambda: second.pipeline.flights.counters.joined == 9)
    tier.gate.set()
    results = await asyncio.gather(*callers)
    assert sorted(result.tier.value for result in results) == ["in_flight"] * 9 + ["shared"]
    assert len(tier.looks) == 1


async def test_p18_each_namespace_looks_for_its_own(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    await first.pipeline.encode(image(), namespace="a")
    assert (await second.pipeline.encode(image(), namespace="b")).tier is CacheTier.MISS
    assert [namespace for namespace, _ in tier.looks] == ["a", "b"]


async def test_a_caller_that_leaves_ends_the_look(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, _, tier = rigs
    tier.gate.clear()
    caller = asyncio.ensure_future(first.pipeline.encode(image()))
    await until(lambda: tier.looks)
    assert first.pipeline.admission.num_bytes > 0, "what waits is admitted by its bytes"
    caller.cancel()
    await asyncio.wait([caller])
    await until(lambda: not first.pipeline.admission.num_bytes)
    assert (first.preprocessor.num_probes, tier.puts) == (0, [])


async def test_a_look_leaves_time_for_the_encode(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, _, tier = rigs
    deadline_s = first.pipeline.clock() + 8.0
    await first.pipeline.encode(image(1), deadline_s=deadline_s)
    await first.pipeline.encode(image(2))
    (_, within_s), (_, unbounded) = tier.looks
    assert within_s is not None
    assert 3.0 < within_s <= 4.0
    assert unbounded is None
    tier.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await first.pipeline.encode(image(3), deadline_s=first.pipeline.clock() + 0.01)


async def test_a_prefetch_tells_the_grid_of_rows_that_were_found(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, _ = rigs
    made = await first.pipeline.encode(image())
    announced = await second.pipeline.prefetch(image())
    assert announced.grid == made.encoded.grid
    await until(lambda: len(second.pipeline.store))
    assert second.tower.batches == []


async def test_a_failed_encode_is_not_offered(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, _, tier = rigs
    first.tower.fails_with = RuntimeError("broken")
    with pytest.raises(Exception, match="broken"):
        await first.pipeline.encode(image())
    assert tier.puts == []


def unsent(item: Item, digest: bytes) -> Item:
    return replace(item, content=DigestOnly(), content_digest=digest)


async def test_a_digest_alone_finds_what_another_replica_made(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, _ = rigs
    made = await first.pipeline.encode(image())
    found = await second.pipeline.encode(unsent(image(), made.encoded.content_digest))
    assert found.tier is CacheTier.SHARED
    assert torch.equal(found.encoded.rows, made.encoded.rows)
    again = await second.pipeline.encode(unsent(image(), made.encoded.content_digest))
    assert again.tier is CacheTier.HOST, "it is kept from then on"
    assert second.tower.batches == []


async def test_a_key_alone_finds_what_another_replica_made(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    made = await first.pipeline.encode(image())
    tier.looks.clear()
    tier.gate.clear()
    fetches = [asyncio.ensure_future(second.pipeline.fetch(made.encoded.key)) for _ in range(3)]
    await until(lambda: second.pipeline.flights.counters.joined == 2)
    tier.gate.set()
    found = await asyncio.gather(*fetches)
    assert sorted(each.tier.value for each in found) == ["in_flight", "in_flight", "shared"]
    assert len(tier.looks) == 1
    assert all(torch.equal(each.encoded.rows, made.encoded.rows) for each in found)


async def test_what_nobody_has_is_unknown_after_one_look(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, _, tier = rigs
    with pytest.raises(UnknownKey, match="neither held"):
        await first.pipeline.fetch(b"k" * 32)
    with pytest.raises(UnknownKey):
        await first.pipeline.encode(unsent(image(), b"d" * 32), deadline_s=first.pipeline.clock() + 8.0)
    (_, unbounded), (_, within_s) = tier.looks
    assert unbounded is None
    assert within_s is not None
    assert within_s <= 4.0, "half of the time is its caller's, to send the content"


async def test_p18_a_key_finds_nothing_of_another_namespace(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    made = await first.pipeline.encode(image(), namespace="a")
    with pytest.raises(UnknownKey):
        await second.pipeline.fetch(made.encoded.key, namespace="b")
    assert await second.pipeline.lookup_shared([made.encoded.key], namespace="b") == {}
    found = await second.pipeline.lookup_shared([made.encoded.key, b"k" * 32], namespace="a")
    assert found == {made.encoded.key: made.encoded.grid}
    assert [namespace for namespace, _ in tier.looks[1:]] == ["b", "b", "a"]


@pytest.mark.parametrize("prefetches", [False, True])
async def test_content_that_comes_while_a_key_is_looked_for_is_encoded(
    rigs: tuple[Rig, Rig, DictTier], prefetches: bool
) -> None:
    """The look's flight knows of no content: who has it goes on alone when nothing was found."""
    first, _, tier = rigs
    digest = b"d" * 32
    item = replace(image(), content_digest=digest)
    tier.gate.clear()
    seeking = asyncio.ensure_future(first.pipeline.encode(unsent(item, digest)))
    await until(lambda: tier.looks)
    ask = first.pipeline.prefetch if prefetches else first.pipeline.encode
    sending = [asyncio.ensure_future(ask(item)) for _ in range(3)]
    await until(lambda: first.pipeline.flights.counters.joined == 3)
    tier.gate.set()
    with pytest.raises(UnknownKey):
        await seeking
    await asyncio.gather(*sending)
    await until(lambda: len(first.pipeline.store))
    assert len(first.tower.batches) == 1, "and once for all of them"


async def test_nothing_is_looked_for_while_the_service_leaves(rigs: tuple[Rig, Rig, DictTier]) -> None:
    first, second, tier = rigs
    made = await first.pipeline.encode(image())
    tier.looks.clear()
    assert await second.pipeline.drain(1)
    with pytest.raises(UnknownKey):
        await second.pipeline.fetch(made.encoded.key)
    assert tier.looks == []
