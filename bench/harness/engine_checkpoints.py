"""The project's synthetic checkpoints as vLLM takes them, whole or without the tower."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from encoder_service.checkpoints.synthetic import draw, make_checkpoint
from encoder_service.checkpoints.synthetic.ling import LANGUAGE
from encoder_service.checkpoints.synthetic.tensors import language_layout

TOWER_PREFIXES = (
    *("model.visual.", "visual.", "thinker.visual."),
    *("vision_tower.", "mm_projector.", "multi_modal_projector.", "linear_proj."),
)
KIMI_VL_CODE = Path(__file__).parent / "remote" / "kimi_vl_code.py"
INDEX = "model.safetensors.index.json"
MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe")
"""Families whose MLPs have experts, of the dense families without the ending."""
NUM_EXPERTS = 4
KIMI_SPELLING = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}

Tensors = dict[str, torch.Tensor]


def write_checkpoint(out: Path, family: str, *, size: str = "tiny", with_tower: bool = True) -> Path:
    """A small model in the published layout. with_tower: False leaves the tower's tensors out."""
    dense = family.removesuffix("_moe") if family in MIXTURES else family
    make_checkpoint(out, dense, size, seed=3, with_lm=True)
    if family in MIXTURES:
        _mix_experts(out, family)
    for change in FOR_ENGINES.get(family, ()):
        change(out)
    if not with_tower:
        _drop_tower(out)
    return out


def _respell(folder: Path) -> None:
    """vLLM takes the reference's config class, which keeps its defaults (the real sizes) where it meets the
    published spelling. The encoder reads either."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    vision = config["vision_config"]
    vision |= {own: vision[published] for published, own in KIMI_SPELLING.items()}
    config["projection_hidden_size"] = vision["mm_hidden_size"]
    config["image_token_id"] = config["media_placeholder_token_id"]
    path.write_text(json.dumps(config))


def _settle_experts(folder: Path) -> None:
    """The same two experts for every token. Among random ones a rounding of the rows picks others, and two
    towers that agree to 16 bits would not give the same tokens."""

    def settle(tensors: Tensors) -> Tensors:
        order = {
            name: 4.0 * torch.arange(len(tensor), dtype=tensor.dtype)
            for name, tensor in tensors.items()
            if name.endswith(("e_score_correction_bias", "expert_bias"))
        }
        return tensors | order

    _edit(folder, settle)


def _mix_experts(folder: Path, family: str) -> None:
    """Cuts each dense MLP into experts. Every token uses all of them, in shares that the router gives it, so
    that no rounding of the rows picks others. In Qwen3.5 the whole MLP is the shared expert."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    config["model_type"], text["model_type"] = family, f"{family}_text"
    config["architectures"] = [config["architectures"][0].replace("For", "MoeFor")]
    text |= {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": text["intermediate_size"] // NUM_EXPERTS,
        "norm_topk_prob": True,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
    }
    if family == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = text["intermediate_size"]
    path.write_text(json.dumps(config))
    width = text["hidden_size"]

    def mix(tensors: Tensors) -> Tensors:
        mixed = dict(tensors)
        for name in [name for name in tensors if re.search(r"language_model.*\.mlp\.gate_proj", name)]:
            stem = name.removesuffix("gate_proj.weight")
            parts = {part: mixed.pop(f"{stem}{part}_proj.weight") for part in ("gate", "up", "down")}
            gates, ups = (parts[part].reshape(NUM_EXPERTS, -1, width) for part in ("gate", "up"))
            downs = NUM_EXPERTS * parts["down"].reshape(width, NUM_EXPERTS, -1).transpose(0, 1)
            both = torch.cat((gates, ups), 1)
            if family == "qwen3_vl_moe":  # published as [experts, in, out]
                both, downs = both.transpose(1, 2), downs.transpose(1, 2)
            else:
                mixed |= {f"{stem}shared_expert.{part}_proj.weight": parts[part] for part in parts}
                mixed[f"{stem}shared_expert_gate.weight"] = parts["up"][-1:].clone()
            mixed[f"{stem}experts.gate_up_proj"] = both.contiguous()
            mixed[f"{stem}experts.down_proj"] = downs.contiguous()
            mixed[f"{stem}gate.weight"] = parts["up"][:NUM_EXPERTS].clone()
        return mixed

    _edit(folder, mix)


def _drop_tower(folder: Path) -> None:
    def drop(tensors: Tensors) -> Tensors:
        return {name: one for name, one in tensors.items() if not name.startswith(TOWER_PREFIXES)}

    _edit(folder, drop)


def _edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """change: of the tensors of one file."""
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        kept = change(load_file(path))
        path.unlink()
        if kept:
            save_file(kept, path, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(kept, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


INTERN_CONFIGURATION = """from transformers import PretrainedConfig, {text}

class InternTextConfig({text}):
    model_type = "{model_type}_text"

class InternVisionConfig(PretrainedConfig):
    model_type = "{model_type}_vision"
    base_config_key = "vision_config"

class InternConfig(PretrainedConfig):
    model_type = "{model_type}"
    sub_configs = {{"vision_config": InternVisionConfig, "text_config": InternTextConfig}}

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        self.text_config = InternTextConfig(**(text_config or {{}}))
        self.vision_config = InternVisionConfig(**(vision_config or {{}}))
        super().__init__(**kwargs)
"""


def _with_configuration(text: str) -> Callable[[Path], None]:
    """The published folder has the class of its config.json, because the reference has none. text: the
    reference's class of the language model. Its processor class is of the same names as Qwen3-VL's."""

    def write(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        code = INTERN_CONFIGURATION.format(text=text, model_type=config["model_type"])
        (folder / "configuration_intern.py").write_text(code)
        config["auto_map"] = {"AutoConfig": "configuration_intern.InternConfig"}
        path.write_text(json.dumps(config))

    return write


def _add_code(folder: Path) -> None:
    """The published checkpoint has its processor as code, by which vLLM prepares images for its own tower."""
    shutil.copy(KIMI_VL_CODE, folder)
    path = folder / "preprocessor_config.json"
    classes = {"AutoImageProcessor": "KimiVLImageProcessor", "AutoProcessor": "KimiVLProcessor"}
    code = {"auto_map": {name: f"{KIMI_VL_CODE.stem}.{found}" for name, found in classes.items()}}
    path.write_text(json.dumps(json.loads(path.read_text()) | code | {"processor_class": "KimiVLProcessor"}))


def _attend_in_all_layers(folder: Path) -> None:
    """Latent attention in every layer: engines have no kernel of Ling's delta attention for a CPU. vLLM looks
    for the layers' types outside of text_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["layer_group_size"] = 1
    config["layer_types"] = ["full_attention"] * config["text_config"]["num_hidden_layers"]
    path.write_text(json.dumps(config))

    drawn = {spec.name: draw(spec, seed=3) for spec in language_layout(config, LANGUAGE)}

    def redraw(tensors: Tensors) -> Tensors:
        """The first file gets the language model."""
        tower = {name: one for name, one in tensors.items() if name.startswith(TOWER_PREFIXES)}
        tower |= drawn
        drawn.clear()
        return tower

    _edit(folder, redraw)


FOR_ENGINES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "kimi_k25": (_respell, _settle_experts),
    "interns1_pro": (_with_configuration("Qwen3MoeConfig"),),
    "intern_s2_preview": (_with_configuration("Qwen3_5MoeTextConfig"),),
    "kimi_vl": (_add_code, _settle_experts),
    "ling_vl": (_attend_in_all_layers, _settle_experts),
}
"""What engines need changed in the whole checkpoint of a family."""
