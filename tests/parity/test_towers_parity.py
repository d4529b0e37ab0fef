"""Rows of every family's tower equal the reference implementation's, in float32 and, looser, bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.reference import ReferenceTower
from encoder_service.checkpoints.synthetic import config_for
from encoder_service.towers import Tower, load_tower
from encoder_service.types import Grid
from tests.parity.tower_cases import (
    BFLOAT16_RELATIVE,
    FLOAT32_RELATIVE,
    config_with,
    errors,
    fresh_seed,
    random_pixels,
    report,
    run_tower,
    vision_weights,
    write_published,
)

# Published towers in miniature: the head size, the ratios and the deepstack pattern stay.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_vl-tiny": lambda: config_with("qwen3_vl", "tiny", {}),
    # Qwen3-VL-2B and 4B: 1024 wide, 16 heads of 64, 24 deep, levels 5, 11, 17.
    "qwen3_vl-2b": lambda: config_with(
        "qwen3_vl",
        "small",
        {
            "hidden_size": 128,
            "num_heads": 2,
            "intermediate_size": 512,
            "depth": 8,
            "deepstack_visual_indexes": [1, 3, 5],
            "out_hidden_size": 256,
        },
    ),
    # Qwen3-VL-8B and up: 1152 wide, 16 heads of 72, 27 deep, levels 8, 16, 24; here two levels, the last
    # one after the last block.
    "qwen3_vl_moe-235b": lambda: config_with(
        "qwen3_vl",
        "small",
        {
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 538,
            "depth": 5,
            "deepstack_visual_indexes": [0, 4],
            "out_hidden_size": 320,
        },
        model_type="qwen3_vl_moe",
    ),
    "qwen3_5-tiny": lambda: config_with("qwen3_5", "tiny", {}),
    "qwen3_5_moe-35b": lambda: config_with(
        "qwen3_5",
        "small",
        {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 6, "out_hidden_size": 192},
        model_type="qwen3_5_moe",
    ),
    # Qwen3.8-Flash-Next and Intern-S2-Preview have the widths of Qwen3.5, and rows of other widths.
    "qwen4_exp-125b": lambda: config_with(
        "qwen4_exp",
        "small",
        {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 6, "out_hidden_size": 320},
    ),
    "intern_s2_preview-35b": lambda: config_with(
        "intern_s2_preview",
        "small",
        {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 6, "out_hidden_size": 256},
    ),
    # Qwen3-Omni-30B-A3B: 1152 wide, 16 heads of 72, 27 deep, levels 8, 16, 24.
    "qwen3_omni_moe-30b": lambda: config_with(
        "qwen3_omni_moe",
        "small",
        {
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 538,
            "depth": 5,
            "deepstack_visual_indexes": [1, 2, 3],
            "out_hidden_size": 256,
        },
    ),
    # Intern-S1-Pro: 1024 wide, 16 heads of 64, 24 deep, without levels.
    "interns1_pro-1t": lambda: config_with(
        "interns1_pro",
        "small",
        {"hidden_size": 128, "num_heads": 2, "intermediate_size": 512, "depth": 6, "out_hidden_size": 512},
    ),
    "ling_vl-tiny": lambda: config_with("ling_vl", "tiny", {}),
    # Ling-3.0-flash-VL: 1152 wide, 16 heads of 72, 27 deep; the projector ends 2560 wide.
    "ling_vl-flash": lambda: config_with(
        "ling_vl",
        "small",
        {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "depth": 6},
        text_config={**config_for("ling_vl", "small")["text_config"], "hidden_size": 320},
    ),
    "kimi_k25-tiny": lambda: config_with("kimi_k25", "tiny", {}),
    "kimi_k25-72": lambda: config_with(
        "kimi_k25",
        "small",
        {
            "vt_hidden_size": 144,
            "mm_hidden_size": 144,
            "vt_num_attention_heads": 2,
            "vt_intermediate_size": 538,
            "vt_num_hidden_layers": 5,
            "text_hidden_size": 448,
            "projector_ln_eps": 1e-4,
        },
    ),
    # Kimi-VL-A3B: the sizes of Kimi-K2.5, whose tower this is without time.
    "kimi_vl-72": lambda: config_with(
        "kimi_vl",
        "tiny",
        {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 538, "num_hidden_layers": 5},
    ),
    "kimi_k3-tiny": lambda: config_with("kimi_k3", "tiny", {}),
    # Kimi-K3: 1024 wide, 12 heads of 128, 27 deep.
    "kimi_k3-128": lambda: config_with(
        "kimi_k3",
        "small",
        {
            "vt_hidden_size": 256,
            "mm_hidden_size": 256,
            "qkv_hidden_size": 384,
            "vt_num_attention_heads": 3,
            "vt_intermediate_size": 1024,
            "vt_num_hidden_layers": 5,
            "text_hidden_size": 448,
            "projector_ln_eps": 1e-4,
        },
    ),
    "glm4v-tiny": lambda: config_with("glm4v", "tiny", {}),
    # GLM-4.1V and 4.5V: 12 heads of 128, a table of 24 by 24.
    "glm4v_moe-106b": lambda: config_with(
        "glm4v",
        "small",
        {
            "hidden_size": 256,
            "num_heads": 2,
            "intermediate_size": 342,
            "depth": 4,
            "out_hidden_size": 320,
        },
        model_type="glm4v_moe",
    ),
    "glm_ocr-tiny": lambda: config_with("glm_ocr", "tiny", {}),
    # Heads of 64 as published; a limit that random weights reach.
    "glm5_next-tiny": lambda: config_with("glm5_next", "tiny", {"swiglu_limit": 0.5}),
    "glm5_next-64": lambda: config_with(
        "glm5_next", "small", {"hidden_size": 128, "num_heads": 2, "depth": 4, "out_hidden_size": 192}
    ),
    "qwen2_5_vl-tiny": lambda: config_with("qwen2_5_vl", "tiny", {}),
    # Qwen2.5-VL: 1280 wide, 16 heads of 80, 32 deep, every eighth block attends within the whole frame.
    "qwen2_5_vl-80": lambda: config_with(
        "qwen2_5_vl",
        "small",
        {"hidden_size": 160, "num_heads": 2, "intermediate_size": 428, "out_hidden_size": 256},
    ),
}

BATCHES: dict[str, list[Grid]] = {
    "single": [Grid(1, 14, 18)],
    "table_16": [Grid(1, 16, 16)],
    "table_48": [Grid(1, 48, 48)],
    "table_64": [Grid(1, 64, 64)],
    "larger_than_16": [Grid(1, 38, 26)],
    "larger_than_64": [Grid(1, 70, 66)],
    "smallest": [Grid(1, 2, 2)],
    "wide": [Grid(1, 2, 128)],
    "tall": [Grid(1, 200, 2)],
    "mixed": [Grid(1, 4, 6), Grid(1, 20, 10), Grid(1, 2, 2), Grid(1, 20, 10), Grid(1, 6, 4)],
    "clip": [Grid(3, 8, 6)],
    "clips": [Grid(4, 6, 8), Grid(4, 2, 10)],
    "mixed_frames": [Grid(1, 8, 8), Grid(4, 6, 4), Grid(2, 10, 2), Grid(1, 2, 2), Grid(3, 4, 4)],
}

# Kimi-VL has no clips.
STILLS = [name for name, grids in BATCHES.items() if all(grid.t == 1 for grid in grids)]
# Every kind of grid on the tiny towers, whose tables are 16 by 16; the published table sizes, which cost
# the most, where a variant has them.
SMALL_BATCHES = [name for name in BATCHES if name not in ("table_48", "table_64", "larger_than_64")]
CASES = [
    *((variant, batch) for variant in VARIANTS if variant.endswith("-tiny") for batch in SMALL_BATCHES),
    *(
        (variant, batch)
        for variant in VARIANTS
        if not variant.endswith("-tiny")
        for batch in ("single", "smallest", "wide", "mixed", "mixed_frames")
        if batch in STILLS or not variant.startswith("kimi_vl")
    ),
    *(
        pytest.param(variant, batch, marks=pytest.mark.extended)
        for variant, batch in (
            ("qwen3_vl-2b", "table_48"),
            ("kimi_k25-72", "table_64"),
            ("kimi_k25-72", "larger_than_64"),
            ("kimi_k3-128", "table_64"),
            ("kimi_k3-128", "larger_than_64"),
        )
    ),
]


class Pair:
    """Our tower and the reference's, from one published checkpoint."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.path = path
        self.seed = seed
        self.tower: Tower = load_tower(path, device=device, dtype=dtype).tower
        # In float32 the references are themselves up to 3e-6 from float64, about twice as far as our towers.
        truth = torch.float64 if dtype is torch.float32 else dtype
        self.reference = ReferenceTower(path, device=device, dtype=truth)

    def rows(self, grids: Sequence[Grid], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        print(f"weights of seed {self.seed}")
        pixels = random_pixels(self.tower, grids, seed)
        with torch.inference_mode():
            expected = self.reference.rows(pixels, grids).cpu()
        return run_tower(self.tower, pixels, grids), expected


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Callable[[str], Pair]:
    """The float32 pair of a variant, with weights drawn once per run."""

    @cache
    def build(variant: str) -> Pair:
        config = VARIANTS[variant]()
        tensors = vision_weights(config, fresh_seed())
        path = write_published(tmp_path_factory.mktemp(variant), config, tensors)
        return Pair(path, device, torch.float32)

    return build


@pytest.mark.parametrize(("variant", "batch"), CASES)
def test_p01_rows_equal_the_reference(pair_of: Callable[[str], Pair], variant: str, batch: str) -> None:
    grids = BATCHES[batch]
    pair = pair_of(variant)
    found, expected = pair.rows(grids, fresh_seed())

    assert found.shape == (sum(pair.tower.num_rows(grid) for grid in grids), pair.tower.width)
    figures = errors(found, expected)
    report(f"{variant} {batch} float32", figures)
    assert figures.relative < FLOAT32_RELATIVE
    assert figures.max_abs < 1e-4 * float(expected.abs().max())
    # A small level must not hide behind a large one.
    for level, (part, expected_part) in enumerate(
        zip(
            found.split(pair.tower.out_width, dim=1), expected.split(pair.tower.out_width, dim=1), strict=True
        )
    ):
        assert errors(part, expected_part).relative < FLOAT32_RELATIVE, f"level {level}"


@pytest.mark.parametrize(
    "variant",
    ["qwen3_vl-2b", "qwen3_5_moe-35b", "kimi_k25-72", "kimi_k3-128", "glm4v_moe-106b", "glm5_next-64"],
)
def test_bfloat16_stays_near_float32(
    pair_of: Callable[[str], Pair], device: torch.device, variant: str
) -> None:
    exact = pair_of(variant)
    rounded = Pair(exact.path, device, torch.bfloat16, exact.seed)
    grids, seed = BATCHES["mixed_frames"], fresh_seed()
    ours_float32, _ = exact.rows(grids, seed)
    ours, reference = rounded.rows(grids, seed)

    assert ours.dtype == torch.bfloat16
    figures, reference_figures = errors(ours, ours_float32), errors(reference, ours_float32)
    report(f"{variant} bfloat16 against float32", figures)
    report(f"{variant} reference's bfloat16 against float32", reference_figures)
    assert figures.relative < BFLOAT16_RELATIVE
    # Sums kept in float32 leave us no further from the truth than the reference is.
    assert figures.relative < 1.2 * reference_figures.relative
