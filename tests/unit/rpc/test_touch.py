"""Touch: reports of reads reach the caller's namespace only, and lost reads make its answers inline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from encoder_service.errors import InvalidRequest
from encoder_service.rpc import delivery, observed
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.servicer import VisionEncoderServicer
from encoder_service.scheduler.admission import Admission
from encoder_service.store.embedding_store import EmbeddingStore, Partition
from tests.unit.service.rig import Rig, image, running
from tests.unit.store.arenas import host_arena
from vision_encoder.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.anyio
CONTEXT: Any = None


class Context:
    """Keeps the events of an Encode or Fetch."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "unix:"

    def set_trailing_metadata(self, _: object) -> None:
        pass

    def time_remaining(self) -> None:
        return None

    async def write(self, event: object) -> None:
        self.events.append(event)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """ "tenant" is isolated, "a" and the default namespace share an arena."""
    store = EmbeddingStore(
        Partition(host_arena(1 << 16)),
        {"tenant": Partition(host_arena(1 << 16))},
        on_copy_error=lambda error: False,
    )
    async with running(Rig(store)) as rig:
        yield rig
    store.close()


@pytest.fixture
def servicer(rig: Rig) -> VisionEncoderServicer:
    reader = ItemReader(Admission(0, 1 << 20), rig.workers.executor)
    return VisionEncoderServicer(rig.pipeline, pb.GetServerInfoResponse(), reader, rig.metrics)


async def announced(rig: Rig, servicer: VisionEncoderServicer, namespace: str) -> pb.TouchedRows | None:
    """The rows that Fetch announces to a caller on the encoder's host; None if they come inline."""
    encoded = await rig.pipeline.encode(image(3, side=16), namespace=namespace)
    encoded.release()
    key, context = encoded.encoded.key, Context()
    request = pb.FetchRequest(keys=[key], namespace=namespace, delivery=pb.DELIVERY_HOST)
    fetch: Any = observed.observed("Fetch", servicer.fetch, rig.metrics, "instance")
    await fetch(request, context)
    result = context.events[0].result
    if result.WhichOneof("rows") == "inline":
        return None
    return pb.TouchedRows(key=key, generation=result.place.generation)


@pytest.mark.parametrize("namespace", ["", "a", "tenant"])
async def test_p18_a_report_ends_the_protection_in_its_own_namespace_only(
    rig: Rig, servicer: VisionEncoderServicer, namespace: str
) -> None:
    read = await announced(rig, servicer, namespace)
    assert read is not None
    for other in {"", "a", "tenant"} - {namespace}:
        await servicer.touch(pb.TouchRequest(rows=[read], namespace=other), CONTEXT)
        assert rig.store.num_unread() == 1
    await servicer.touch(pb.TouchRequest(rows=[read], namespace=namespace), CONTEXT)
    assert rig.store.num_unread() == 0


async def test_lost_reads_count_up_to_the_reads_there_were(
    rig: Rig, servicer: VisionEncoderServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "WINDOW_S", 1000)
    made_up = pb.TouchedRows(key=bytes(32), generation=1)
    for _ in range(5):
        await servicer.touch(
            pb.TouchRequest(rows=[made_up] * 4000, namespace="a", num_lost=2**32 - 1), CONTEXT
        )
    figures = rig.metrics.registry.get_sample_value
    assert figures("ve_directory_reads_total") == 0, "no such rows were read"
    assert figures("ve_reads_lost_total") == 1
    read = await announced(rig, servicer, "b")
    assert read is not None
    await servicer.touch(pb.TouchRequest(rows=[read] * 3, namespace="b", num_lost=1000), CONTEXT)
    assert figures("ve_reads_lost_total") == 1 + 4


async def test_p17_a_long_namespace_is_refused(servicer: VisionEncoderServicer) -> None:
    with pytest.raises(InvalidRequest, match="namespace has 257 bytes, at most 256"):
        await servicer.touch(pb.TouchRequest(namespace="n" * 257, num_lost=1), CONTEXT)
