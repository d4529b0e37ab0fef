"""Small stores on host memory, some of which stands for a GPU's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.embedding_store import EmbeddingStore, Location, Partition, PinnedRows, Reservation
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import ClipFacts, EncodedItem, Grid

ROW_BYTES = 1024
NUM_ROWS = 4
ITEM_BYTES = NUM_ROWS * ROW_BYTES


class DeviceLikeMemory(HostMemory):
    kind = "device"
    device_uuid = "GPU-00000000-0000-0000-0000-000000000000"


class Clock:
    """Seconds that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def host_arena(num_bytes: int, max_slots: int = 64) -> Arena:
    """With room for num_bytes beside the probe."""
    return Arena(HostMemory(PROBE_BYTES + num_bytes), max_slots=max_slots)


def device_arena(num_bytes: int, max_slots: int = 64) -> Arena:
    return Arena(DeviceLikeMemory(PROBE_BYTES + num_bytes), max_slots=max_slots)


def store_of(
    host_items: int,
    device_items: int = 0,
    *,
    isolated: tuple[str, ...] = (),
    clock: Callable[[], float] | None = None,
    on_copy_error: Callable[[Exception], bool] = lambda _: False,
    max_private_bytes: int = 1 << 30,
) -> EmbeddingStore:
    """Sizes in items of ITEM_BYTES; isolated namespaces have arenas of the same sizes."""

    def partition() -> Partition:
        device = device_arena(device_items * ITEM_BYTES) if device_items else None
        return Partition(host_arena(host_items * ITEM_BYTES), device, clock=clock or Clock())

    return EmbeddingStore(
        partition(),
        {name: partition() for name in isolated},
        on_copy_error=on_copy_error,
        max_private_bytes=max_private_bytes,
    )


def key_of(name: int) -> bytes:
    return name.to_bytes(4, "little") * 8


def rows_of(name: int, num_rows: int = NUM_ROWS) -> torch.Tensor:
    return torch.full((num_rows, ROW_BYTES // 4), float(name))


def expected(name: int, num_rows: int = NUM_ROWS, clip: ClipFacts | None = None) -> EncodedItem:
    """An item before its rows are there."""
    rows = torch.empty(num_rows, ROW_BYTES // 4, device="meta")
    return EncodedItem(key_of(name), bytes(32), Grid(1, 4, 4), rows, 1, clip)


def reserve(store: EmbeddingStore, item: EncodedItem, namespace: str = "") -> Reservation:
    reservation = store.reserve(namespace, item)
    assert reservation is not None
    return reservation


def land(store: EmbeddingStore, name: int, namespace: str = "", num_rows: int = NUM_ROWS) -> bool:
    """Does what the engine and the pipeline do. False if there is no room."""
    reservation = store.reserve(namespace, expected(name, num_rows))
    if reservation is None:
        return False
    reservation.destination.copy_(rows_of(name, num_rows))
    store.commit(reservation).drop()
    return True


def hold(store: EmbeddingStore, name: int, namespace: str = "") -> PinnedRows:
    held = store.hold(namespace, key_of(name))
    assert held is not None
    return held


def announce(store: EmbeddingStore, name: int) -> Location:
    held = hold(store, name)
    location = held.announce()
    held.drop()
    return location


async def settle(store: EmbeddingStore) -> None:
    """Waits until no copy is in progress."""
    while store.is_copying:  # noqa: ASYNC110  # the store has no event for it
        await asyncio.sleep(1e-4)
