"""Rows by lease on a device arena, end to end, with host memory in the GPU's place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from encoder_service.config import Settings
from encoder_service.errors import TransportUnavailable
from encoder_service.rpc import convert, unread
from encoder_service.store.partitions import PartitionedStore, open_partitions
from encoder_service.store.tiers import TieredStore
from encoder_service.transport import shared_memory
from lm_adapter import ImageItem, VisionEncoderClient
from tests.integration.images import photo
from tests.integration.test_service import figures
from tests.integration.test_shared_memory import Shared, sharing
from tests.unit.store.device_like import DeviceLikeMemory, device_like_arena
from tests.unit.transport.broker_rig import wait_until
from vision_encoder.v1 import encoder_pb2 as pb

DEVICE_BYTES = 1 << 20


@contextlib.contextmanager
def tiers_of_stand_in(
    checkpoints: dict[str, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Iterator[Shared]:
    if device.type != "cpu":
        pytest.skip("the stand-in is for machines without a GPU")

    def open_stand_in(settings: Settings) -> PartitionedStore:
        return open_partitions(device_like_arena, DEVICE_BYTES, settings.isolated_device_bytes)

    monkeypatch.setattr(shared_memory, "_open_device_partitions", open_stand_in)
    with sharing(checkpoints["qwen3_vl"], device, **settings) as found:
        yield found


@pytest.fixture
def tiered(
    checkpoints: dict[str, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shared]:
    with tiers_of_stand_in(checkpoints, device, monkeypatch) as found:
        yield found
        found.check()


def inline_rows(shared: Shared, images: list[bytes]) -> list[bytes]:
    with VisionEncoderClient(shared.service.target, timeout_s=60, transports=("inline",)) as client:
        return [client.encode_one(ImageItem(image)).payload.tobytes() for image in images]


def test_rows_are_leased_where_the_engine_wrote_them(tiered: Shared) -> None:
    images = [photo(96, 64), photo(320, 160), photo(64, 64)]
    store = tiered.memory.store
    assert isinstance(store, TieredStore)
    with tiered.client() as client:
        outcomes = client.encode(images, pb.DELIVERY_DEVICE_LEASE)
        assert [each.result.WhichOneof("rows") for each in outcomes] == ["lease"] * 3
        assert all(each.result.lease.device_uuid == DeviceLikeMemory.device_uuid for each in outcomes)
        assert all(not each.inline for each in outcomes)
        assert len(store.host) == 0, "nothing asked for them on the host"
        read = [client.read(each.result) for each in outcomes]
        assert read == inline_rows(tiered, images)
        assert len(store.host) == 3
        again = client.encode(images, pb.DELIVERY_DEVICE_LEASE)
        assert [each.result.tier for each in again] == [pb.CACHE_TIER_DEVICE] * 3
        hosted = client.encode(images)
        assert [each.result.WhichOneof("rows") for each in hosted] == ["host"] * 3
        assert [client.read(each.result) for each in hosted] == read
        leases = [each.result.lease.lease_id for each in (*outcomes, *again)]
        leases += [each.result.host.lease_id for each in hosted]
        assert client.release(*leases).num_released == 9


def test_both_ways_are_announced_and_exported(tiered: Shared) -> None:
    with tiered.client() as client:
        info = client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)
        assert [each.delivery for each in info.transports] == [
            pb.DELIVERY_INLINE,
            pb.DELIVERY_DEVICE_LEASE,
            pb.DELIVERY_HOST_SHM,
        ]
        before = figures(tiered.service)
        (outcome,) = client.encode([photo()], pb.DELIVERY_DEVICE_LEASE)
        after = figures(tiered.service)
        used = 've_device_arena_slots{namespace=""}'
        assert after[used] == before[used] + 1
        assert after["ve_leases"] == 1
        client.release(outcome.result.lease.lease_id)


def test_rows_come_back_from_the_host(tiered: Shared) -> None:
    """Beyond what the device holds: spilled ahead, found on the host, promoted for a reader on a GPU."""
    images = [photo(256, 256) for _ in range(24)]
    store = tiered.memory.store
    assert isinstance(store, TieredStore)
    with tiered.client() as client:
        read = []
        for image in images:
            (outcome,) = client.encode([image], pb.DELIVERY_DEVICE_LEASE)
            assert outcome.result.WhichOneof("rows") == "lease"
            read.append(client.read(outcome.result))
            client.release(outcome.result.lease.lease_id)
        assert store.device.counters.evictions > 0
        num_encoded = figures(tiered.service)["ve_encoded_items_total"]
        for image, expected in zip(images, read, strict=True):
            (outcome,) = client.encode([image], pb.DELIVERY_DEVICE_LEASE)
            assert (outcome.inline or client.read(outcome.result)) == expected
            if outcome.result.WhichOneof("rows") == "lease":
                client.release(outcome.result.lease.lease_id)
    assert store.tier_counters.spilled > 0
    assert store.tier_counters.promoted > 0
    assert figures(tiered.service)["ve_encoded_items_total"] == num_encoded, "nothing was encoded twice"


def test_p17_a_device_arena_full_of_leases_delivers_all_the_same(tiered: Shared) -> None:
    images = [photo(256, 256) for _ in range(24)]
    expected = inline_rows(tiered, images)
    with tiered.client() as client:
        outcomes = client.encode(images, pb.DELIVERY_DEVICE_LEASE)
        kinds = {each.result.WhichOneof("rows") for each in outcomes}
        assert kinds == {"lease", "inline"}
        for outcome, right in zip(outcomes, expected, strict=True):
            assert (outcome.inline or client.read(outcome.result)) == right


def test_p25_many_clients_of_both_ways_at_once(tiered: Shared) -> None:
    images = [photo(128, 256) for _ in range(16)]
    expected = inline_rows(tiered, images)
    ways = (pb.DELIVERY_DEVICE_LEASE, pb.DELIVERY_HOST_SHM, pb.DELIVERY_INLINE)

    def work(worker: int) -> None:
        with tiered.client() as client:
            for turn in range(8):
                picked = [(worker * 5 + turn * 7 + each) % len(images) for each in range(3)]
                found = client.encode(
                    [images[index] for index in picked], ways[(worker + turn) % 3], lease_ms=2000
                )
                for index, outcome in zip(picked, found, strict=True):
                    assert not outcome.failure.reason
                    assert (outcome.inline or client.read(outcome.result)) == expected[index]
                    rows = outcome.result
                    if (turn + index) % 4 and rows.WhichOneof("rows") in ("lease", "host"):
                        client.release(rows.lease.lease_id or rows.host.lease_id)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_p21_leases_on_the_device_end_with_their_client(tiered: Shared) -> None:
    with tiered.client() as leaver:
        leaver.encode([photo(), photo()], pb.DELIVERY_DEVICE_LEASE)
        assert len(tiered.leases) == 2
    wait_until(lambda: len(tiered.leases) == 0, "the end of the leaver's leases")


def test_rows_beyond_an_owners_leases_come_inline_from_the_host(
    checkpoints: dict[str, Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are cut on the host: rows of a GPU have to be brought there when no lease is given on them."""
    with tiers_of_stand_in(checkpoints, device, monkeypatch, max_leases_per_client=1) as found:
        cut: list[torch.Tensor] = []
        chunk_events = convert.chunk_events

        def note(index: int, rows: torch.Tensor, chunk_bytes: int) -> Iterator[bytes]:
            cut.append(rows)
            return chunk_events(index, rows, chunk_bytes)

        monkeypatch.setattr(convert, "chunk_events", note)
        images = [photo(96, 64), photo(320, 160), photo(64, 64)]
        with found.client() as client:
            outcomes = client.encode(images, pb.DELIVERY_DEVICE_LEASE)
            assert sorted(str(each.result.WhichOneof("rows")) for each in outcomes) == [
                "inline",
                "inline",
                "lease",
            ]
            read = [each.inline or client.read(each.result) for each in outcomes]
            store = found.memory.store
            assert isinstance(store, TieredStore)
            (device_arena,) = (part.arena for part in store.device.parts())
            memory = device_arena._memory.tensor
            ends = memory.data_ptr() + memory.nbytes
            assert len(cut) == 2
            assert not [rows for rows in cut if memory.data_ptr() <= rows.data_ptr() < ends]
            assert store.tier_counters.lowered == 2
        assert read == inline_rows(found, images)
        found.check()


def test_p25_a_connection_that_ends_amid_a_large_call_fails_its_items_and_ends_the_call(
    tiered: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that could not be leased are read by nobody, and make room for the items that still wait."""
    monkeypatch.setattr(unread, "UNREAD_BYTES_PER_CALL", 1)
    refused = 0

    def refuse(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise TransportUnavailable("the connection ended")

    images = [photo(64, 64) for _ in range(4)]
    with tiered.client() as client:
        client.encode(images, pb.DELIVERY_INLINE)
        monkeypatch.setattr(tiered.memory, "lease", refuse)
        outcomes = client.encode(images, pb.DELIVERY_DEVICE_LEASE)
        assert [each.failure.reason for each in outcomes] == ["TRANSPORT_UNAVAILABLE"] * 4
    assert refused == 4
