"""The adapter's clients and a whole service with a broker: rows through shared memory, unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lm_adapter import AsyncVisionEncoderClient, EncodedRows, ImageItem, VisionEncoderClient
from lm_adapter.transport import arenas
from tests.integration.conftest import RunningService, running
from tests.integration.images import photo
from tests.unit.transport.broker_rig import socket_folder, wait_until

SEEDS = (71, 72)


@pytest.fixture(scope="module")
def sharing(checkpoints: dict[str, Path], device: torch.device) -> Iterator[RunningService]:
    with (
        socket_folder() as folder,
        running(
            checkpoints["qwen3_vl"], device, broker_path=str(folder / "b.sock"), arena_bytes=8 << 20
        ) as found,
    ):
        yield found


def num_shared(sharing: RunningService) -> int:
    assert sharing.service.shared is not None
    return sharing.service.shared.counters.shared


def num_read(sharing: RunningService) -> int:
    """Rows that clients found by themselves, as far as they have told."""
    assert sharing.service.shared is not None
    return sharing.service.shared.broker.counters.read_unasked


def no_lease_is_left(sharing: RunningService) -> None:
    shared = sharing.service.shared
    assert shared is not None
    wait_until(lambda: len(shared.leases) == 0, "the return of every lease")
    sharing.on_loop(shared.leases.check_integrity)


def items() -> list[ImageItem]:
    return [ImageItem(photo(seed=seed)) for seed in SEEDS]


def test_rows_of_every_way_are_the_same(sharing: RunningService, shared_kind: str) -> None:
    with (
        VisionEncoderClient(sharing.target, timeout_s=60, transports=("inline",)) as inline,
        VisionEncoderClient(sharing.target, timeout_s=60) as client,
    ):
        expected = inline.encode(items())
        assert client.wait_transport().name == shared_kind
        before = num_shared(sharing) + num_read(sharing)
        for rows, same in zip(client.encode(items()), expected, strict=True):
            assert isinstance(rows, EncodedRows)
            assert isinstance(same, EncodedRows)
            assert torch.equal(rows.torch().cpu(), same.torch())
            with client.fetch([rows.key], borrow=True)[0] as borrowed:  # type: ignore[union-attr]
                assert torch.equal(borrowed.torch().cpu(), same.torch())
        wanted = before + 2 * len(SEEDS)
        wait_until(lambda: num_shared(sharing) + num_read(sharing) == wanted, "word of what was read")
    no_lease_is_left(sharing)
    assert arenas.num_attached() == 0


def test_the_async_client_and_two_readers(sharing: RunningService, shared_kind: str) -> None:
    async def main() -> None:
        async with (
            AsyncVisionEncoderClient(sharing.target, timeout_s=60) as first,
            AsyncVisionEncoderClient(sharing.target, timeout_s=60) as second,
        ):
            await first.wait_transport()
            rows = await first.encode_one(items()[0], num_readers=2)
            assert rows.shared is not None
            assert rows.shared.transport == shared_kind
            read = await second.read_shared(rows.shared, reader=1)
            assert torch.equal(read.torch(), rows.torch())

    asyncio.run(main())
    no_lease_is_left(sharing)
    assert arenas.num_attached() == 0
