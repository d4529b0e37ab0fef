"""The transport bench: its timing and records, its pictures, and a quick run without a GPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import transport
import transport_cases
import transport_report
from PIL import Image
from transport_cases import MIB, PATHS, SIZES_MIB, bytes_of, in_turn, key_of, num_resident, timed
from transport_options import parse_arguments
from transport_processes import Process, ProcessFailed, can_isolate, visible_gpu

ROOT = Path(__file__).resolve().parents[3]
NEEDED = {"path", "bytes", "median_ms", "p99_ms", "floor_ms"}
OPTIONAL = {
    "concurrency", "ratio", "gib_per_s", "floor_gib_per_s", "floor_p99_ms", "num_calls", "copy_ms",
    "floor_device_ms", "socket_ms", "socket_p99_ms", "grpc_ms", "grpc_p99_ms",
    "min_ms", "socket_min_ms", "grpc_min_ms",
}  # fmt: skip


def record_of(
    path: str = "host_shm",
    concurrency: int = 1,
    calls_ms: list[float] | None = None,
    floors_ms: list[float] | None = None,
    num_bytes: int = 32 * MIB,
    wall_s: float = 1.0,
) -> dict[str, Any]:
    cell = transport.Cell(path, num_bytes, concurrency)
    calls = transport.Samples(calls_ms or [4.0, 2.0, 3.0], wall_s)
    return transport.record_of(cell, calls, transport.Samples(floors_ms or [1.0, 2.0, 1.5], wall_s))


@pytest.fixture
def result() -> dict[str, Any]:
    records = [
        record_of(path, concurrency, [size * (1 + number)], [size], bytes_of(size), size / 1e3)
        for number, path in enumerate(PATHS)
        for size in SIZES_MIB
        for concurrency in (1, 8, 32)
        if concurrency == 1 or size in (3.0, 12.0)
    ]
    return {
        "date": "2026-11-22T00:00:00",
        "device": "NVIDIA H200",
        "commit": "abc",
        "complete": True,
        "isolated": True,
        "versions": {"grpcio": "1.80"},
        "records": records,
    }


# -- records -------------------------------------------------------------------------------------------------


def test_a_record_has_the_agreed_keys_and_no_unknown_ones() -> None:
    record = record_of()
    assert set(record) > NEEDED
    assert set(record) <= NEEDED | OPTIONAL
    assert (record["median_ms"], record["p99_ms"], record["floor_ms"]) == (3.0, 4.0, 1.5)
    assert record["ratio"] == 2.0
    assert record["gib_per_s"] == pytest.approx(3 * 32 / 1024)


def test_the_floor_of_several_callers_is_the_mean_by_their_rate() -> None:
    record = record_of(concurrency=8, floors_ms=[0.1] * 79 + [900.0], calls_ms=[5.0] * 40, wall_s=2.0)
    assert record["floor_ms"] == pytest.approx(8 * 2000 / 80)
    assert record["ratio"] == pytest.approx(80 / 40)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1.0), (99, 99.0), (100, 99.0), (101, 100.0), (200, 198.0)]
)
def test_p99_is_a_time_that_was_measured(count: int, expected: float) -> None:
    assert transport.percentile([float(value) for value in range(count, 0, -1)], 0.99) == expected


def test_paths_are_named_as_the_goals_name_them() -> None:
    assert PATHS == ("device_same_gpu", "device_nvlink", "host_shm", "inline_uds", "inline_tcp")
    assert set(transport_report.STYLES) == set(transport_report.FLOORS) == set(PATHS)
    assert [bytes_of(size) for size in (3, 12, 32, 128)] == [size * MIB for size in (3, 12, 32, 128)]
    assert 0 <= 0.4 * MIB - bytes_of(0.4) < 4096


# -- timing --------------------------------------------------------------------------------------------------


def test_callers_run_at_once_and_each_as_often_as_allowed() -> None:
    together = threading.Barrier(4, timeout=20)
    found = timed([together.wait] * 4, budget_s=60, max_calls=7)
    assert len(found.calls_ms) == 4 * 7
    assert found.wall_s > 0


def test_a_spent_budget_ends_a_caller_but_not_before_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(transport_cases.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 2.0

    assert timed([call], budget_s=5, max_calls=100).calls_ms == [2000.0] * transport_cases.MIN_CALLS
    assert len(timed([call], budget_s=20, max_calls=100).calls_ms) == 10


@pytest.mark.parametrize("callers", [1, 3])
def test_what_a_call_raises_is_raised(callers: int) -> None:
    def fail() -> None:
        raise ValueError("stale rows")

    with pytest.raises(ValueError, match="stale rows"):
        timed([fail] * callers, budget_s=1, max_calls=1)


def test_items_take_turns_over_more_than_a_cache_holds() -> None:
    count = num_resident(12 * MIB, 384 * MIB)
    assert count * 12 * MIB >= 384 * MIB
    assert num_resident(128 * MIB, 64 * MIB) == transport_cases.MIN_RESIDENT
    for caller in (0, 5):
        places = in_turn(count, caller)
        assert {next(places) for _ in range(count)} == set(range(count))
    assert len({key_of(size, index) for size in (1, 11) for index in range(20)}) == 40


# -- options and processes -----------------------------------------------------------------------------------


def test_without_a_gpu_only_host_paths_are_measured() -> None:
    arguments = parse_arguments("", ["--device", "cpu"])
    assert arguments.paths == ["host_shm", "inline_uds", "inline_tcp"]
    assert tuple(arguments.sizes_mib) == SIZES_MIB
    assert arguments.concurrency == [1, 8, 32]
    assert parse_arguments("", ["--device", "cpu", "--concurrency", "4"]).concurrency == [1, 4]


def test_a_process_sees_one_gpu_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert visible_gpu(1) == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpu(1) == "1"


def test_a_process_that_fails_or_ends_says_why(tmp_path: Path) -> None:
    with Process("transport_floors.py", tmp_path / "log") as process:
        with pytest.raises(ProcessFailed, match=r"transport_floors\.py: KeyError: 'dance'"):
            process.ask("dance")
        assert process.ask("fill", num_bytes=8192, resident_bytes=1, chunk_bytes=4096) == {"count": 3}
    with pytest.raises(ProcessFailed, match="has ended"):
        process.ask("fill", num_bytes=8192, resident_bytes=1, chunk_bytes=4096)
    for _ in range(2):
        with pytest.raises(ProcessFailed, match="has ended"):
            process.answer()


def test_a_process_that_is_too_late_is_ended_and_never_heard_again(tmp_path: Path) -> None:
    with Process("transport_floors.py", tmp_path / "log") as process:
        process.send("fill", num_bytes=8192, resident_bytes=1, chunk_bytes=4096)
        with pytest.raises(ProcessFailed, match="did not answer within 0 s"):
            process.answer(0)
        process._answers.put('{"count": 3}\n')  # as it may have been on its way
        for _ in range(2):
            with pytest.raises(ProcessFailed, match="has ended"):
                process.answer()
            with pytest.raises(ProcessFailed, match="has ended"):
                process.send("fill", num_bytes=8192, resident_bytes=1, chunk_bytes=4096)


# -- pictures ------------------------------------------------------------------------------------------------


def test_a_result_makes_a_picture_and_stays_as_it_is(result: dict[str, Any], tmp_path: Path) -> None:
    before = copy.deepcopy(result)
    path = transport_report.draw(result, tmp_path / "chart.png")
    with Image.open(path) as picture:
        assert picture.width > 1000
        colours = {colour for _, colour in picture.convert("RGB").getcolors(picture.width * picture.height)}
    for _, colour, _ in transport_report.STYLES.values():
        assert tuple(bytes.fromhex(colour[1:])) in colours, colour
    assert result == before


def test_a_result_without_records_makes_none(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 records"):
        transport_report.draw(result | {"records": []}, tmp_path / "chart.png")


def test_goals_are_of_one_caller_and_32_mib() -> None:
    assert transport_report.goal_text(record_of("device_nvlink", calls_ms=[0.29])) == "0.3 ms: met"
    assert transport_report.goal_text(record_of("device_nvlink", calls_ms=[0.31])) == "0.3 ms: missed"
    assert transport_report.goal_text(record_of("inline_tcp", 1, [1.4], [1.0])) == "1.3 x floor: missed"
    assert transport_report.goal_text(record_of("device_nvlink", 8)) == ""
    assert transport_report.goal_text(record_of("device_nvlink", num_bytes=MIB)) == ""


# -- a run ---------------------------------------------------------------------------------------------------


def run_bench(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    ended = subprocess.run(
        [sys.executable, "bench/transport.py", "--quick", "--device", "cpu", "--out", str(out), *options],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = out.glob("transport-*.json")
    return json.loads(path.read_text()), ended.stdout


@pytest.mark.extended
def test_a_quick_run_delivers_by_every_path_without_a_gpu(tmp_path: Path) -> None:
    result, text = run_bench(
        tmp_path, "--sizes-mib", "0.4", "3", "--budget-s", "0.1", "--resident-mib", "16",
        "--time-limit-s", "100", "--concurrency", "3",
    )  # fmt: skip
    assert result["left_out"] == []
    assert result["complete"] is True
    records = result["records"]
    assert {(one["path"], one["bytes"], one["concurrency"]) for one in records} == {
        (path, bytes_of(size), concurrency)
        for path in transport_cases.HOST_PATHS
        for size, concurrency in ((0.4, 1), (3, 1), (3, 3))
    }
    for record in records:
        assert set(record) <= NEEDED | OPTIONAL
        assert 0 < record["median_ms"] <= record["p99_ms"]
        assert record["floor_ms"] > 0
        assert ("socket_ms" in record) == ("grpc_ms" in record) == ("copy_ms" in record)
        assert ("copy_ms" in record) == (record["path"] == "host_shm" and record["concurrency"] == 1)
    assert result["isolated"] == can_isolate()
    assert result["settings"]["chunk_bytes"] == MIB
    assert result["versions"]["grpcio"]
    assert str(tmp_path) not in json.dumps(result)
    assert str(ROOT) not in json.dumps(result)
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]
    assert "host_shm" in text


@pytest.mark.extended
def test_a_run_out_of_time_keeps_what_it_has_and_says_what_is_missing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/transport.py", "--quick", "--device", "cpu", "--out", str(tmp_path),
         "--paths", "host_shm", "--time-limit-s", "1e-6"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "nothing could be measured" in ended.stderr
    (path,) = tmp_path.glob("transport-*.json")
    result = json.loads(path.read_text())
    assert result["complete"] is False
    assert all(one["cut_short"] for one in result["left_out"])
    assert {one["path"] for one in result["left_out"]} == {"host_shm"}
