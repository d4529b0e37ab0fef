"""The reference implementation, importable on a machine without torchvision's compiled operators.

Owns the one import of the ``transformers`` package in tests and benches, and its vision towers loaded from
published checkpoints. Leaves what to compare to each test.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file

from encoder_service.types import Grid
from lm_adapter.engines.hf import import_transformers

# Attention of packed sequences: queries, keys and values [P, H, d], cu_seqlens int32 [S + 1], the longest
# sequence, the scale of the logits; returns [P, H, d].
VarlenKernel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor
]


def import_reference() -> ModuleType:
    """The ``transformers`` module, beside whatever torchvision is installed."""
    transformers: ModuleType = import_transformers()
    return transformers


def register_varlen_attention(name: str, kernel: VarlenKernel) -> None:
    """Makes ``kernel`` an attention of the reference, for ``ReferenceTower.use_attention``.

    The name has to contain "flash": that is how the reference's towers tell an attention that takes
    cu_seqlens from one that is called once for each sequence. Raises ValueError otherwise.
    """
    if "flash" not in name:
        raise ValueError(
            f"the reference hands cu_seqlens only to names with 'flash' in them, not to {name!r}"
        )

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **_others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key, value: [1, H, P, d]; returns [1, P, H, d]."""
        q_PHd, k_PHd, v_PHd = (states[0].transpose(0, 1) for states in (query, key, value))
        return kernel(q_PHd, k_PHd, v_PHd, cu_seq_lens_q, max_length_q, scaling)[None], None

    import_reference().AttentionInterface.register(name, attend)


class ReferenceTower:
    """The reference's vision tower of one checkpoint, in the published layout, with its own projector.

    ``ReferenceTower(checkpoint, ...)`` makes one of the class that ``REFERENCES`` has for the model_type. The
    class here is of towers whose published names the reference takes as they are.

    merges_time: an item's frames attend to each other and become one set of rows.
    """

    merges_time = False

    def __new__(cls, checkpoint: Path, **_options: Any) -> ReferenceTower:
        model_type = json.loads((checkpoint / "config.json").read_text())["model_type"]
        return super().__new__(REFERENCES.get(model_type, ReferenceTower))

    def __init__(self, checkpoint: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        self._device = device
        self._dtype = dtype
        self._model = self.load(checkpoint, config, dtype).to(device).eval().requires_grad_(False)

    def rows(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[R, D * (1 + L)] of a batch. pixel_values: [P, patch_dim]. A reference that merges time cannot mix
        numbers of frames in one call, so that such batches go item by item."""
        pixels = pixel_values.to(self._device, self._dtype)
        # Convolutions default to TF32 on CUDA, which would hide errors of a thousand times the target.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            if self.merges_time and len({grid.t for grid in grids}) > 1:
                parts = pixels.split([grid.num_patches for grid in grids])
                return torch.cat(
                    [
                        self.forward(part, grid_thw=self._grid_thw([grid]))
                        for part, grid in zip(parts, grids, strict=True)
                    ]
                )
            return self.forward(pixels, grid_thw=self._grid_thw(grids))

    def use_attention(self, name: str) -> None:
        """The attention of the calls that follow: "sdpa", or what ``register_varlen_attention`` was given."""
        self.tower.config._attn_implementation = name

    def tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """What the reference's forward makes of the grids, with reads of device values by the host, made
        beforehand by its own functions: keyword arguments of ``forward``, on the device."""
        return self._tables(self._grid_thw(grids), self.tower, self.tower.config.spatial_merge_size)

    def forward(
        self, pixels: torch.Tensor, *, grid_thw: torch.Tensor, **tables: torch.Tensor | int
    ) -> torch.Tensor:
        """[R, D * (1 + L)] of pixels [P, patch_dim] in the model's dtype, on its device. With all of
        ``tables`` and an attention that takes cu_seqlens, the host reads no value of the device."""
        output = self._model(pixels, grid_thw=grid_thw, **tables)
        levels = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output, *levels], dim=-1)

    def load(self, checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
        """The model, on the host."""
        return _load_qwen(checkpoint, config, dtype)

    @property
    def tower(self) -> Any:
        """The part of the model that has blocks."""
        return self._model

    def _tables(self, grid_thw: torch.Tensor, interpolation: Any, merge_size: int) -> dict[str, Any]:
        """interpolation: the module that has the learned positions."""
        vision = importlib.import_module("transformers.vision_utils")
        indices, weights = vision.get_vision_interpolation_indices_and_weights(
            grid_thw,
            interpolation.num_grid_per_side,
            mode=interpolation.interpolation_mode,
            align_corners=interpolation.interpolation_align_corners,
            spatial_merge_size=merge_size,
        )
        cu_seqlens = vision.get_vision_cu_seqlens(grid_thw, merge_temporal=self.merges_time)
        return {
            "grid_thw": grid_thw,
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": vision.get_vision_position_ids(grid_thw, merge_size),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": int(cu_seqlens.diff().max()),
        }

    def _grid_thw(self, grids: Sequence[Grid]) -> torch.Tensor:
        return torch.tensor([list(grid) for grid in grids], device=self._device)


class KimiReference(ReferenceTower):
    """Goes through the reference's own conversion of published weights. A tiny language model stands in where
    the reference insists on one."""

    merges_time = True

    def tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        grid_thw, tower = self._grid_thw(grids), self.tower
        modeling = sys.modules[type(tower).__module__]
        return self._tables(grid_thw, tower.patch_embed.pos_emb, 1) | {
            "frame_index": modeling.get_vision_frame_index(grid_thw),
            "temporal_merge_index": modeling.get_vision_temporal_merge_index(
                grid_thw, *tower.merge_kernel_size
            ),
        }

    def forward(
        self, pixels: torch.Tensor, *, grid_thw: torch.Tensor, **tables: torch.Tensor | int
    ) -> torch.Tensor:
        side = int((pixels.shape[1] // 3) ** 0.5)
        frames = pixels.view(-1, 3, side, side)
        pooled = self.tower(frames, grid_thw=grid_thw, **tables).pooler_output
        rows: torch.Tensor = self._model.mm_projector(pooled).squeeze(1)
        return rows

    def load(self, checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
        return _load_kimi(checkpoint, config, dtype)

    @property
    def tower(self) -> Any:
        return self._model.vision_tower


class KimiVLReference(KimiReference):
    """The reference has no model of Kimi-VL. Of images its Kimi-K2.5 tower is the same, with which
    tests/engines/test_towers.py compares vLLM's class."""

    def load(self, checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
        model = _KimiModel(config["vision_config"], config["text_config"]["hidden_size"])
        return model.take(checkpoint).to(dtype)


class KimiK3Reference(KimiReference):
    """The reference has no model of Kimi-K3: its Kimi-K2.5 tower with the norms, layers and position table of
    vLLM's class, with which tests/engines/test_towers.py compares the tower."""

    def load(self, checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
        published = config["vision_config"]
        vision = {own: published[name] for name, own in KIMI_VISION_NAMES.items()}
        model = _KimiModel(vision, config["text_config"]["hidden_size"])
        model.become_k3(published["qkv_hidden_size"], published["projector_ln_eps"])
        return model.take(checkpoint).to(dtype)


class GlmReference(ReferenceTower):
    """Takes each frame of a clip as an item of its own, as the reference's own model calls it."""

    def tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        vision, grid_thw = importlib.import_module("transformers.vision_utils"), self._grid_thw(grids)
        cu_seqlens = vision.get_vision_cu_seqlens(grid_thw)
        return {
            "grid_thw": grid_thw,
            "position_ids": vision.get_vision_position_ids(grid_thw, self.tower.config.spatial_merge_size),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": int(cu_seqlens.diff().max()),
        }

    def _grid_thw(self, grids: Sequence[Grid]) -> torch.Tensor:
        return super()._grid_thw([grid._replace(t=1) for grid in grids for _ in range(grid.t)])


class Qwen25Reference(ReferenceTower):
    """Has windows, and no learned positions."""

    def tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        vision, grid_thw = importlib.import_module("transformers.vision_utils"), self._grid_thw(grids)
        config, cu_seqlens = self.tower.config, vision.get_vision_cu_seqlens(grid_thw)
        order, cu_window_seqlens = vision.get_vision_window_index(
            grid_thw, config.spatial_merge_size, config.window_size, config.patch_size
        )
        return {
            "grid_thw": grid_thw,
            "position_ids": vision.get_vision_position_ids(grid_thw, config.spatial_merge_size),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": int(cu_seqlens.diff().max()),
            "window_index": order.to(self._device),
            "cu_window_seqlens": cu_window_seqlens,
            "max_window_seqlen": int(cu_window_seqlens.diff().max()),
        }


class LingReference(ReferenceTower):
    """The reference has no model of Ling: its Qwen3.5 tower, with the merger and the projector of vLLM's
    class, with which tests/engines/test_towers.py compares the tower."""

    def load(self, checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
        return _load_ling(checkpoint, config, dtype)


REFERENCES: dict[str, type[ReferenceTower]] = {
    "kimi_k25": KimiReference,
    "kimi_vl": KimiVLReference,
    "kimi_k3": KimiK3Reference,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next"), GlmReference),
    "bailing_moe_v3_vl": LingReference,
    "qwen2_5_vl": Qwen25Reference,
}
"""By model_type, where it is not ReferenceTower itself."""


# By model_type: the module of the reference's models, and the tower's class. The reference has no Intern
# models, whose code has the tower of Qwen3.5.
QWEN_CLASSES = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
    "qwen3_5": ("qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeVisionModel"),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpVisionModel"),
    "qwen3_omni_moe": ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"),
    "interns1_pro": ("qwen3_5", "Qwen3_5VisionModel"),
    "intern_s2_preview": ("qwen3_5_moe", "Qwen3_5MoeVisionModel"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "glm4v": ("glm4v", "Glm4vVisionModel"),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoeVisionModel"),
    "glm46v": ("glm4v", "Glm4vVisionModel"),
    "glm_ocr": ("glm_ocr", "GlmOcrVisionModel"),
    "glm5_next": ("glm5_next", "Glm5NextVisionModel"),
}
PREFIXES = ("model.visual.", "thinker.visual.", "visual.")


def _load_qwen(checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The tower alone, every published tensor under its own name, none left over."""
    import_reference()
    module, name = QWEN_CLASSES[config["model_type"]]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    tower_class = getattr(modeling, name)
    # A dtype that the config states would round the weights before they are converted to ``dtype``.
    stated = config.get("thinker_config", config)["vision_config"]
    vision = {key: value for key, value in stated.items() if key not in ("model_type", "dtype")}
    model = tower_class._from_config(tower_class.config_class(**vision), attn_implementation="sdpa")
    tensors = _tensors(checkpoint)
    prefix = next(prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in tensors))
    visual = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    model.load_state_dict(visual, strict=True)
    return model.to(dtype)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


class _LingMerger(torch.nn.Module):
    """A norm over each patch, then the projector over the merged patches."""

    def __init__(self, width: int, merge_size: int, out_width: int) -> None:
        super().__init__()
        self.merged_width = width * merge_size**2
        self.norm = torch.nn.LayerNorm(width, eps=1e-6)
        self.linear_proj = torch.nn.Sequential(
            torch.nn.Linear(self.merged_width, out_width),
            torch.nn.GELU(),
            torch.nn.Linear(out_width, out_width),
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.linear_proj(self.norm(patches).view(-1, self.merged_width))
        return rows


def _load_ling(checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Every published tensor of the tower and the projector, none left over."""
    import_reference()
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    tower_class = modeling.Qwen3_5VisionModel
    others = ("model_type", "dtype", "disable_merger_proj")
    vision = {key: value for key, value in config["vision_config"].items() if key not in others}
    model = tower_class._from_config(tower_class.config_class(**vision), attn_implementation="sdpa")
    out_width = config["text_config"]["hidden_size"]
    model.merger = _LingMerger(vision["hidden_size"], vision["spatial_merge_size"], out_width)
    tensors = {
        name.replace("linear_proj.", "merger.linear_proj.", 1).removeprefix("model.visual."): value
        for name, value in _tensors(checkpoint).items()
        if name.startswith(("model.visual.", "linear_proj."))
    }
    model.load_state_dict(tensors, strict=True)
    return model.to(dtype)


# Published names of Kimi's vision settings and the reference package's own.
KIMI_VISION_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_kernel_size",
}


def _load_kimi(checkpoint: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Through from_pretrained, whose conversion renames, splits wqkv and permutes q and k."""
    transformers = import_reference()
    modeling = importlib.import_module("transformers.models.kimi_k25.modeling_kimi_k25")
    configuration = importlib.import_module("transformers.models.kimi_k25.configuration_kimi_k25")
    # The stand-in language model has no weights to load, which is reported at length.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    published = config["vision_config"]
    vision = {own: published.get(name, published.get(own)) for name, own in KIMI_VISION_NAMES.items()}
    width = vision["hidden_size"]
    text = transformers.DeepseekV3Config(
        vocab_size=32,
        hidden_size=config["text_config"]["hidden_size"],
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    reference_config = configuration.Kimi_K25Config(
        text_config=text,
        vision_config=configuration.Kimi_K25VisionConfig(**vision),
        projection_hidden_size=width,
        projection_layer_norm_eps=published.get("projector_ln_eps", 1e-5),
        tie_word_embeddings=False,
    )
    model, info = modeling.Kimi_K25ForConditionalGeneration.from_pretrained(
        checkpoint, config=reference_config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    untouched = [name for name in info["missing_keys"] if "vision_tower" in name or "mm_projector" in name]
    assert not untouched, f"the reference found no published tensor for {untouched}"
    return model.model


# Published names of MoonViT's tensors, and the reference package's own.
MOONVIT_NAMES = (
    (r"encoder\.blocks\.(\d+)\.norm1", r"layers.\1.norm2"),
    (r"encoder\.blocks\.(\d+)\.norm0", r"layers.\1.norm1"),
    (r"encoder\.blocks\.(\d+)\.mlp\.fc1", r"layers.\1.mlp.fc2"),
    (r"encoder\.blocks\.(\d+)\.mlp\.fc0", r"layers.\1.mlp.fc1"),
    (r"encoder\.blocks\.(\d+)\.wo", r"layers.\1.attn.proj"),
    (r"encoder\.blocks\.(\d+)\.wqkv", r"layers.\1.attn.wqkv"),
    (r"encoder\.final_layernorm", "final_layernorm"),
    (r"pos_emb\.weight", "pos_emb.position_embeddings"),
    (r"(multi_modal|mm)_projector\.(proj\.0|linear_1)", "mm_projector.in_proj"),
    (r"(multi_modal|mm)_projector\.(proj\.2|linear_2)", "mm_projector.out_proj"),
    (r"(multi_modal|mm)_projector\.", "mm_projector."),
)


class _KimiModel(torch.nn.Module):
    """The reference's modules of Kimi-K2.5, for towers that it has no model of. vision: sizes under the
    reference's names."""

    def __init__(self, vision: dict[str, Any], out_width: int) -> None:
        super().__init__()
        import_reference()
        modeling = importlib.import_module("transformers.models.kimi_k25.modeling_kimi_k25")
        configuration = importlib.import_module("transformers.models.kimi_k25.configuration_kimi_k25")
        known = {name: vision[name] for name in KIMI_VISION_NAMES.values() if name in vision}
        for side in ("height", "width"):
            known.setdefault(f"pos_emb_{side}", vision.get(f"init_pos_emb_{side}", 64))
        config = configuration.Kimi_K25VisionConfig(**known)
        self.vision_tower = modeling.Kimi_K25VisionModel._from_config(config, attn_implementation="sdpa")
        width = config.hidden_size
        sizes = {"projection_hidden_size": width, "projection_layer_norm_eps": 1e-5}
        text = SimpleNamespace(hidden_size=out_width)
        self.mm_projector = modeling.Kimi_K25MultimodalProjection(
            SimpleNamespace(vision_config=config, text_config=text, **sizes)
        )

    def become_k3(self, qkv_width: int, projector_eps: float) -> None:
        tower, projector = self.vision_tower, self.mm_projector
        width, num_heads = tower.config.hidden_size, tower.config.num_attention_heads
        tower.config.head_dim = qkv_width // num_heads
        tower.rotary_emb = type(tower.rotary_emb)(tower.config)
        tower.patch_embed.proj.bias = None
        tower.patch_embed.pos_emb.interpolation_mode = "bilinear"
        tower.final_layernorm = torch.nn.RMSNorm(width)
        for layer in tower.layers:
            layer.norm1, layer.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
            layer.mlp.fc1.bias = layer.mlp.fc2.bias = None
            attention = layer.attn
            attention.head_dim = tower.config.head_dim
            attention.scaling = attention.head_dim**-0.5
            for part in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, part, torch.nn.Linear(width, qkv_width, bias=False))
            attention.proj = torch.nn.Linear(qkv_width, width, bias=False)
        self.mm_projector = torch.nn.Sequential()
        self.mm_projector.flatten = torch.nn.Flatten()
        merged_width, out_width = projector.in_proj.in_features, projector.out_proj.out_features
        self.mm_projector.in_proj = torch.nn.Linear(merged_width, merged_width, bias=False)
        self.mm_projector.act = torch.nn.GELU()
        self.mm_projector.out_proj = torch.nn.Linear(merged_width, out_width, bias=False)
        self.mm_projector.post_norm = torch.nn.RMSNorm(out_width, eps=projector_eps)

    def take(self, checkpoint: Path) -> _KimiModel:
        """Loads every published tensor of the tower and the projector, none left over."""
        own: dict[str, torch.Tensor] = {}
        for published, value in _tensors(checkpoint).items():
            if not published.startswith(("vision_tower.", "mm_projector.", "multi_modal_projector.")):
                continue
            name = published
            for pattern, replacement in MOONVIT_NAMES:
                name, num_found = re.subn(pattern, replacement, name)
                if num_found:
                    break
            if ".wqkv." in name:
                for part, values in zip("qkv", value.chunk(3), strict=True):
                    is_rotated = part != "v"
                    own[name.replace("wqkv", f"{part}_proj")] = self._halves(values) if is_rotated else values
            else:
                own[name] = value
        self.load_state_dict(own, strict=True)
        return self

    def _halves(self, values: torch.Tensor) -> torch.Tensor:
        """From adjacent pairs to halves of a head."""
        heads = values.unflatten(0, (self.vision_tower.config.num_attention_heads, -1, 2))
        return heads.transpose(1, 2).flatten(0, 2)
