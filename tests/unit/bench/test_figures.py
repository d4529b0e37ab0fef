"""Computations of the benches: transport records and serving figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import serve, transport
from bench.processes import ProcessFailed, Snapshot
from bench.serve_peers import COLUMNS
from bench.transport import MIB, Cell, check_deliveries

CPU = torch.device("cpu")
WINDOW = {"warm_s": 1.0, "duration_s": 3.0, "bound_ms": 100.0}


def test_a_record_compares_calls_with_their_floor() -> None:
    calls, floors = [4.0, 2.0, 3.0], [1.0, 2.0, 1.5]
    record = transport.record_of(Cell("host_shm", 32 * MIB), calls, floors, [9.0])
    assert (record["size_mib"], record["p50_ms"], record["p99_ms"], record["floor_ms"]) == (32, 3, 4, 1.5)
    assert (record["ratio"], record["announced_ms"]) == (2.0, 9.0)
    assert "announced_ms" not in transport.record_of(Cell("inline_uds", MIB), calls, floors, [])


def test_rows_that_came_by_another_transport_make_no_record() -> None:
    calls, announced = [1.0] * 5, [1.0] * 2
    check_deliveries("host", calls, announced, {"inline": 3}, {"inline": 3, "host": 2})
    check_deliveries("inline", calls, [], {}, {"inline": 5})
    with pytest.raises(ProcessFailed, match="1 items inline and 2 by host; expected 0"):
        check_deliveries("host", calls, announced, {}, {"inline": 1, "host": 2})
    with pytest.raises(ProcessFailed, match="expected 5"):
        check_deliveries("inline", calls, [], {}, {"inline": 4})


def request(at_s: float, latency_ms: float = 50.0, **given: Any) -> dict[str, Any]:
    plain = {"at_s": at_s, "latency_ms": latency_ms, "status": "ok", "tier": "miss", "patches": 100}
    return dict.fromkeys(COLUMNS, 0.0) | plain | given


def test_rates_are_of_what_ended_and_latencies_of_what_was_due_in_the_window() -> None:
    figures = serve.client_figures(
        [
            request(0.5, 40.0),  # ended before the window
            request(0.9, 200.0),  # due before it, ended in it
            request(1.5, 90.0, tier="host"),
            request(2.0, 150.0),
            request(2.9, 300.0),  # due in it, ended behind it
            request(2.5, 5.0, status="QUEUE_FULL", tier="", patches=0),
        ],
        **WINDOW,
    )
    assert figures["num_requests"] == 4
    assert (figures["images_per_s"], figures["encoded_images_per_s"]) == (1.5, 1.0)
    assert (figures["encoded_patches_per_s"], figures["goodput_images_per_s"]) == (100.0, 0.5)
    assert figures["failures"] == {"QUEUE_FULL": 1}
    assert figures["tiers"] == {"host": pytest.approx(1 / 3), "miss": pytest.approx(2 / 3)}
    assert (figures["latency_ms"]["p50"], figures["hit_latency_ms"]["p99"]) == (150.0, 90.0)
    empty = serve.client_figures([request(1.0, status="unfinished")], **WINDOW)
    assert (empty["latency_ms"], empty["stages"]) == (None, {})
    json.dumps(empty, allow_nan=False)


def test_overhead_is_what_decode_and_tower_leave_of_each_request() -> None:
    spent = {"decode_ms": 5.0, "resize_ms": 2.0, "tower_ms": 20.0, "total_ms": 27.5, "delivery_ms": 0.25}
    figures = serve.client_figures(
        [request(1.0, 30.0, queue_ms=4.0, **spent), request(1.1, 99.0, tier="host")], **WINDOW
    )
    found = {name: figures[f"{name}_ms"]["p50"] for name in ("overhead", "overhead_unqueued")}
    assert found == {"overhead": 3.0, "overhead_unqueued": -1.0}
    assert (figures["service_overhead_ms"]["p50"], figures["caller_overhead_ms"]["p50"]) == (0.75, 2.25)
    records = [{"mix": "chat", "load": load} | figures for load in (1.1, 0.1)]
    records[0]["encoded_patches_per_s"] = 930.0
    (line,) = serve.summary_of(records, {"chat": {"patches_per_s": 1000.0, "images_per_s": 10.0}})
    assert (line["service_over_tower"], line["best_load"]) == (0.93, 1.1)
    assert (line["overhead_p50_ms"], line["overhead_load"]) == (3.0, 0.1)


def test_service_figures_are_differences() -> None:
    names = ("ve_items_total{miss}", "ve_encoded_patches_total", "ve_padded_patches_total")
    before = Snapshot(10.0, dict(zip(names, (10, 100, 10), strict=True)), 3.0, 1.5)
    after = Snapshot(12.0, dict(zip(names, (14, 190, 20), strict=True)), 4.0, 2.0)
    found = serve.service_figures(before, after)
    assert found["padding_share"] == pytest.approx(0.1)
    assert (found["cores"], found["loop_share"], found["cpu_ms_per_item"]) == (0.5, 0.25, 250.0)
    idle = serve.service_figures(before, Snapshot(11.0, before.counters, 3.0, 1.5))
    assert idle["padding_share"] is idle["cpu_ms_per_item"] is None
