"""The project's synthetic checkpoints as vLLM 0.32 takes them, whole or without the tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from encoder_service.towers.synthetic import make_checkpoint

TOWER_PREFIXES = ("model.visual.", "vision_tower.", "mm_projector.")
INDEX = "model.safetensors.index.json"
KIMI_SPELLING = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}


def write_checkpoint(out: Path, family: str, *, size: str = "tiny", with_tower: bool = True) -> Path:
    """A small model in the published layout. with_tower: False leaves the tower's tensors out."""
    make_checkpoint(out, family, size, seed=3, with_lm=True)
    if family == "kimi_k25":
        _respell(out / "config.json")
        _settle_experts(out)
    if not with_tower:
        _drop_tower(out)
    return out


def _respell(path: Path) -> None:
    """vLLM takes the reference's config class, which keeps its defaults (the real sizes) where it meets the
    published spelling. The encoder reads either."""
    config = json.loads(path.read_text())
    vision = config["vision_config"]
    vision |= {own: vision[published] for published, own in KIMI_SPELLING.items()}
    config["projection_hidden_size"] = vision["mm_hidden_size"]
    config["image_token_id"] = config["media_placeholder_token_id"]
    path.write_text(json.dumps(config))


def _settle_experts(folder: Path) -> None:
    """The same two experts for every token. Among random ones a rounding of the rows picks others, and two
    towers that agree to 16 bits would not give the same tokens."""

    def settle(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name.endswith("e_score_correction_bias"):
            return 4.0 * torch.arange(len(tensor), dtype=tensor.dtype)
        return tensor

    _edit(folder, settle)


def _drop_tower(folder: Path) -> None:
    _edit(folder, lambda name, tensor: None if name.startswith(TOWER_PREFIXES) else tensor)


def _edit(folder: Path, change: Any) -> None:
    weight_map = {}
    for path in sorted(folder.glob("*.safetensors")):
        changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        path.unlink()
        if kept:
            save_file(kept, path, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(kept, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
