"""The saturation, from counters that moved."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from encoder_service.admin.gauges import runs_by_size
from encoder_service.admin.saturation import Saturation
from encoder_service.engine.jobs import EngineCounters
from encoder_service.load import DeviceLoad
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import WaitingShares
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
            workers=SimpleNamespace(busy_s=(0.0, 0.0), memory=WaitingShares(1 << 20)),
        )
        self.pipeline = pipeline
        self.loop_idle_s = 5.0
        self.saturation = Saturation(
            self.metrics, pipeline, engine, lambda: self.loop_idle_s, clock=lambda: self.now_s
        )

    def second(self, loop_busy_s: float = 0.0) -> None:
        self.now_s += 1.0
        self.loop_idle_s += 1.0 - loop_busy_s
        self.saturation.sample()

    def read(self, name: str = "ve_saturation_ratio") -> float | None:
        return self.metrics.registry.get_sample_value(name)


def test_saturation_is_the_largest_of_its_shares() -> None:
    rig = Rig()
    assert rig.read() == 0.0
    for _ in range(30):
        rig.counters.busy_s += 0.25
        rig.second()
    assert rig.read() == pytest.approx(0.25)
    for _ in range(10):  # the window is ten seconds
        rig.second()
    assert rig.read() == 0.0
    rig.counters.patches, rig.counters.busy_s = 200, 1.0
    rig.pipeline.admission.acquire(0).add_patches(150, 16)
    assert rig.read() == pytest.approx(0.75)  # 0.75 s queued, 1 s is saturated
    rig.pipeline.admission.acquire(0).add_patches(750, 16)
    rig.counters.patches = 2000
    assert rig.read() == pytest.approx(0.9)  # of the admitted patches; 0.45 s are queued


def test_saturation_follows_the_host_where_the_host_is_the_limit() -> None:
    """Small images fill the event loop, large files the threads that decode, before the device."""
    rig = Rig()
    rig.counters.busy_s = 1.0
    for _ in range(10):
        rig.second(loop_busy_s=0.7)
    assert rig.read() == rig.read("ve_loop_busy_ratio") == pytest.approx(0.7)
    assert rig.read("ve_decode_busy_ratio") == 0.0
    for number in range(1, 11):
        rig.pipeline.workers.busy_s = (0.4 * number, 1.2 * number)  # clips: a spare thread works too
        rig.second()
    assert rig.read("ve_loop_busy_ratio") == 0.0
    assert rig.read() == rig.read("ve_decode_busy_ratio") == 1.0
    for _ in range(10):
        rig.second()
    assert rig.read() == 0.0
    asyncio.run(rig.pipeline.workers.memory.acquire(("caller",), 3 << 18))
    assert rig.read() == 1.0  # of decoded pixels, all that one caller may have


def test_buckets_are_counted_by_size() -> None:
    replays = {Bucket(64, 4, 64): 5, Bucket(64, 8, 16): 2}
    assert runs_by_size(replays, {Bucket(16, 2, 16): 1}) == {"16": 1, "64": 7}
