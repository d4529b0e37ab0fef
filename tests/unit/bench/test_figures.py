"""Computations of the benches: tower cases, transport records, serving figures and traffic."""

from __future__ import annotations

import io
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import serve
import torch
import transport
import transport_peers
from checkpoints import random_checkpoint
from PIL import Image
from processes import ProcessFailed, Snapshot
from serve_peers import COLUMNS
from traffic import load_of, read_photos, specs_of, with_comment, write_photos
from transport import MIB, Cell, Samples, check_deliveries
from transport_peers import timed
from variants import (
    CASES,
    MAX_PATCHES,
    CompileBudget,
    Family,
    grids_of,
)

from encoder_service.engine.fast_path import ladder_of
from encoder_service.scheduler.cost import Launch

CPU = torch.device("cpu")
WINDOW = {"warm_s": 1.0, "duration_s": 3.0, "bound_ms": 100.0}


def test_a_family_leaves_out_what_fails_and_captures_the_buckets_of_its_cases() -> None:
    class Failing:
        def tables(self, grids: object) -> None:
            raise RuntimeError("out of something\nsecond line")

    with random_checkpoint("kimi_k25", "tiny", 5, CPU) as path:
        family = Family(
            "kimi_k25", path, CPU, torch.float32, variants=("ref_fa3_graph", "ref_compiled"), cases=CASES,
            reference=Failing(), no_fa3=None, full_ladder=False, compile_budget=CompileBudget(10),
        )  # fmt: skip
    case = family.case("1x256", 0, every_backend=False)
    assert not case.runs
    assert case.left_out["ref_fa3_graph"] == "RuntimeError: out of something"
    assert "only: each takes long" in case.left_out["ref_compiled"]
    full = ladder_of(family.tower, MAX_PATCHES, ())
    few = ladder_of(family.tower, MAX_PATCHES, family.bucket_sizes(CASES))
    assert len(few) < len(full) / 4
    for name in CASES:
        grids = grids_of(name, merges_time=True)
        launch = Launch.of([grid.num_patches for grid in grids], max(grid.t for grid in grids))
        assert few.choose(launch) == full.choose(launch) is not None


def test_a_record_compares_calls_with_their_floor() -> None:
    calls, floors = Samples([4.0, 2.0, 3.0], 1.0), Samples([1.0, 2.0, 1.5], 1.0)
    record = transport.record_of(Cell("host_shm", 32 * MIB, 1), calls, floors, Samples([9.0], 1.0))
    assert (record["size_mib"], record["p50_ms"], record["p99_ms"], record["floor_ms"]) == (32, 3, 4, 1.5)
    assert (record["ratio"], record["announced_ms"]) == (2.0, 9.0)
    assert record["gib_per_s"] == pytest.approx(3 * 32 / 1024)
    several = Cell("host_shm", MIB, 8)
    record = transport.record_of(several, Samples([5.0] * 40, 2.0), Samples([0.1] * 80, 2.0), Samples())
    assert record["floor_ms"] == pytest.approx(8 * 2000 / 80)
    assert record["ratio"] == pytest.approx(80 / 40)
    assert "announced_ms" not in record


def test_rows_that_came_by_another_transport_make_no_record() -> None:
    calls, announced = Samples([1.0] * 5), Samples([1.0] * 2)
    check_deliveries("host", calls, announced, {"inline": 3}, {"inline": 3, "host": 2})
    check_deliveries("inline", calls, Samples(), {}, {"inline": 5})
    with pytest.raises(ProcessFailed, match="1 items inline and 2 by host; expected 0"):
        check_deliveries("host", calls, announced, {}, {"inline": 1, "host": 2})
    with pytest.raises(ProcessFailed, match="expected 5"):
        check_deliveries("inline", calls, Samples(), {}, {"inline": 4})


def test_callers_run_at_once_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4, timeout=20)
    assert len(timed([together.wait] * 4, budget_s=60, max_calls=7).calls_ms) == 4 * 7

    def fail() -> None:
        raise ValueError("stale rows")

    for callers in (1, 3):
        with pytest.raises(ValueError, match="stale rows"):
            timed([fail] * callers, budget_s=1, max_calls=1)
    now = [0.0]
    monkeypatch.setattr(transport_peers.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 2.0

    assert timed([call], budget_s=5, max_calls=100).calls_ms == [2000.0] * transport_peers.MIN_CALLS


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


@pytest.mark.parametrize("repeat_share", [0.0, 0.9])
def test_a_load_is_the_same_in_every_process_and_has_its_new_contents(repeat_share: float) -> None:
    seed = random.randrange(1 << 31)
    load = load_of(200.0, duration_s=10.0, num_photos=4, seed=seed, repeat_share=repeat_share)
    requests = load.requests()
    assert requests == load.requests()
    times = [one.at_s for one in requests]
    assert times == sorted(times)
    assert len({one.content for one in requests}) / load.duration_s == pytest.approx(200.0, rel=0.1)
    assert len({(one.content, one.photo) for one in requests}) == len({one.content for one in requests})


@pytest.mark.parametrize("mix", ["chat", "448"])
def test_files_are_as_specified_and_a_comment_makes_another_file(mix: str, tmp_path: Path) -> None:
    specs = specs_of(mix, 20, scale=0.05, seed=3)
    assert specs == specs_of(mix, 20, scale=0.05, seed=3)
    written = write_photos(tmp_path / "photos", specs, seed=3, threads=2)
    files = read_photos(tmp_path / "photos")
    assert written == sum(map(len, files))
    for spec, data in zip(specs, files, strict=True):
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (spec.width, spec.height)
            assert (image.getexif().get(0x0112) == 6) == spec.turned
            assert bool(image.info.get("progressive")) == spec.progressive
    other = with_comment(files[0], 5, 2)
    assert len({files[0], other, with_comment(files[0], 5, 1)}) == 3
    assert Image.open(io.BytesIO(other)).tobytes() == Image.open(io.BytesIO(files[0])).tobytes()
