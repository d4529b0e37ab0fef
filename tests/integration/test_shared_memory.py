"""Rows in shared memory, end to end: a service with a broker, and the adapter's clients.

Places and the directory, loss and its one repetition, isolated namespaces, the encoder's end. On a CPU the
arenas are host memory; ``--device cuda:0`` runs the same on device memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.harness.waiting import wait_until
from lm_adapter import (
    EncoderError,
    ImageItem,
    ItemFailed,
    VisionEncoderClient,
)
from tests.integration.conftest import RunningService, Serve, connected, tokens_file
from tests.integration.held import wait_until_free
from tests.integration.images import photo
from tests.reference_reader import reader_of
from tests.unit.transport.broker_rig import socket_folder
from vision_encoder.v1 import encoder_pb2 as pb


@pytest.fixture
def socket_path() -> Iterator[str]:
    with socket_folder() as folder:
        yield str(folder / "b.sock")


@pytest.fixture
def sharing(serve: Serve, socket_path: str) -> Iterator[RunningService]:
    with serve(broker_path=socket_path, arena_bytes=16 << 20) as found:
        yield found
        wait_until_free(found)


def attached(service: RunningService, **options: object) -> VisionEncoderClient:
    client = VisionEncoderClient(service.target, timeout_s=60, **options)  # type: ignore[arg-type]
    assert client.wait_transport(30).name != "inline"
    return client


def rows_of(client: VisionEncoderClient, data: bytes) -> bytes:
    rows = client.encode_one(ImageItem(data))
    return np.ascontiguousarray(rows.torch().cpu().numpy()).tobytes()


def test_rows_of_every_way_are_the_same(sharing: RunningService, shared_kind: str) -> None:
    files = [photo(96 + 32 * index, 64) for index in range(4)]
    with attached(sharing) as shared, VisionEncoderClient(sharing.target, transports=("inline",)) as inline:
        placed = [rows_of(shared, data) for data in files]
        asked = sharing.metric('ve_requests_total{method="Encode"')
        assert [rows_of(shared, data) for data in files] == placed, "by the directory"
        assert sharing.metric('ve_requests_total{method="Encode"') == asked, "without a call"
        assert [rows_of(inline, data) for data in files] == placed
        wait_until(lambda: sharing.metric("ve_directory_reads_total") == 8)
    assert sharing.metric(f've_deliveries_total{{transport="{shared_kind}"}}') == 4
    assert sharing.service.store is not None
    assert sharing.on_loop(sharing.service.store.num_unread) == 0


def test_p18_isolated_namespaces_have_arenas_of_their_own(
    serve: Serve, socket_path: str, tmp_path: Path
) -> None:
    token = secrets.token_hex(16)
    with serve(
        broker_path=socket_path,
        arena_bytes=8 << 20,
        isolated_namespaces=f"tenant={4 << 20}",
        tokens_file=tokens_file(tmp_path, f"tenant={token}"),
    ) as found:
        data = photo()
        with (
            attached(found, namespace="tenant", token=token) as tenant,
            attached(found) as other,
        ):
            assert rows_of(tenant, data) == rows_of(other, data)
            store = found.service.store
            assert store is not None
            num_items = {
                namespace: sum(len(arena) for name, arena in store.arenas() if name == namespace)
                for namespace in (None, "tenant")
            }
            assert num_items == {None: 1, "tenant": 1}
            key = tenant.encode_one(ImageItem(data)).key
            (missing,) = other.fetch([key])
            assert isinstance(missing, ItemFailed)
            assert missing.reason == "UNKNOWN_KEY"
        with VisionEncoderClient(found.target, namespace="tenant", timeout_s=20) as stranger:
            with pytest.raises(EncoderError):
                stranger.encode([ImageItem(data)])
            assert stranger.transport.name == "inline"


def test_p37_draining_waits_for_the_readers_of_announced_rows(serve: Serve, socket_path: str) -> None:
    with serve(broker_path=socket_path, arena_bytes=8 << 20, drain_grace_s=600) as found:
        store = found.service.store
        assert store is not None
        (arena,) = (arena for _, arena in store.arenas() if arena.kind == "host")
        with connected(found) as stub:
            item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo())
            (event,) = stub.Encode(pb.EncodeRequest(items=[item], delivery=pb.DELIVERY_HOST), timeout=30)
            place = event.result.place
            with reader_of(arena) as reader:
                found.on_loop(found.service.request_stop)
                wait_until(lambda: found.service.not_ready == "draining")
                time.sleep(0.3)
                assert reader.is_current(place.slot_index, place.generation)
                row = pb.TouchedRows(key=event.result.key, generation=place.generation)
                stub.Touch(pb.TouchRequest(rows=[row]), timeout=10)
                wait_until(lambda: reader.closed, "the end long before the grace period's")
