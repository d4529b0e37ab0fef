"""Which of vLLM's modules are a family's tower and projector, how they are made, and what they take.

Owns the knowledge of vLLM's names and arguments; ``engine_towers.py`` builds and runs what is listed here.
Modules are made by the content of a config.json.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from bench.harness.engine_checkpoints import KIMI_SPELLING
from bench.references import LeftOut
from encoder_service.types import Grid

MODELS = "vllm.model_executor.models"
GLM5_NEXT = "vllm.models.glm5next.common.multimodal"
PATCH_SIDE_OF_KIMI = 14


@dataclass(frozen=True)
class Peer:
    """vLLM's side of a family. model: module and class that have the weights' names and the graphs' methods.
    modules: of a config.json, by their names in the model. inputs: of pixels and grids, the keyword arguments
    of the graphs. rows: of a model, pixels and grids."""

    model: tuple[str, str]
    modules: Callable[[Mapping[str, Any]], dict[str, torch.nn.Module]]
    inputs: Callable[[torch.Tensor, Sequence[Grid]], dict[str, Any]]
    rows: Callable[[Any, torch.Tensor, Sequence[Grid]], torch.Tensor]


def text_width(config: Mapping[str, Any]) -> int:
    section = config.get("thinker_config", config)
    width: int = section.get("text_config", section)["hidden_size"]
    return width


def named(values: Any) -> Any:
    """A JSON object whose members are attributes, as vLLM reads a configuration."""
    if isinstance(values, Mapping):
        return SimpleNamespace(**{name: named(value) for name, value in values.items()})
    return values


def module_alone(name: str) -> ModuleType:
    """A module of vLLM without the packages around it, which import the kernels of language models."""
    root = Path(importlib.import_module("vllm").__path__[0])
    file = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name.replace(".", "_"), file)
    if spec is None or spec.loader is None or not file.is_file():
        raise LeftOut(f"this vLLM has no {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- Qwen and its kin ----------------------------------------------------------------------------------


def qwen_modules(module: str, name: str, config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    section = config.get("thinker_config", config)
    texts = [config] if "thinker_config" not in config else [section["text_config"]]
    if config["model_type"] == "qwen4_exp":
        texts = [config["text_config"]]
    eps = texts[0].get("rms_norm_eps", 1e-6)
    kind = getattr(importlib.import_module(f"{MODELS}.{module}"), name)
    vision = named(section["vision_config"])
    if not hasattr(vision, "in_channels"):
        vision.in_channels = vision.in_chans
    return {"visual": kind(vision, norm_eps=eps, prefix="visual")}


def qwen_inputs(pixels: torch.Tensor, grids: Sequence[Grid]) -> dict[str, Any]:
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([list(grid) for grid in grids])}


def qwen_rows(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    rows: torch.Tensor = model.visual(pixels, grid_thw=[list(grid) for grid in grids])
    return rows


def grid_tensor_rows(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    rows: torch.Tensor = model.visual(pixels, grid_thw=torch.tensor([list(grid) for grid in grids]))
    return rows


def glm_modules(find: Callable[[], type], config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    eps = 1e-6 if config["model_type"] == "glm5_next" else config.get("rms_norm_eps", 1e-5)
    text, vision = named(config.get("text_config", config)), named(config["vision_config"])
    return {"visual": find()(text, vision, norm_eps=eps, prefix="visual")}


# -- Kimi and Ling -------------------------------------------------------------------------------------


def kimi_pixels(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.view(-1, 3, PATCH_SIDE_OF_KIMI, PATCH_SIDE_OF_KIMI)


def kimi_vl_modules(config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    theirs: Any = importlib.import_module(f"{MODELS}.kimi_vl")
    sizes = theirs.KimiVLConfig(vision_config=config["vision_config"])
    sizes.text_config.hidden_size = text_width(config)
    return {
        "vision_tower": theirs.MoonVitPretrainedModel(sizes.vision_config, prefix="vision_tower"),
        "multi_modal_projector": theirs.KimiVLMultiModalProjector(sizes, prefix="multi_modal_projector"),
    }


def kimi_vl_inputs(pixels: torch.Tensor, grids: Sequence[Grid]) -> dict[str, Any]:
    sides = torch.tensor([[grid.h, grid.w] for grid in grids])
    return {"pixel_values": kimi_pixels(pixels), "image_grid_hws": sides}


def kimi_vl_rows(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    inputs = kimi_vl_inputs(pixels, grids)
    parts = model.vision_tower(inputs["pixel_values"], inputs["image_grid_hws"])
    rows: torch.Tensor = model.multi_modal_projector(torch.cat(parts))
    return rows


def kimi_k25_modules(config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    theirs: Any = importlib.import_module(f"{MODELS}.kimi_k25_vit")
    vision = config["vision_config"]
    own = {own: vision[published] for published, own in KIMI_SPELLING.items()}
    return moonvit_modules(config, theirs.Kimi_K25VisionConfig(**vision | own))


def kimi_k3_modules(config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    theirs: Any = importlib.import_module(f"{MODELS}.kimi_k25_vit")
    return moonvit_modules(config, theirs.KimiK3VisionConfig(**config["vision_config"]))


def moonvit_modules(config: Mapping[str, Any], sizes: Any) -> dict[str, torch.nn.Module]:
    theirs: Any = importlib.import_module(f"{MODELS}.kimi_k25_vit")
    projector = theirs.KimiK25MultiModalProjector(sizes, text_width(config), prefix="mm_projector")
    tower = theirs.MoonViT3dPretrainedModel(sizes, prefix="vision_tower")
    # As vLLM's model does: tables and norms have been made in float32.
    dtype = torch.get_default_dtype()
    return {"vision_tower": tower.to(dtype), "mm_projector": projector.to(dtype)}


def kimi_inputs(pixels: torch.Tensor, grids: Sequence[Grid]) -> dict[str, Any]:
    return {"pixel_values": kimi_pixels(pixels), "grid_thws": torch.tensor([list(grid) for grid in grids])}


def kimi_rows(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    parts = model.vision_tower(kimi_pixels(pixels), [list(grid) for grid in grids])
    rows: torch.Tensor = model.mm_projector(torch.cat(parts))
    return rows


def ling_modules(config: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    theirs: Any = importlib.import_module(f"{MODELS}.bailing_moe_v3_vl")
    vision, width = named(config["vision_config"]), text_width(config)
    merged_width = vision.hidden_size * vision.spatial_merge_size**2
    return {
        "visual": theirs.BailingMoeV3VisionTransformer(vision, prefix="visual"),
        "linear_proj": theirs.BailingMoeV3VLProjector(merged_width, width, prefix="linear_proj"),
    }


def ling_rows(model: Any, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    rows: torch.Tensor = model.linear_proj(grid_tensor_rows(model, pixels, grids))
    return rows


def class_of(module: str, name: str) -> type:
    found: type = getattr(importlib.import_module(f"{MODELS}.{module}"), name)
    return found


# Qwen3-VL's class is the base of its kin's classes, without the modules of their language models; so are
# GLM-4V's and Kimi-K2.5's.
QWEN3 = Peer(
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    functools.partial(qwen_modules, "qwen3_vl", "Qwen3_VisionTransformer"),
    qwen_inputs,
    qwen_rows,
)
GLM = Peer(
    ("glm4_1v", "Glm4vForConditionalGeneration"),
    functools.partial(glm_modules, lambda: class_of("glm4_1v", "Glm4vVisionTransformer")),
    qwen_inputs,
    qwen_rows,
)
KIMI = Peer(
    ("kimi_k25", "KimiK25ForConditionalGeneration"),
    kimi_k25_modules,
    kimi_inputs,
    kimi_rows,
)
PEERS_OF_FAMILIES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen4_exp", "interns1_pro", "intern_s2_preview"), QWEN3),
    "qwen3_omni_moe": Peer(
        ("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        functools.partial(qwen_modules, "qwen3_omni_moe_thinker", "Qwen3Omni_VisionTransformer"),
        qwen_inputs,
        grid_tensor_rows,
    ),
    "qwen2_5_vl": Peer(
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        functools.partial(qwen_modules, "qwen2_5_vl", "Qwen2_5_VisionTransformer"),
        qwen_inputs,
        qwen_rows,
    ),
    "glm4v": GLM,
    "glm_ocr": replace(
        GLM, modules=functools.partial(glm_modules, lambda: class_of("glm_ocr", "GlmOcrVisionTransformer"))
    ),
    "glm5_next": replace(
        GLM, modules=functools.partial(glm_modules, lambda: module_alone(GLM5_NEXT).Glm5NextVisionTransformer)
    ),
    "kimi_k25": KIMI,
    "kimi_k3": replace(KIMI, modules=kimi_k3_modules),
    "kimi_vl": Peer(
        ("kimi_vl", "KimiVLForConditionalGeneration"), kimi_vl_modules, kimi_vl_inputs, kimi_vl_rows
    ),
    "ling_vl": Peer(
        ("bailing_moe_v3_vl", "BailingMoeV3VLForConditionalGeneration"), ling_modules, qwen_inputs, ling_rows
    ),
}
