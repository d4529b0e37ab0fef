"""The towers equal vLLM's own in float32: of some families the reference package has no model, and the bench
times vLLM's as it is built here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine_families import PEERS_OF_FAMILIES
from bench.engine_towers import EngineTower, ranks
from encoder_service.towers import load_tower
from encoder_service.types import Grid
from tests.parity.tower_cases import (
    assert_close,
    config_with,
    fresh_seed,
    random_pixels,
    run_tower,
    vision_weights,
    write_published,
)

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
VLLM_RELATIVE = 1e-5
# At, below and above the position table's sides of 16; strips; one row.
IMAGES = [Grid(1, 4, 6), Grid(1, 16, 16), Grid(1, 20, 10), Grid(1, 2, 2), Grid(1, 2, 64), Grid(1, 38, 26)]
CLIPS = [Grid(4, 6, 4), Grid(1, 2, 6), Grid(2, 18, 8)]
CPU = torch.device("cpu")
# The head size of 128 and heads wider than the tower are Kimi-K3's; heads of 72 Kimi-VL's and Ling's.
SIZES: dict[str, dict[str, Any]] = {
    "kimi_vl": {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 538},
    "kimi_k3": {
        "vt_hidden_size": 128,
        "mm_hidden_size": 128,
        "qkv_hidden_size": 384,
        "vt_num_attention_heads": 3,
        "vt_intermediate_size": 512,
    },
    "ling_vl": {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538},
}
OF_IMAGES_ONLY = ("kimi_vl", "ling_vl")


def plain_norms(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's GLM-5.3 norms q and k by a kernel that needs a GPU."""
    norm = torch.nn.functional.rms_norm
    return norm(q, q.shape[-1:], q_weight, eps), norm(k, k.shape[-1:], k_weight, eps)


@pytest.fixture(autouse=True, scope="module")
def _in_vllm() -> Iterator[None]:
    with ranks(CPU):
        yield


@pytest.mark.parametrize("family", PEERS_OF_FAMILIES)
def test_rows_equal_vllms(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.models.common.ops.fused_q_kv_rmsnorm", plain_norms)
    config = config_with(family, "tiny", SIZES.get(family, {}))
    path = write_published(tmp_path / family, config, vision_weights(config, fresh_seed()))
    tower = load_tower(path, device=CPU, dtype=torch.float32).tower
    grids = IMAGES if family in OF_IMAGES_ONLY else IMAGES + CLIPS
    pixels = random_pixels(tower, grids, fresh_seed())
    expected = EngineTower(family, path, device=CPU, dtype=torch.float32).rows(pixels, grids)
    assert_close(f"{family} against vLLM", run_tower(tower, pixels, grids), expected, VLLM_RELATIVE)
