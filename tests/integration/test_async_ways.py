"""Asyncio calls that wait for all their rows and those that take them as they come: the same rows, by the
same ways, at the same price."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_adapter import AsyncVisionEncoderClient, DigestItem, ImageItem, Item, ItemFailed, Outcome
from tests.integration.images import photo
from tests.integration.test_directory_reads import Told
from tests.integration.test_resident_rows import new_item, rows_of, same
from tests.integration.test_shared_memory import Shared, sharing


@pytest.fixture(scope="module")
def module_shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Shared]:
    with sharing(checkpoints["qwen3_vl"], device, device_arena_bytes=0) as found:
        yield found


@pytest.fixture
def shared(module_shared: Shared) -> Iterator[Shared]:
    yield module_shared
    module_shared.check()


async def as_they_come(client: AsyncVisionEncoderClient, items: list[Item], options: Any) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    async with aclosing(client.encode_iter(items, **options)) as stream:
        async for index, outcome in stream:
            assert index not in found
            found[index] = outcome
    return [found[index] for index in range(len(items))]


async def whole(client: AsyncVisionEncoderClient, items: list[Item], options: Any) -> list[Outcome]:
    return await client.encode(items, **options)


WAYS = (whole, as_they_come)


def ends(outcome: Outcome) -> object:
    if isinstance(outcome, ItemFailed):
        return type(outcome), outcome.reason, outcome.message
    outcome.confirm()
    return outcome.key, outcome.grid_thw, outcome.reading is None


@pytest.mark.parametrize("borrow", [False, True], ids=["copied", "borrowed"])
@pytest.mark.parametrize("directory", [True, False], ids=["directory", "lease"])
@pytest.mark.parametrize("num_known", [0, 1, 2], ids=["miss", "mixed", "hit"])
def test_hits_and_misses(shared: Shared, num_known: int, directory: bool, borrow: bool) -> None:
    async def main() -> None:
        found, figures = [], []
        async with AsyncVisionEncoderClient(
            shared.service.target, timeout_s=60, directory=directory, hash_items="off"
        ) as client:
            await client.wait_transport()
            for way in WAYS:
                items: list[Item] = [new_item(), new_item()]
                if num_known:
                    await client.encode(items[:num_known])
                num_reads = num_known if directory and not borrow else 0
                with Told(shared, num_reads) as counted:
                    outcomes = await way(client, items, {"borrow": borrow})
                    for outcome in outcomes:
                        ends(outcome)
                    await asyncio.sleep(0)
                figures.append({name: count for name, count in counted.items() if name != "release"})
                found.append([(rows_of(rows).grid_thw, rows_of(rows).reading is None) for rows in outcomes])
        assert figures[0] == figures[1]
        assert found[0] == found[1]

    asyncio.run(main())


def test_failures_of_items_and_rows_of_their_neighbours(shared: Shared) -> None:
    item = new_item()
    items = [ImageItem(b"no image"), item, DigestItem(bytes(32)), ImageItem(photo(), digest=b"short")]

    async def main() -> None:
        async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60) as client:
            await client.wait_transport()
            await client.encode_one(item)
            one, other = [await way(client, list(items), {}) for way in WAYS]
            assert [ends(outcome) for outcome in one] == [ends(outcome) for outcome in other]
            same(one[1], other[1])
            with pytest.raises(ItemFailed) as failed:
                await client.encode_one(items[0])
            assert ends(failed.value) == ends(one[0])

    asyncio.run(main())


def test_no_items_are_no_call(shared: Shared) -> None:
    async def main() -> None:
        async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60) as client:
            for way in WAYS:
                assert await way(client, [], {}) == []
            assert await client.fetch([]) == []

    asyncio.run(main())
