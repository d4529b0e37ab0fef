"""The saturation, from counters that moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from encoder_service.admin.gauges import runs_by_size
from encoder_service.admin.saturation import Saturation
from encoder_service.engine.jobs import EngineCounters
from encoder_service.load import DeviceLoad
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.admission import Admission, UndeliveredBytes
from encoder_service.scheduler.buckets import Bucket


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.counters = EngineCounters()
        engine: Any = SimpleNamespace(counters=self.counters)
        admission = Admission(1000, 1 << 20)
        pipeline: Any = SimpleNamespace(
            admission=admission,
            undelivered=UndeliveredBytes(1 << 20),
            load=DeviceLoad(admission, self.counters),
        )
        self.pipeline = pipeline
        self.saturation = Saturation(self.metrics, pipeline, engine, clock=lambda: self.now_s)

    def second(self) -> None:
        self.now_s += 1.0
        self.saturation.sample()


def test_saturation_is_the_largest_of_its_shares() -> None:
    rig = Rig()
    read = rig.metrics.registry.get_sample_value
    assert read("ve_saturation_ratio") == 0.0
    for _ in range(30):
        rig.counters.busy_s += 0.25
        rig.second()
    assert rig.saturation.busy_share() == read("ve_saturation_ratio") == pytest.approx(0.25)
    for _ in range(10):  # the window is ten seconds
        rig.second()
    assert rig.saturation.busy_share() == 0.0
    rig.counters.patches, rig.counters.busy_s = 200, 1.0
    rig.pipeline.admission.acquire(0).add_patches(150, 16)
    assert read("ve_saturation_ratio") == pytest.approx(0.75)  # 0.75 s queued, 1 s is saturated
    rig.pipeline.admission.acquire(0).add_patches(750, 16)
    rig.counters.patches = 2000
    assert read("ve_saturation_ratio") == pytest.approx(0.9)  # of the admitted patches; 0.45 s are queued


def test_buckets_are_counted_by_size() -> None:
    replays = {Bucket(64, 4, 64): 5, Bucket(64, 8, 16): 2}
    assert runs_by_size(replays, {Bucket(16, 2, 16): 1}) == {"16": 1, "64": 7}
