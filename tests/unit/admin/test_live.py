"""Figures of the admin page: rates, percentiles, buckets and the cache, computed from counters."""

from __future__ import annotations

import json
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
from tests.unit.store.arenas import ITEM_BYTES, land, store_of


class Rig:
    def __init__(self, graphs: GraphCounters | None = None) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.counters = EngineCounters()
        engine: Any = SimpleNamespace(
            counters=self.counters, graphs=None if graphs is None else SimpleNamespace(counters=graphs)
        )
        tower = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        self.pipeline: Any = SimpleNamespace(
            admission=Admission(1000, 1 << 20),
            unread=UnreadBytes(1 << 20),
            load=DeviceLoad(self.counters),
            inflight={},
            store=store_of(host_items=64, device_items=64),
            model=SimpleNamespace(name="m", family="f", tower=tower),
        )
        self.live = LiveView(self.metrics, clock=lambda: self.now_s)
        self.live.attach(self.pipeline, engine, None)

    def second(self) -> None:
        self.now_s += 1.0
        self.live.sample()


def test_the_answer_before_the_service_is_built() -> None:
    live = LiveView(Metrics(), clock=lambda: 5.0)
    live.sample()
    assert live.answer() == {"uptime_s": 0.0, "attached": False}
    assert live.saturation() == 0.0


def test_rates_hits_and_percentiles_of_the_last_seconds() -> None:
    rig = Rig()
    for _ in range(10):
        rig.metrics.items.labels("miss").inc(2)
        rig.metrics.items.labels("host").inc(6)
        rig.metrics.deliveries.labels("inline").inc(8)
        rig.metrics.count_failure("QUEUE_FULL", turned_away=True)
        rig.metrics.stage_seconds.observe("total", 0.03)
        rig.counters.items += 2
        rig.counters.busy_s += 0.25
        rig.second()
    answer = json.loads(json.dumps(rig.live.answer()))
    now = answer["now"]
    assert now["items_per_s"] == pytest.approx(8.0)
    assert now["encoded_per_s"] == pytest.approx(2.0)
    assert now["hit_share"] == pytest.approx(0.75)
    assert now["busy_share"] == now["saturation"] == pytest.approx(0.25)
    assert now["rejections_per_s"] == now["failures_per_s"] == pytest.approx(1.0)
    assert answer["transports"] == {"inline": 80, "host": 0, "device": 0}
    assert answer["failures"] == {"QUEUE_FULL": 10.0}
    (total,) = (row for row in answer["stages"] if row["stage"] == "total")
    assert total["count"] == 10
    assert 25.0 < total["p50_ms"] < total["p99_ms"] <= 50.0
    (tower,) = (row for row in answer["stages"] if row["stage"] == "tower")
    assert (tower["count"], tower["p50_ms"]) == (0, None)
    assert answer["series"]["t_s"][-1] == 0.0
    assert len(answer["series"]["p99_ms"]) == 10


def test_the_saturation_gauge_follows_queue_limits_and_device() -> None:
    rig = Rig()
    read = rig.metrics.registry.get_sample_value
    assert read("ve_saturation_ratio") == 0.0
    rig.counters.patches, rig.counters.busy_s = 100, 1.0
    rig.pipeline.load.add("item", 75, 75)
    assert read("ve_saturation_ratio") == pytest.approx(0.75)  # 0.75 s of 1
    rig.pipeline.admission.acquire(0).add_patches(900)
    assert read("ve_saturation_ratio") == pytest.approx(0.9)
    rig.second()
    rig.counters.busy_s += 5.0
    rig.second()
    assert read("ve_saturation_ratio") == 1.0


def test_runs_are_counted_by_bucket_size_with_padding() -> None:
    figures = GraphCounters(real_patches=750, padded_patches=250, eager_runs=3)
    figures.replays[Bucket(64, 4, 64)] = 5
    figures.replays[Bucket(64, 8, 16)] = 2
    figures.padded_runs[Bucket(16, 2, 16)] = 1
    rig = Rig(figures)
    rig.second()
    buckets = rig.live.answer()["buckets"]
    assert buckets["runs"] == [{"patches": 16, "runs": 1}, {"patches": 64, "runs": 7}]
    assert (buckets["waste_share"], buckets["eager_runs"]) == (0.25, 3)


def test_the_cache_shows_items_and_bytes_of_both_tiers() -> None:
    rig = Rig()
    assert land(rig.pipeline.store, 1)
    cache = rig.live.answer()["cache"]
    assert cache["items"]["device"] + cache["items"]["host"] == 1
    assert ITEM_BYTES <= cache["bytes"] <= cache["max_bytes"]
    assert len(cache["arenas"]) == 2
