"""The tower bench's chart has all that the bench can record."""

from __future__ import annotations

from pathlib import Path

from bench.charts import FAMILIES, VARIANT_STYLES, draw
from bench.variants import KNOWN_VARIANTS
from encoder_service.checkpoints import families


def test_every_family_and_variant_is_drawn(tmp_path: Path) -> None:
    """Also of families that lack some variants, the first among them."""
    assert {*VARIANT_STYLES} == {*KNOWN_VARIANTS}
    assert {*FAMILIES} == {*families.FAMILIES}
    records = [
        {"family": family, "case": "1x448", "variant": variant, "num_patches": 784}
        | {"median_ms": 2.5, "useful_tflops": 300.0}
        for family, variants in (("ling_vl", ["vllm", "graph"]), ("kimi_k3", list(VARIANT_STYLES)))
        for variant in variants
    ]
    result = {
        "date": "2026-11-29", "commit": "0", "device": "a GPU", "ceilings": {"matmul_tflops": 789.0},
        "settings": {"size": "full", "dtype": "bfloat16"}, "records": records,
    }  # fmt: skip
    assert draw("tower", result, tmp_path / "tower.png").stat().st_size > 10_000
