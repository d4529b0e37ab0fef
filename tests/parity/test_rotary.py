"""M-RoPE applied as the reference applies it: its own rotary modules, of every layout that models use."""

from __future__ import annotations

import importlib
import secrets
from typing import Any

import pytest
import torch

from bench.harness.reference import import_reference
from lm_adapter.prefill.rotary import RotaryTable, apply_mrope

# Published text configs: sections, order and partial rotation.
QWEN3_VL = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
QWEN3_5 = {
    "hidden_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
QWEN2_5_VL = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
}
MAX_POSITIONS = 40_000
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "qwen3_vl": (QWEN3_VL, "Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig"),
    "qwen3_5": (QWEN3_5, "Qwen3_5TextRotaryEmbedding", "Qwen3_5TextConfig"),
    "qwen2_5_vl": (QWEN2_5_VL, "Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig"),
}


def reference_rotation(
    family: str, q_THd: torch.Tensor, k_THd: torch.Tensor, positions_3T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of one prompt through the reference, whose tensors are [B, H, T, d]."""
    import_reference()
    text_config, rotary_name, config_name = CASES[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, config_name)(**text_config)
    rotary: Any = getattr(modeling, rotary_name)(config)
    q, k = q_THd.transpose(0, 1)[None], k_THd.transpose(0, 1)[None]
    cos, sin = rotary(q, positions_3T[:, None])
    if family == "qwen2_5_vl" and cos.ndim == 4:
        sections = text_config["rope_parameters"]["mrope_section"]
        rotated = modeling.apply_multimodal_rotary_pos_emb(q, k, cos, sin, sections)
    else:
        rotated = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    return rotated[0][0].transpose(0, 1), rotated[1][0].transpose(0, 1)


@pytest.mark.parametrize("family", CASES)
def test_rotated_heads_equal_the_references(family: str, device: torch.device) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    text_config = CASES[family][0]
    num_heads, num_kv_heads = text_config["num_attention_heads"], text_config["num_key_value_heads"]
    head_dim = text_config.get("head_dim") or text_config["hidden_size"] // num_heads
    q = torch.randn(33, num_heads, head_dim, generator=generator)
    k = torch.randn(33, num_kv_heads, head_dim, generator=generator)
    positions = torch.randint(MAX_POSITIONS, (3, 33), generator=generator)
    expected_q, expected_k = reference_rotation(family, q, k, positions)
    table = RotaryTable.from_config(text_config, max_positions=MAX_POSITIONS, device=device)
    held_q, held_k = q.to(device), k.to(device)
    apply_mrope(held_q, held_k, positions.to(device), table)
    torch.testing.assert_close(held_q.cpu(), expected_q, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(held_k.cpu(), expected_k, rtol=1e-6, atol=2e-6)
    # Positions decide, on every axis: one axis far away gives other heads, also where it turns slowly.
    for axis in range(3):
        moved = positions.clone()
        moved[axis] = (moved[axis] + MAX_POSITIONS // 2) % MAX_POSITIONS
        other_q, other_k = q.to(device), k.to(device)
        apply_mrope(other_q, other_k, moved.to(device), table)
        assert (other_q.cpu() - expected_q).abs().max() > 1e-2
