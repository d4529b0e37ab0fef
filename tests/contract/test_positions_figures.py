"""docs/positions.md says what its result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "Qwen3-VL 8B": "qwen3_vl_8b",
    "Qwen3-VL 2B": "qwen3_vl_2b",
    "Qwen3.5 9B": "qwen3_5_9b",
    "Qwen2.5-VL 7B": "qwen2_5_vl_7b",
}


def test_the_figures_of_the_kernels_are_those_of_the_result_file() -> None:
    page = (ROOT / "docs" / "positions.md").read_text()
    (name,) = re.findall(r"<!-- figures: (\S+) -->", page)
    records = json.loads((ROOT / name).read_text())["records"]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\d+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [(op, MODELS[model], int(tokens), *figures) for op, model, tokens, *figures in rows] == [
        (
            one["op"],
            one["shape"],
            one["num_tokens"],
            f"{one['median_us']['kernel']:.1f}",
            f"{one['over_torch']:.1f}",
            f"{one['over_copy']:.2f}",
        )
        for one in records
    ]
    rotations = [one for one in records if one["op"] == "apply_mrope"]
    assert min(one["over_torch"] for one in rotations) > 15
    missed = {(one["shape"], one["num_tokens"]) for one in rotations if one["over_copy"] > 1.2}
    few = {(shape, tokens) for shape in ("qwen3_vl_8b", "qwen3_5_9b") for tokens in (1, 16)}
    assert missed == {*few, ("qwen3_5_9b", 16384)}
    assert max(one["over_copy"] for one in rotations) < 1.29
