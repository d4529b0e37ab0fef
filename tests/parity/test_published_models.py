"""Models whose towers are served under another release's model_type: rows at the published sizes.

The values are those of each checkpoint's config.json on the hub. Two blocks stand for 27, which are alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.reference import ReferenceTower
from encoder_service.towers import load_tower
from encoder_service.types import Grid
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.items import Modality
from tests.parity.tower_cases import (
    FLOAT32_RELATIVE,
    assert_close,
    fresh_seed,
    random_pixels,
    run_tower,
    vision_weights,
    write_published,
)

NUM_BLOCKS = 2


def qwen(model_type: str, architecture: str, width: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": {"hidden_size": width, "model_type": f"{model_type}_text"},
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": NUM_BLOCKS,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": model_type,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": width,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "text_config": {"hidden_size": 7168, "model_type": "kimi_k2"},
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": 7168,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": NUM_BLOCKS,
    },
}

# Releases whose vision_config is the same stand on one line.
PUBLISHED = {
    "Qwen3.6-27B, Qwen3.8-27B": qwen("qwen3_5", "Qwen3_5ForConditionalGeneration", 5120),
    "Qwen3.6-35B-A3B": qwen("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", 2048),
    "Kimi-K2.6, Kimi-K2.7-Code": KIMI,
}


@pytest.mark.parametrize("names", PUBLISHED)
def test_rows_at_published_sizes_equal_the_reference(
    names: str, tmp_path: Path, device: torch.device
) -> None:
    config = PUBLISHED[names]
    checkpoint = write_published(tmp_path, config, vision_weights(config, fresh_seed()))
    tower = load_tower(checkpoint, device=device, dtype=torch.float32).tower
    reference = ReferenceTower(checkpoint, device=device, dtype=torch.float32)
    # A side longer than the learned table's, a small image, a clip.
    grids = [Grid(1, 4, 66), Grid(1, 8, 6), Grid(3, 6, 4)]
    pixels = random_pixels(tower, grids, fresh_seed())
    with torch.inference_mode():
        expected = reference.rows(pixels, grids).cpu()
    assert_close(names, run_tower(tower, pixels, grids), expected, FLOAT32_RELATIVE)

    # The side of the language model takes the file for the same family.
    interface = vision_interface(config)
    assert (interface.family, interface.num_deepstack_levels) == (tower.family, 0)
    grid = grids[-1]
    assert interface.prompt_item(grid, Modality.VIDEO).num_rows == tower.num_rows(grid)
