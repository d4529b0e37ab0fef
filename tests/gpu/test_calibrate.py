"""Calibration on a GPU: the fitted cost predicts batches that it has not seen, in a service's start time."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from encoder_service.engine.calibrate import calibrate, grid_of, replay_us
from encoder_service.engine.graphs import GraphRunner
from encoder_service.scheduler.buckets import ladder_of_sizes
from encoder_service.scheduler.cost import Launch
from tests.gpu.test_graphs import CUDA, backends, fused_tower
from tests.parity.tower_cases import fresh_seed

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device]

SIZES = (256, 784, 1568, 2304, 4096, 8192)
# Of the median batch; single ones meet steps of the products' tiles and changes of clocks.
TYPICAL_ERROR = 0.10
WORST_ERROR = 0.30


def test_batches_that_were_not_timed_are_predicted() -> None:
    tower = fused_tower("qwen3_vl", "full", backends()[0])
    runner = GraphRunner(tower, ladder_of_sizes(SIZES), CUDA, capture=True, clock=time.monotonic)
    runner.capture_all()
    found = calibrate(runner, tower.merge_size, clock=time.monotonic)
    assert found is not None
    assert found.seconds < 3.0
    runner.use(found)
    generator = random.Random(fresh_seed())
    errors = []
    for _ in range(30):
        seqlens = [4 * generator.randint(64, 400) for _ in range(generator.randint(1, 5))]
        inputs = runner.prepare([grid_of(seqlen, tower.merge_size) for seqlen in seqlens])
        assert runner.can_use(inputs) is not None
        us = statistics.median(replay_us(runner, inputs) for _ in range(3))
        errors.append(abs(runner.ladder.predicted_us(Launch.of(seqlens)) / us - 1))
    assert statistics.median(errors) < TYPICAL_ERROR, (found, sorted(errors))
    assert max(errors) < WORST_ERROR, (found, sorted(errors))
