"""A pipeline on fakes, with a small store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.harness.waiting import PATIENCE_S
from encoder_service.engine.device import DeviceEngine
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import Pipeline, ServedModel
from encoder_service.scheduler.admission import Admission
from encoder_service.scheduler.planner import Planner
from encoder_service.store.embedding_store import EmbeddingStore, Partition, host_arena
from encoder_service.types import EncodedFile, Item, Modality
from tests.fakes import FakePreprocessor, FakeTower, fake_image
from tests.unit.store.integrity import check_store, num_holds


def memory_store(num_bytes: int = 1 << 20) -> EmbeddingStore:
    """A store in memory of this process."""
    return EmbeddingStore(
        Partition(host_arena(num_bytes, is_exported=False)), on_copy_error=lambda error: False
    )


class Rig:
    """preprocessor, store, tower: fakes and a store of 1 MiB unless given."""

    def __init__(
        self,
        store: EmbeddingStore | None = None,
        preprocessor: Preprocessor | None = None,
        tower: FakeTower | None = None,
        admission: Admission | None = None,
        **options: Any,
    ) -> None:
        self.tower = tower or FakeTower()
        self.fake = FakePreprocessor()
        self.preprocessor = preprocessor or self.fake
        self.metrics = Metrics()
        self.store = store or memory_store()
        self.planner = Planner(256, 64)
        self.engine = DeviceEngine(
            self.tower,
            self.preprocessor,
            self.planner,
            self.metrics,
            clock=time.monotonic,
            on_fault=lambda fault: None,
        )
        self.workers = IngestWorkers(4, 2, 1 << 20)
        self.pipeline = Pipeline(
            model=ServedModel("fake", "fake", b"m" * 32, self.tower, self.preprocessor, Path("/m")),
            store=self.store,
            admission=admission or Admission(max_patches=1366, max_bytes=4096),
            engine=self.engine,
            workers=self.workers,
            metrics=self.metrics,
            max_patches_per_item=512,
            **options,
        )
        self.engine.start()

    async def end(self) -> None:
        """Waits for everything that still runs."""
        self.tower.gate.set()
        self.fake.gate.set()
        await self.pipeline.drain(10)
        assert self.engine.stop(10)
        self.workers.shutdown(wait=True)
        for _ in range(5):
            await asyncio.sleep(0)  # what the engine's threads have posted


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    """The rig until the end of the block; nothing may be left behind then."""
    yield rig
    await rig.end()
    check_store(rig.store)
    assert rig.pipeline.admission.num_patches == 0
    assert rig.pipeline.admission.num_bytes == 0
    assert rig.pipeline.admission.num_squares == 0
    assert len(rig.pipeline.inflight) == 0


def check_released(store: EmbeddingStore) -> None:
    """No caller and no reservation holds a slot."""
    assert num_holds(store) == 0
    assert num_slots(store) == store.num_items("device") + store.num_items("host")


def num_slots(store: EmbeddingStore) -> int:
    return sum(len(arena) for _, arena in store.arenas())


def image(value: int = 7, side: int = 4, **fields: object) -> Item:
    return Item(Modality.IMAGE, EncodedFile(fake_image(side, side, value)), **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_s, "the condition never came true"
        await asyncio.sleep(0.001)
