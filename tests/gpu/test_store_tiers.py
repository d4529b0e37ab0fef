"""The store with a device arena and pinned host memory behind it, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from encoder_service.store.arena import Arena, TierName
from encoder_service.store.cuda_memory import CudaMemory
from encoder_service.store.embedding_store import EmbeddingStore, Partition
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import EncodedItem, Grid
from tests.unit.store.arenas import settle
from tests.unit.store.integrity import check_store

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

CUDA = torch.device("cuda:0")
NUM_BYTES = 4 << 20
NUM_ITEMS = 12


async def test_p14_p20_rows_are_bit_equal_on_their_way_through_the_tiers() -> None:
    """Written on the device, copied to pinned host memory ahead of their eviction, and copied back."""
    store = EmbeddingStore(
        Partition(
            Arena(HostMemory(2 * NUM_ITEMS * NUM_BYTES, pin=True), max_slots=64),
            Arena(CudaMemory(8 * NUM_BYTES, CUDA), max_slots=64),
        ),
        on_copy_error=lambda error: pytest.fail(str(error)),
    )
    contents: dict[bytes, torch.Tensor] = {}
    for number in range(NUM_ITEMS):
        key = bytes([number]) * 32
        rows = torch.empty(NUM_BYTES // 4096, 2048, dtype=torch.bfloat16, device="meta")
        reservation = store.reserve("", EncodedItem(key, key, Grid(1, 2, 2), rows, 0))
        assert reservation is not None
        assert reservation.destination.is_cuda
        contents[key] = torch.randn(rows.shape, dtype=torch.bfloat16)
        reservation.destination.copy_(contents[key])
        torch.cuda.synchronize()
        store.commit(reservation).drop()
        await settle(store)
    tiers: tuple[TierName, ...] = ("host", "device")
    for key, expected in contents.items():
        held = store.hold("", key)
        assert held is not None
        for tier in tiers:
            held = await store.ensure_tier(held, "", tier)
            assert held.tier == tier
            assert torch.equal(held.item.rows.cpu(), expected)
        held.drop()
    counters = store.counters
    assert min(store.num_evictions, counters.copies_to_device, counters.copies_to_host) > 0
    store.freeze()
    store.wait_for_copies()
    check_store(store)
    store.close()
