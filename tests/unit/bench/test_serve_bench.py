"""The serving bench: its figures, its goals, its picture, and a quick run without a GPU."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serve
import serve_report
from PIL import Image
from serve_client import COLUMNS
from serve_figures import (
    client_figures,
    goals_of,
    overhead_ms,
    percentile,
    percentiles,
    requests_of,
    service_figures,
    summary_of,
)
from serve_options import LOADS, parse_arguments
from serve_service import Sight, counters_of, thread_seconds

ROOT = Path(__file__).resolve().parents[3]
WINDOW = {"warm_s": 1.0, "duration_s": 3.0, "bound_ms": 100.0}


def request(at_s: float, latency_ms: float = 50.0, **given: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(COLUMNS, 0.0)
    plain = {
        "at_s": at_s,
        "latency_ms": latency_ms,
        "status": "ok",
        "tier": "miss",
        "patches": 100,
        "bytes": 0,
    }
    return zeros | plain | given


def record(
    load: float, *, server: str = "service", mix: str = "chat", bursty: bool = False
) -> dict[str, Any]:
    figures = client_figures(
        [request(1 + number / 100, random.uniform(20, 90), tower_ms=10.0) for number in range(100)], **WINDOW
    )
    figures |= {"encoded_patches_per_s": 1000 * min(load, 0.93), "tower_share": min(load, 0.93)}
    return {"server": server, "mix": mix, "load": load, "bursty": bursty} | figures


@pytest.fixture
def result() -> dict[str, Any]:
    records = [record(load) | service_figures({}, {}, seconds=1, cpu_s=1, loop_cpu_s=1) for load in LOADS]
    records += [record(0.6, bursty=True), record(0.6, server="baseline")]
    tower = {
        "images_per_s": 10.0, "patches_per_s": 1000.0, "images_per_batch": 4.0, "busy_share": 1.0,
        "padding_share": 0.0,
    }  # fmt: skip
    return {
        "date": "2026-11-22T00:00:00",
        "device": "NVIDIA H200",
        "commit": "abc",
        "complete": True,
        "settings": {
            "family": "qwen3_vl", "size": "full", "transport": "device", "clients": 4, "ingest_threads": 12,
        },
        "tower": {"chat": tower},
        "records": records,
        "goals": goals_of(records, {"chat": tower}),
        "summary": summary_of(records, {"chat": tower}),
        "left_out": [],
    }  # fmt: skip


def test_percentiles_are_values_that_were_seen() -> None:
    values = [random.random() for _ in range(101)]
    assert percentile(values, 0.5) == sorted(values)[50]
    assert percentile(values, 1.0) == max(values)
    assert percentile([3.0], 0.99) == 3.0
    assert math.isnan(percentile([], 0.5))
    assert percentiles([]) is None


def test_rates_are_of_what_ended_and_latencies_of_what_was_due_in_the_window() -> None:
    figures = client_figures(
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
    assert figures["images_per_s"] == 1.5
    assert figures["encoded_images_per_s"] == 1.0
    assert figures["encoded_patches_per_s"] == 100.0
    assert figures["goodput_images_per_s"] == 0.5
    assert figures["failures"] == {"QUEUE_FULL": 1}
    assert figures["tiers"] == {"host": pytest.approx(1 / 3), "miss": pytest.approx(2 / 3)}
    assert figures["latency_ms"]["p50"] == 150.0
    assert figures["hit_latency_ms"]["p99"] == 90.0


def test_overhead_is_what_decode_and_tower_leave_of_each_request() -> None:
    one = request(1.0, 30.0, decode_ms=5.0, resize_ms=2.0, queue_ms=4.0, tower_ms=20.0)
    assert overhead_ms(one) == 3.0
    figures = client_figures([one, request(1.1, 99.0, tier="host")], **WINDOW)
    assert figures["overhead_ms"]["p50"] == 3.0
    assert figures["overhead_unqueued_ms"]["p50"] == -1.0
    told = request(1.0, 30.0, decode_ms=5.0, resize_ms=2.0, tower_ms=20.0, total_ms=27.5, delivery_ms=0.25)
    figures = client_figures([told], **WINDOW)
    assert figures["service_overhead_ms"]["p50"] == 0.75
    assert figures["caller_overhead_ms"]["p50"] == 2.25


def test_a_mix_comes_to_shares_of_the_tower_and_of_the_plain_loop() -> None:
    tower = {"chat": {"patches_per_s": 1000.0, "images_per_s": 10.0}, "448": {"patches_per_s": 1.0}}
    records = [record(load) for load in (1.1, 0.1)]
    records += [record(0.6, server="baseline") | {"encoded_patches_per_s": 250.0}, record(0.05, bursty=True)]
    (line,) = summary_of(records, tower)
    assert (line["mix"], line["overhead_load"]) == ("chat", 0.1)
    assert line["service_over_tower"] == pytest.approx(0.93)
    assert line["service_over_baseline"] == pytest.approx(3.72)
    assert line["baseline_over_tower"] == pytest.approx(0.25)
    assert line["overhead_p50_ms"] == records[1]["overhead_ms"]["p50"]
    (alone,) = summary_of(records[:2], {"chat": tower["chat"]})
    assert alone["service_over_baseline"] is alone["baseline_over_tower"] is None


def test_what_tells_most_is_measured_first() -> None:
    run = object.__new__(serve.Run)
    run.arguments = parse_arguments("", ["--device", "cpu"])
    cells = run._cells()
    first, second, *_ = run.arguments.mixes
    assert [(cell.server, cell.mix, cell.load) for cell in cells[:4]] == [
        ("service", first, 1.1), ("service", second, 1.1), ("service", first, 0.1), ("service", second, 0.1),
    ]  # fmt: skip
    assert {cell.mix for cell in cells if cell.server == "baseline"} == {first, second}
    assert len(set(cells)) == len(cells)
    assert {cell.mix for cell in cells} == set(run.arguments.mixes)
    # With half a minute for each process to start, and the last load's end: four minutes.
    assert run.arguments.time_limit_s + run.arguments.cell_s + serve.HEAD_START_S + serve.GRACE_S < 235


def test_a_load_without_answers_has_no_latencies() -> None:
    figures = client_figures([request(1.0, status="unfinished")], **WINDOW)
    assert figures["latency_ms"] is None
    assert figures["stages"] == {}
    assert figures["images_per_s"] == 0
    json.dumps(figures, allow_nan=False)


def test_service_figures_are_differences() -> None:
    text = (
        '# TYPE ve_items_total counter\nve_items_total{{tier="miss"}} {0}\n'
        've_items_total{{tier="host"}} {1}\n'
        "# TYPE ve_device_busy_seconds_total counter\nve_device_busy_seconds_total {2}\n"
        "# TYPE ve_encoded_patches_total counter\nve_encoded_patches_total {3}\n"
        "# TYPE ve_padded_patches_total counter\nve_padded_patches_total {4}\n"
        "# TYPE ve_directory_reads_total counter\nve_directory_reads_total {5}\n"
        "# TYPE ve_broker_fetched_total counter\nve_broker_fetched_total {6}\n"
    )
    before, after = (
        Sight(at_s, counters_of(text.format(*values)), cpu_s, cpu_s / 2)
        for at_s, values, cpu_s in (
            (10.0, (5, 5, 1.0, 100, 10, 7, 7), 3.0),
            (12.0, (8, 6, 2.5, 190, 20, 9, 8), 4.0),
        )
    )
    found = serve.seen(before, after)
    assert found["device_busy_share"] == 0.75
    assert found["padding_share"] == pytest.approx(0.1)
    assert found["cores"] == 0.5
    assert found["loop_share"] == 0.25
    assert found["cpu_ms_per_item"] == 250.0
    assert found["without_call"] == {"directory": 0.5, "leased": 0.25}
    idle = serve.seen(before, replace(before, at_s=11.0))
    assert idle["padding_share"] is None
    assert idle["cpu_ms_per_item"] is None
    assert idle["without_call"] is None


def test_cpu_time_of_threads_is_read_from_the_system() -> None:
    threads = thread_seconds(os.getpid())
    assert threads[os.getpid()] >= 0
    assert sum(threads.values()) > 0


@pytest.mark.parametrize(
    ("loads", "best", "met"),
    [((1.1, 0.1), 0.91, True), ((1.1, 0.1), 0.89, False), ((0.6, 0.1), 0.6, None)],
)
def test_goals_say_met_missed_or_not_judged(loads: tuple[float, ...], best: float, met: bool | None) -> None:
    tower = {"chat": {"patches_per_s": 1000.0}}
    records = [record(load) | {"encoded_patches_per_s": 1000 * min(load, best)} for load in loads]
    share, overhead = goals_of(records, tower)
    assert share["met"] is met
    assert share["found"] == pytest.approx(best)
    assert overhead["load"] == 0.1
    assert overhead["met"] == (overhead["found"] < 1.5)
    assert goals_of([one for one in records if one["load"] > 0.5], tower) == [share]


def test_rows_of_all_clients_come_together() -> None:
    answers = [{"columns": ["at_s", "status"], "rows": [[1.0, "ok"]]}, {"columns": ["at_s"], "rows": [[2.0]]}]
    assert requests_of(answers) == [{"at_s": 1.0, "status": "ok"}, {"at_s": 2.0}]


def test_picture_and_lines(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Image.open(serve_report.draw(result, tmp_path / "picture.png")) as picture:
        assert picture.width > 1000
    lines = "\n".join(serve_report.lines_of(result))
    assert "share of the tower's own throughput 0.9, found 0.93 at load" in lines
    assert ": met" in lines
    assert ": missed" in lines
    assert all(table.row_count for table in serve_report.tables_of(result))


def test_a_picture_needs_records(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result["records"] = []
    with pytest.raises(ValueError, match="none of the service"):
        serve_report.draw(result, tmp_path / "picture.png")


def test_threads_and_clients_share_the_cores() -> None:
    arguments = parse_arguments("", ["--device", "cpu", "--clients", "1"])
    assert arguments.ingest_threads >= 1
    with pytest.raises(SystemExit):
        parse_arguments("", ["--device", "cpu", "--transport", "device"])
    with pytest.raises(SystemExit):
        parse_arguments("", ["--device", "cpu", "--resize", "device"])


@pytest.mark.extended
def test_quick_run_on_a_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "serve.py"),
        "--quick",
        "--device",
        "cpu",
        "--size",
        "tiny",
    ]
    command += [
        "--loads",
        "0.5",
        "--grpc-loads",
        "0.5",
        "--bursty",
        "0",
        "--cell-s",
        "1.5",
        "--photos",
        "10",
        "--time-limit-s",
        "120",
        "--out",
        str(tmp_path),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (path,) = tmp_path.glob("serve-cpu-*.json")
    result = json.loads(path.read_text())
    assert result["complete"]
    service, by_grpc, baseline = result["records"]
    assert [one["server"] for one in result["records"]] == ["service", "service by gRPC", "baseline"]
    assert service["images_per_s"] > 0
    assert by_grpc["images_per_s"] > 0
    assert by_grpc["device_busy_share"] > 0
    assert not service["failures"]
    assert baseline["failures"].keys() <= {"unfinished"}
    assert service["device_busy_share"] > 0
    assert result["tower"]["448-heavy"]["patches_per_s"] > 0
    (summary,) = result["summary"]
    assert summary["service_over_tower"] > 0
    assert summary["service_overhead_p50_ms"] <= summary["overhead_p50_ms"]
    assert service["stages"]["delivery_ms"]["p50"] > 0
    assert result["service"]["exit_status"] == 0
    assert result["goals"]
    assert path.with_suffix(".png").exists()
