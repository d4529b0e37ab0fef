"""Queued work in seconds of the device, and the saturation that follows."""

from __future__ import annotations

import random

import pytest

from encoder_service.engine.jobs import EngineCounters
from encoder_service.load import DeviceLoad
from encoder_service.scheduler.admission import Admission
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import CostModel

COST = CostModel(1000.0, 2.0, 1e-3)
LADDER = BucketLadder([Bucket(1024, 8, 1024), Bucket(4096, 16, 4096)], COST)


def test_by_the_cost_model_in_batches_of_the_largest_bucket() -> None:
    load = DeviceLoad(Admission(1 << 20, 1), EngineCounters(), LADDER)
    assert load.queued_s == 0.0
    for _ in range(3):
        load.admission.acquire(0).add_patches(2048, 1024)
    full_us = 1000.0 + 2.0 * 4096
    rest_us = 1000.0 + 2.0 * 2048
    squares_us = 1e-3 * 3 * 2048 * 1024
    assert load.queued_s == pytest.approx((full_us + rest_us + squares_us) / 1e6)


def test_without_a_model_at_what_a_patch_took_so_far() -> None:
    counters = EngineCounters()
    load = DeviceLoad(Admission(1000, 1), counters)
    load.admission.acquire(0).add_patches(300, 300)
    assert load.queued_s == 0.0
    counters.patches, counters.busy_s = 1000, 2.0
    assert load.queued_s == pytest.approx(0.6)


def test_nothing_is_left_of_items_that_ended_whatever_the_order() -> None:
    rng = random.Random()
    load = DeviceLoad(Admission(1 << 20, 1), EngineCounters(), LADDER)
    permits = [load.admission.acquire(0) for _ in range(50)]
    for each in permits:
        each.add_patches(4 * rng.randrange(1, 2000), rng.randrange(1, 2000))
    assert load.queued_s > 0
    rng.shuffle(permits)
    for each in permits:
        each.release()
        each.release()
    assert (load.admission.num_squares, load.queued_s) == (0, 0.0)
