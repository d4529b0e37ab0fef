"""LMDeploy's model classes without their vision towers.

Owns subclasses with the names of their parents, made where they are asked for. A tower's place is taken by a
module that returns the rows of the request. M-RoPE, deepstack, chunks of a prompt and the prefix cache stay
LMDeploy's own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from typing import Any

import torch
from lmdeploy.pytorch.engine.input_process import PreprocessInputResult
from lmdeploy.pytorch.models import qwen3_vl
from lmdeploy.pytorch.models.patch import build_model_context, get_build_model_context
from lmdeploy.pytorch.multimodal.data_type import MultiModalData
from torch import nn

from lm_adapter.engines.lmdeploy.module_map import CUSTOM_MODULE_MAP

logger = logging.getLogger("lmdeploy.vision_encoder")

MODULES = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "KimiK25ForConditionalGeneration": "kimi_k25",
}
"""Architecture -> the module of LMDeploy's class."""


class Rows(nn.Module):
    """Takes the place of Qwen's towers: has their interface, and no parameters. LMDeploy calls it with rows
    in place of pixels."""

    def __init__(self, vision_config: Any, num_levels: int) -> None:
        super().__init__()
        self.spatial_merge_size = vision_config.spatial_merge_size
        self._num_levels = num_levels

    def rot_pos_emb(self, _grid_thw: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1)

    def fast_pos_embed_interpolate(self, _grid_thw: torch.Tensor) -> None:
        return None

    def forward(self, rows: torch.Tensor, **_kwargs: Any) -> Any:
        """rows: [n, D * (1 + L)]. Returns them, or for models with deepstack [n, D] and L times [n, D]."""
        if not self._num_levels:
            return rows
        main, *levels = rows.chunk(1 + self._num_levels, dim=-1)
        return main, levels


class ImageData(MultiModalData):  # type: ignore[misc]
    """What the scheduler keeps of an image. data: its ``rank.ImageRows``. The prefix cache tells images apart
    by ``content_hash``."""

    def to_device(self, device: str, non_blocking: bool = False) -> MultiModalData:
        rows = self.data.to(device, non_blocking=non_blocking)
        return MultiModalData.to_device(dataclasses.replace(self, data=rows), device, non_blocking)


def _data(item: dict[str, Any], **fields: Any) -> ImageData:
    start, end = item["offset"]
    rows, modality = item["pixel_values"], item["modality"]
    return ImageData(rows, start, end, modality=modality, content_hash=item["content_hash"], **fields)


class QwenInputs(qwen3_vl.Qwen3VLInputProcessor):  # type: ignore[misc]
    def preprocess_input(
        self, input_ids: list[int], input_multimodals: list[dict[str, Any]] | None = None, **_kwargs: Any
    ) -> PreprocessInputResult:
        images = []
        for item in input_multimodals or ():
            grid_thw = item["grid_thw"]
            meta = {"grid_thw": grid_thw, "image_token_id": item["image_token_id"]}
            images.append(_data(item, meta=meta, mrope_pos_ids=self.make_mrope(grid_thw)))
        return PreprocessInputResult(input_ids, {"mm_data": images} if images else None)


class KimiInputs:
    def preprocess_input(
        self, input_ids: list[int], input_multimodals: list[dict[str, Any]] | None = None, **_kwargs: Any
    ) -> PreprocessInputResult:
        images = []
        for item in input_multimodals or ():
            meta = {"grid_thws": item["grid_thw"][None], "image_token_id": item["image_token_id"]}
            images.append(_data(item, meta=meta))
        return PreprocessInputResult(input_ids, {"image": images} if images else None)


def _without_tower(parent: Any) -> Any:
    """A subclass of ``parent`` that builds no tower and loads none."""

    class WithoutTower(parent):  # type: ignore[misc]
        def __init__(self, config: Any, ctx_mgr: Any, **kwargs: Any) -> None:
            context = dataclasses.replace(get_build_model_context(), language_model_only=True)
            with build_model_context(context):
                super().__init__(config, ctx_mgr, **kwargs)
            self._take_rows(config, kwargs.get("dtype"))
            num_parameters = sum(parameter.numel() for parameter in self.parameters())
            logger.info("%s is built without a vision tower: %d parameters", parent.__name__, num_parameters)

    return WithoutTower


def _qwen(parent: Any, *, has_deepstack: bool) -> Any:
    tower_prefix = "visual." if has_deepstack else "model.visual."

    class Qwen(_without_tower(parent)):  # type: ignore[misc]
        def _take_rows(self, config: Any, dtype: Any) -> None:
            vision = config.vision_config
            rows = Rows(vision, len(vision.deepstack_visual_indexes) if has_deepstack else 0)
            owner = self if has_deepstack else self.model
            owner.visual = rows
            self.input_processor = QwenInputs(config, dtype)

        def load_weights(self, weights: Any) -> None:
            """weights: pairs of name and tensor. LMDeploy gives those of the tower too, at the start and when
            it updates them."""
            super().load_weights(
                (name, weight) for name, weight in weights if not name.startswith(tower_prefix)
            )

    return Qwen


def _kimi(parent: Any) -> Any:
    class Kimi(_without_tower(parent)):  # type: ignore[misc]
        def _take_rows(self, _config: Any, _dtype: Any) -> None:
            self.language_model_only = False  # images are taken
            self.input_processor = KimiInputs()

        def get_image_features(self, rows: torch.Tensor, _grid_thws: torch.Tensor) -> list[torch.Tensor]:
            return [rows]

        def load_weights(self, weights: Any) -> None:
            self.language_model_only = True  # the tower's weights are left out
            try:
                super().load_weights(weights)
            finally:
                self.language_model_only = False

    return Kimi


@functools.cache
def __getattr__(architecture: str) -> Any:
    if architecture not in CUSTOM_MODULE_MAP:
        raise AttributeError(f"module {__name__} has no {architecture}")
    name = MODULES[architecture]
    parent = getattr(importlib.import_module(f"lmdeploy.pytorch.models.{name}"), architecture)
    is_kimi = name == "kimi_k25"
    model = _kimi(parent) if is_kimi else _qwen(parent, has_deepstack=name.startswith("qwen3_vl"))
    model.__name__ = model.__qualname__ = architecture
    return model
