"""A model class of vLLM without its vision tower.

Owns what vLLM does not do for an engine whose rows come from elsewhere: it leaves the tower out, keeps
deepstack on, and measures memory with rows of zeros. Without this plugin's connector the class is its parent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.file_items import GRID_FIELDS
from lm_adapter.engines.vllm.settings import has_connector
from lm_adapter.items import Grid

logger = logging.getLogger("vllm.vision_encoder")

TOWER_PREFIXES = (
    *("visual.", "vision_tower.", "mm_projector.", "multi_modal_projector.", "linear_proj."),
    "audio_tower.",
)
"""Names of modules that are not built. vLLM skips their part of a LoRA adapter."""


def without_tower(parent: Any) -> type:
    """The parent, with rows from elsewhere: its tower is neither built nor loaded. Where vLLM measures memory
    with its largest image, rows of zeros take the place of the tower's."""

    class WithoutTower(parent):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
            self._consumes_rows = has_connector(vllm_config)
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            if self._consumes_rows:
                self._geometry = Geometry.of_model(vllm_config.model_config)
                _keep_deepstack(self, vllm_config, self._geometry.num_levels)
                self.lora_skip_prefixes = list(TOWER_PREFIXES)

        @contextlib.contextmanager
        def _mark_tower_model(self, vllm_config: Any, modalities: Any, **kwargs: Any) -> Iterator[None]:
            if not self._consumes_rows:
                with super()._mark_tower_model(vllm_config, modalities, **kwargs):
                    yield
                return
            # What vLLM does where all limits are 0.
            none = SimpleNamespace(get_limit_per_prompt=lambda _modality: 0)
            stand_in = SimpleNamespace(
                model_config=SimpleNamespace(get_multimodal_config=lambda: none),
                # Where this is on, vLLM 0.33 asks for the stage of the pipeline too.
                use_v2_model_runner=False,
            )
            before = dict(self._modules)
            with super()._mark_tower_model(stand_in, modalities, **kwargs):
                yield
            # A class may replace the tower that its parent has made.
            missing = [layer for name, layer in self._modules.items() if layer is not before.get(name)]
            num_bytes = sum(
                parameter.numel() * parameter.element_size()
                for layer in missing
                for parameter in layer.__dict__["module"].parameters()
            )
            logger.info("no vision tower is loaded, which saves %.0f MiB here", num_bytes / 2**20)

        def embed_multimodal(self, **kwargs: Any) -> Any:
            if not self._consumes_rows:
                return super().embed_multimodal(**kwargs)
            (grids,) = [kwargs[name] for name in GRID_FIELDS if name in kwargs]
            return _zeros(self._geometry, grids)

    return WithoutTower


def _zeros(geometry: Geometry, grids: Any) -> list[Any]:
    """One tensor of zeros for each grid, [num_rows, width], of the size of real rows."""
    import torch
    from vllm.platforms import current_platform

    device = current_platform.current_device() if current_platform.is_cuda() else "cpu"
    shapes = [(geometry.num_rows(Grid(*grid)), geometry.width) for grid in grids.reshape(-1, 3).tolist()]
    return [torch.zeros(shape, dtype=getattr(torch, geometry.dtype), device=device) for shape in shapes]


def _keep_deepstack(model: Any, vllm_config: Any, num_levels: int) -> None:
    """vLLM turns deepstack off together with the tower; then rows of all levels do not fit the embedding.
    Here deepstack stays on, because the levels come with the rows."""
    if not num_levels:
        return
    import torch

    model.use_deepstack = True
    model.deepstack_num_level = num_levels
    model.multiscale_dim = model.visual_dim * num_levels
    num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    width = model.config.text_config.hidden_size
    model.deepstack_input_embeds = [torch.zeros(num_tokens, width) for _ in range(num_levels)]
    model.deepstack_input_embeds_num_tokens = 0
