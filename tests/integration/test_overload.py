"""Two hundred calls at once of a small service, with and without a gateway's routing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from lm_adapter import AsyncVisionEncoderClient, EncodedRows, EncoderOverloaded, ImageItem, PrefetchStatus
from tests.integration.conftest import Serve

NUM_ITEMS = 200
SIDE = 64
ITEM_PATCHES = 256
"""Of the smallest image that the model's processor makes."""


def images(first: int) -> list[ImageItem]:
    pixels = np.random.default_rng(first).integers(0, 255, (NUM_ITEMS, SIDE, SIDE, 3), dtype=np.uint8)
    return [ImageItem.from_array(array) for array in pixels]


@pytest.mark.parametrize("fleet", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_an_unbounded_gather_over_a_small_service_gets_all_rows(serve: Serve, fleet: bool) -> None:
    limits = dict.fromkeys(("max_patches_per_item", "max_clip_patches"), ITEM_PATCHES)
    limits["max_queued_patches"] = 8 * ITEM_PATCHES

    async def scenario(target: str) -> None:
        async with AsyncVisionEncoderClient(target, fleet=fleet, timeout_s=120) as client:
            outcomes = await asyncio.gather(*map(client.encode, images(0)))
            assert [type(outcome) for outcome in outcomes] == [EncodedRows] * NUM_ITEMS
            statuses = await asyncio.gather(*(client.prefetch([item]) for item in images(1)))
            keys = [status.key for (status,) in statuses if isinstance(status, PrefetchStatus)]
            assert len(keys) == NUM_ITEMS
            rows = await client.fetch(keys)
            assert [type(outcome) for outcome in rows] == [EncodedRows] * NUM_ITEMS
        async with AsyncVisionEncoderClient(target, fleet=fleet, waits=False) as client:
            refused = await asyncio.gather(*map(client.encode, images(2)), return_exceptions=True)
            assert {type(outcome) for outcome in refused} == {EncodedRows, EncoderOverloaded}

    with serve(**limits) as service:
        asyncio.run(scenario(service.target))
