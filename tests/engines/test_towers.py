"""The towers of Kimi-VL, Kimi-K3 and Ling equal vLLM's own in float32; the reference package has no such
models."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)

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
MODELS = "vllm.model_executor.models"


@pytest.fixture(autouse=True)
def _in_vllm(tmp_path: Path) -> Iterator[None]:
    """vLLM's layers ask for its configuration and its ranks."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


class Vision(torch.nn.Module):
    """vLLM's tower and projector, under the names of their modules in its model."""

    def load(self, tensors: dict[str, torch.Tensor], architecture: Any) -> None:
        from vllm.model_executor.models.utils import AutoWeightsLoader

        mapper = getattr(architecture, "hf_to_vllm_mapper", None)
        loaded = AutoWeightsLoader(self).load_weights(tensors.items(), mapper=mapper)
        assert loaded == dict(self.named_parameters()).keys()
        for module in self.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)


class KimiVLVision(Vision):
    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        theirs: Any = importlib.import_module(f"{MODELS}.kimi_vl")
        sizes = theirs.KimiVLConfig(vision_config=config["vision_config"])
        sizes.text_config.hidden_size = config["text_config"]["hidden_size"]
        self.vision_tower = theirs.MoonVitPretrainedModel(sizes.vision_config, prefix="vision_tower")
        self.multi_modal_projector = theirs.KimiVLMultiModalProjector(sizes, prefix="multi_modal_projector")
        self.load(tensors, theirs.KimiVLForConditionalGeneration)

    def rows(self, pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        sides = torch.tensor([[grid.h, grid.w] for grid in grids])
        parts = self.vision_tower(pixels.view(-1, 3, 14, 14), sides)
        rows: torch.Tensor = self.multi_modal_projector(torch.cat(parts))
        return rows


class KimiK3Vision(Vision):
    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        theirs: Any = importlib.import_module(f"{MODELS}.kimi_k25_vit")
        model: Any = importlib.import_module("vllm.models.kimi_k3")
        sizes = theirs.KimiK3VisionConfig(**config["vision_config"])
        self.vision_tower = theirs.MoonViT3dPretrainedModel(sizes, prefix="vision_tower")
        width = config["text_config"]["hidden_size"]
        self.mm_projector = theirs.KimiK25MultiModalProjector(sizes, width, prefix="mm_projector")
        self.load(tensors, model.KimiK3ForConditionalGeneration)

    def rows(self, pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        parts = self.vision_tower(pixels.view(-1, 3, 14, 14), [list(grid) for grid in grids])
        rows: torch.Tensor = self.mm_projector(torch.cat(parts))
        return rows


class LingVision(Vision):
    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        theirs: Any = importlib.import_module(f"{MODELS}.bailing_moe_v3_vl")
        vision, width = SimpleNamespace(**config["vision_config"]), config["text_config"]["hidden_size"]
        self.visual = theirs.BailingMoeV3VisionTransformer(vision, prefix="visual")
        merged_width = vision.hidden_size * vision.spatial_merge_size**2
        self.linear_proj = theirs.BailingMoeV3VLProjector(merged_width, width, prefix="linear_proj")
        self.load(tensors, theirs.BailingMoeV3VLForConditionalGeneration)

    def rows(self, pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        rows: torch.Tensor = self.linear_proj(self.visual(pixels, grid_thw=torch.tensor(grids)))
        return rows


# The head size of 128 and heads wider than the tower are Kimi-K3's; heads of 72 Kimi-VL's and Ling's.
CASES: dict[str, tuple[Any, dict[str, Any], list[Grid]]] = {
    "kimi_vl": (
        KimiVLVision,
        {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 538},
        IMAGES,
    ),
    "kimi_k3": (
        KimiK3Vision,
        {
            "vt_hidden_size": 128,
            "mm_hidden_size": 128,
            "qkv_hidden_size": 384,
            "vt_num_attention_heads": 3,
            "vt_intermediate_size": 512,
        },
        IMAGES + CLIPS,
    ),
    "ling_vl": (LingVision, {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538}, IMAGES),
}


@pytest.mark.parametrize("family", CASES)
def test_rows_equal_vllms(family: str, tmp_path: Path) -> None:
    theirs, sizes, grids = CASES[family]
    config = config_with(family, "tiny", sizes)
    tensors = vision_weights(config, fresh_seed())
    path = write_published(tmp_path / family, config, tensors)
    tower = load_tower(path, device=torch.device("cpu"), dtype=torch.float32).tower
    pixels = random_pixels(tower, grids, fresh_seed())
    # vLLM compiles the interpolation of the position table, which takes long and may fail on a CPU.
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        expected = theirs(config, tensors).rows(pixels, grids)
    assert_close(f"{family} against vLLM", run_tower(tower, pixels, grids), expected, VLLM_RELATIVE)
