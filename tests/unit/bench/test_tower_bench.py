"""The tower bench itself, on a CPU with the smallest towers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, RUN_ORDER, grids_of, num_patches_of, random_inputs
from checkpoints import random_checkpoint
from variants import (
    MAX_PATCHES,
    OURS,
    REFERENCES,
    Case,
    CompileBudget,
    Family,
    accuracies,
    accuracy,
    describe_runner,
)

from encoder_service.engine.fast_path import ladder_of
from encoder_service.scheduler.buckets import ladder_of_sizes
from encoder_service.scheduler.cost import Launch
from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.gemm.per_rows import TORCH_CHOICES
from encoder_service.towers.synthetic import FAMILIES, config_for, vision_layout

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
}


def run_bench(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    ended = subprocess.run(
        [sys.executable, "bench/tower.py", "--size", "tiny", "--device", "cpu", "--out", str(out), *options],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = out.glob("tower-*.json")
    return json.loads(path.read_text()), ended.stdout


def test_a_quick_run_leaves_records_reasons_and_a_chart(tmp_path: Path) -> None:
    result, text = run_bench(tmp_path, "--quick", "--families", "qwen3_vl")
    assert result["complete"] is True
    places = {(one["family"], one["case"], one["variant"]) for one in result["records"]}
    assert places == {("qwen3_vl", "1x256", variant) for variant in ("plain", "ref_sdpa")}
    for record in result["records"]:
        assert record["min_ms"] <= record["median_ms"] <= record["max_ms"]
        assert record["useful_tflops"] > 0
        assert record["padding_share"] == 0
        assert record["num_patches"] == 256
    left_out = {one["variant"]: one["reason"] for one in result["left_out"]}
    assert set(left_out) == {*REFERENCES, *OURS} - {"plain", "ref_sdpa", "ref_compiled"}
    assert all("CUDA" in reason for reason in left_out.values())
    (check,) = result["checks"]
    assert check["relative_error"] < 1e-5
    (exactness,) = result["accuracy"]
    assert (exactness["variant"], exactness["against"]) == ("plain", "float32")
    assert exactness["cosine_min"] == pytest.approx(1)
    assert result["power"]["reason"] == "cpu is no GPU"
    assert result["padding"]["records"]
    assert "left out: graph" in text
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]


def test_a_run_out_of_time_leaves_a_valid_file_marked_incomplete(tmp_path: Path) -> None:
    result, text = run_bench(tmp_path, "--quick", "--time-limit-s", "1e-6")
    assert result["complete"] is False
    assert result["records"] == []
    assert {(one["family"], one["cut_short"]) for one in result["left_out"]} == {
        (family, True) for family in FAMILIES
    }
    assert "no chart: 0 records" in text


def test_every_case_is_run_once_and_has_the_same_patches_in_every_family() -> None:
    assert set(CASES) < set(RUN_ORDER)
    assert len(RUN_ORDER) == len(set(RUN_ORDER))
    for case in CASES:
        patches = {sum(grid.num_patches for grid in grids_of(case, merges_time=merges)) for merges in (0, 1)}
        assert patches == {num_patches_of(case)}
    assert num_patches_of("mixed") == 33_920
    assert num_patches_of("mixed") <= MAX_PATCHES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quick_checkpoint_has_the_published_tensors_and_scales(family: str) -> None:
    with random_checkpoint(family, "tiny", 5, CPU) as path:
        tower = load_tower(path, device=CPU, dtype=torch.float32).tower
        held = path
    assert not held.exists()
    specs = {spec.name: spec for spec in vision_layout(config_for(family, "tiny"))}
    name, spec = max(specs.items(), key=lambda item: item[1].num_bytes)
    largest = max(tower.parameters(), key=torch.numel)
    assert largest.numel() >= spec.num_bytes // spec.dtype.itemsize // 4, name
    assert float(largest.std()) > 0
    inputs = random_inputs(tower, grids_of("1x256", merges_time=tower.merges_time), 0)
    with torch.inference_mode():
        rows = tower(inputs)
    assert bool(rows.isfinite().all())
    assert 0.01 < float(rows.std()) < 100


def family_of(path: Path, **options: Any) -> Family:
    settings: dict[str, Any] = {
        "variants": ("plain",),
        "cases": CASES,
        "reference": None,
        "no_fa3": "absent",
        "full_ladder": False,
        "compile_budget": CompileBudget(10),
    }
    return Family("kimi_k25", path, CPU, torch.float32, **(settings | options))


def test_a_ladder_of_the_cases_alone_chooses_the_same_buckets() -> None:
    with random_checkpoint("kimi_k25", "tiny", 5, CPU) as path:
        family = family_of(path)
    full = ladder_of(family.tower, MAX_PATCHES, ())
    few = ladder_of(family.tower, MAX_PATCHES, family._bucket_sizes(CASES))
    assert len(few) < len(full) / 4
    for case in CASES:
        grids = grids_of(case, merges_time=True)
        launch = Launch.of([grid.num_patches for grid in grids], max(grid.t for grid in grids))
        assert few.choose_for(launch) == full.choose_for(launch) is not None


def test_a_baseline_that_fails_is_left_out_with_its_reason() -> None:
    class Failing:
        def tables(self, grids: object) -> None:
            raise RuntimeError("out of something\nsecond line")

    with random_checkpoint("kimi_k25", "tiny", 5, CPU) as path:
        family = family_of(path, variants=("ref_fa3_graph", "ref_compiled"), reference=Failing(), no_fa3=None)
    case = family.case("1x256", 0, every_backend=False)
    assert not case.runs
    assert case.left_out["ref_fa3_graph"] == "RuntimeError: out of something"
    assert "only: each takes long" in case.left_out["ref_compiled"]
    assert "no_fa3" not in case.left_out


def test_the_compile_budget_begins_nothing_that_took_longer_than_is_left() -> None:
    budget = CompileBudget(60)
    budget.check()
    budget.spend(25)
    budget.check()
    budget.spend(25)
    with pytest.raises(Exception, match="10 s are left of the compile budget, the last case took 25 s"):
        budget.check()


def test_a_capture_says_which_attention_and_which_gemms_were_chosen() -> None:
    tower = SimpleNamespace(
        attention=SimpleNamespace(choices={(64, 16): SdpaAttention()}), gemms=TORCH_CHOICES
    )
    runner = SimpleNamespace(ladder=ladder_of_sizes([64]), captured_bytes=7, _tower=tower)
    found = json.loads(json.dumps(describe_runner(runner)))  # type: ignore[arg-type]
    assert found["attention"] == {"64x16": "sdpa"}
    assert found["gemms"] == {step: {"1": "torch"} for step in ("rotate", "gelu", "add_attention", "add_mlp")}


def test_accuracy_is_by_row_and_over_all() -> None:
    expected = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = torch.tensor([[6.0, 8.0], [0.0, 1.0]])
    assert accuracy(found, expected) == pytest.approx(
        {"cosine_mean": 0.5, "cosine_min": 0.0, "relative_error": (27 / 26) ** 0.5}
    )


def test_fp8_is_held_against_float32_and_the_graph_and_must_be_finite() -> None:
    exact = torch.tensor([[1.0, 2.0]])
    runs = {"graph": lambda: exact * 1.5, "fp8": lambda: exact * 2.0, "ref_sdpa": lambda: None}
    case = Case("1x448", inputs=None, flops=1, runs=runs)  # type: ignore[arg-type]
    found = accuracies(case, lambda inputs: exact)  # type: ignore[arg-type]
    assert {(one["variant"], one["against"]): round(one["relative_error"], 4) for one in found} == {
        ("graph", "float32"): 0.5,
        ("fp8", "float32"): 1.0,
        ("fp8", "graph"): 0.3333,
    }
    case.runs["fp8"] = lambda: exact * float("nan")
    with pytest.raises(ValueError, match="fp8: 2 values are not finite"):
        accuracies(case, lambda inputs: exact)  # type: ignore[arg-type]
