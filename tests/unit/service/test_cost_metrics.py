"""Metrics of graphs and of their cost: exported, and moved by the batches that an engine runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from encoder_service.admin.gauges import register_gauges
from encoder_service.engine.calibrate import export_cost
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.graphs import GraphRunner
from encoder_service.metrics import Metrics
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Calibration, CostModel
from encoder_service.scheduler.planner import Planner, Ticket
from encoder_service.types import Grid, PatchItem
from tests.unit.engine.bucketed_tower import PATCH_DIM, SmallTower

COST = CostModel(500.0, 2.0, 3e-4, 4e-3)


class ServedTower(SmallTower):
    """With what an engine asks of a tower beside the runner's."""

    device = torch.device("cpu")
    patch_size = 1
    temporal_patch_size = 1

    def check_grid(self, grid: Grid) -> None:
        pass

    def num_rows(self, grid: Grid) -> int:
        return grid.num_patches // 4


class Ticking:
    """Each reading is a tenth of a millisecond later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def engine(metrics: Metrics) -> Iterator[DeviceEngine]:
    tower, clock = ServedTower(), Ticking()
    ladder = BucketLadder([Bucket(16, 2, 16), Bucket(64, 4, 64)], COST)
    choices = [("attention", "4096x1024", "fa4"), ("gelu", "784", "torch")]
    graphs = GraphRunner(tower, ladder, torch.device("cpu"), capture=False, clock=clock, choices=choices)
    engine = DeviceEngine(
        tower,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        Planner(64, 8, ladder),
        metrics,
        clock=clock,
        on_fault=lambda fault: None,
        graphs=graphs,
    )
    engine.start()
    yield engine
    assert engine.stop(10.0)


def run(engine: DeviceEngine, grid: Grid) -> None:
    item = PatchItem(torch.randn(grid.num_patches, PATCH_DIM), grid)
    engine.submit(item, Ticket(grid.num_patches)).result(timeout=20)


def test_padding_replays_and_eager_runs_are_exported(engine: DeviceEngine, metrics: Metrics) -> None:
    assert engine.graphs is not None
    register_gauges(metrics, MagicMock(), engine)
    run(engine, Grid(1, 2, 6))
    run(engine, Grid(1, 10, 10))
    lines = metrics.exposition().decode().splitlines()
    for sample in (
        "ve_padded_patches_total 4.0",
        "ve_eager_runs_total 1.0",
        "ve_graph_replays_total 0.0",
        "ve_graph_bytes 0.0",
        "ve_cost_us_per_patch 2.0",
        've_kernel_choice{library="fa4",shape="4096x1024",step="attention"} 1.0',
        've_kernel_choice{library="torch",shape="784",step="gelu"} 1.0',
    ):
        assert sample in lines


def test_each_batch_is_compared_with_its_prediction(engine: DeviceEngine, metrics: Metrics) -> None:
    read = metrics.registry.get_sample_value
    assert read("ve_batch_time_ratio_count") == 0.0
    run(engine, Grid(1, 2, 6))
    assert read("ve_batch_time_ratio_count") == 1.0
    predicted_us = COST.fixed_us + 2.0 * 16 + 3e-4 * 144 + 4e-3 * 2 * 16
    assert read("ve_batch_time_ratio_sum") == pytest.approx(engine.counters.busy_s * 1e6 / predicted_us)


def test_the_costs_coefficients_and_errors_are_gauges(metrics: Metrics) -> None:
    ladder = BucketLadder([Bucket(16, 2, 16)]).calibrated(Calibration(COST, 0.07, 0.02, 12))
    export_cost(metrics, ladder)
    read = metrics.registry.get_sample_value
    found = {name: read(f"ve_cost_{name}") for name in ("fixed_us", "us_per_patch", "us_per_square")}
    assert found == {"fixed_us": 500.0, "us_per_patch": 2.0, "us_per_square": 3e-4}
    assert read("ve_cost_us_per_slot_patch") == 4e-3
    assert (read("ve_cost_max_error"), read("ve_cost_mean_error")) == (0.07, 0.02)


def test_errors_of_a_cost_that_was_not_measured_here_are_unknown(metrics: Metrics) -> None:
    export_cost(metrics, BucketLadder([Bucket(16, 2, 16)]))
    error = metrics.registry.get_sample_value("ve_cost_max_error")
    assert error is not None
    assert math.isnan(error)
