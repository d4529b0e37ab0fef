"""The admin page's figures and the saturation, out of counters that moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.engine.graphs import GraphCounters
from encoder_service.engine.jobs import EngineCounters
from encoder_service.load import DeviceLoad
from encoder_service.ops.admin.live import LiveView
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.admission import Admission, UnreadBytes
from encoder_service.scheduler.buckets import Bucket
from encoder_service.store.embedding_store import EmbeddingStore
from tests.unit.service.rig import memory_store


@pytest.fixture
def store() -> Iterator[EmbeddingStore]:
    found = memory_store()
    yield found
    found.close()


class Rig:
    def __init__(self, store: EmbeddingStore, graphs: GraphCounters | None = None) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.counters = EngineCounters()
        engine: Any = SimpleNamespace(
            counters=self.counters, graphs=None if graphs is None else SimpleNamespace(counters=graphs)
        )
        tower = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        admission = Admission(1000, 1 << 20)
        self.pipeline: Any = SimpleNamespace(
            admission=admission,
            unread=UnreadBytes(1 << 20),
            load=DeviceLoad(admission, self.counters),
            store=store,
            model=SimpleNamespace(name="m", family="f", tower=tower),
        )
        self.live = LiveView(self.metrics, self.pipeline, engine, None, clock=lambda: self.now_s)

    def second(self) -> None:
        self.now_s += 1.0
        self.live.sample()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(json.dumps(self.live.answer()))
        return answer


def test_counters_are_those_since_the_start(store: EmbeddingStore) -> None:
    rig = Rig(store)
    rig.metrics.items.labels("miss").inc(2)
    rig.metrics.items.labels("host").inc(6)
    rig.metrics.deliveries.labels("inline").inc(8)
    rig.metrics.count(rig.metrics.failures, "QUEUE_FULL")
    rig.metrics.count(rig.metrics.rejections, "QUEUE_FULL")
    rig.metrics.observe_stage("total", 0.03)
    rig.counters.items += 2
    rig.second()
    answer = rig.answer()
    assert answer["uptime_s"] == 1.0
    assert (answer["tiers"]["miss"], answer["tiers"]["host"], answer["encoded"]) == (2, 6, 2)
    assert answer["transports"] == {"inline": 8, "host": 0, "device": 0}
    assert answer["failures"] == answer["rejections"] == {"QUEUE_FULL": 1}
    counts = answer["stages"]["total"]
    assert len(counts) == len(answer["bucket_bounds_s"]) + 1
    assert counts[answer["bucket_bounds_s"].index(0.05)] == sum(counts) == 1


def test_saturation_is_the_largest_of_its_shares(store: EmbeddingStore) -> None:
    rig = Rig(store)
    read = rig.metrics.registry.get_sample_value
    assert read("ve_saturation_ratio") == 0.0
    for _ in range(30):
        rig.counters.busy_s += 0.25
        rig.second()
    assert rig.live.busy_share() == read("ve_saturation_ratio") == pytest.approx(0.25)
    for _ in range(10):  # the window is ten seconds
        rig.second()
    assert rig.live.busy_share() == 0.0
    rig.counters.patches, rig.counters.busy_s = 200, 1.0
    rig.pipeline.admission.acquire(0).add_patches(150, 16)
    assert read("ve_saturation_ratio") == pytest.approx(0.75)  # 0.75 s queued, 1 s is saturated
    rig.pipeline.admission.acquire(0).add_patches(750, 16)
    rig.counters.patches = 2000
    assert read("ve_saturation_ratio") == pytest.approx(0.9)  # of the admitted patches; 0.45 s are queued


def test_p17_samples_are_bounded(store: EmbeddingStore) -> None:
    rig = Rig(store)
    for _ in range(1000):
        rig.second()
    assert len(rig.live._busy) <= 12


def test_buckets_are_counted_by_size_with_their_padding(store: EmbeddingStore) -> None:
    figures = GraphCounters(real_patches=750, padded_patches=250, eager_runs=3)
    figures.replays[Bucket(64, 4, 64)] = 5
    figures.replays[Bucket(64, 8, 16)] = 2
    figures.padded_runs[Bucket(16, 2, 16)] = 1
    buckets = Rig(store, figures).answer()["buckets"]
    assert buckets["runs"] == [{"patches": 16, "runs": 1}, {"patches": 64, "runs": 7}]
    assert (buckets["waste_share"], buckets["eager_runs"]) == (0.25, 3)
