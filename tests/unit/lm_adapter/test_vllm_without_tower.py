"""A model class without its tower, on a parent that builds its tower as vLLM's classes do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lm_adapter.engines.vllm.settings import CONNECTOR, MODULE
from lm_adapter.engines.vllm.worker.without_tower import without_tower
from tests.unit.lm_adapter.connector_rig import engine_config


class Missing(nn.Module):
    """vLLM's StageMissingLayer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module


class Parent(nn.Module):
    """A model of vLLM 0.33, which reads all that it can of the configuration before it leaves a tower out."""

    visual_dim = 32

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=32))
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual: nn.Module = nn.Linear(2, 2)

    @contextlib.contextmanager
    def _mark_tower_model(self, vllm_config: Any, modalities: Any) -> Iterator[None]:
        is_elsewhere = vllm_config.use_v2_model_runner and vllm_config.is_later_stage
        limits = vllm_config.model_config.get_multimodal_config()
        yield
        if is_elsewhere or all(limits.get_limit_per_prompt(modality) == 0 for modality in modalities):
            self.visual = Missing(self.visual)


def built(connector: str) -> Any:
    config = engine_config("127.0.0.1:1")
    config.ec_transfer_config.ec_connector = connector
    config.ec_transfer_config.ec_connector_module_path = MODULE
    config.use_v2_model_runner, config.is_later_stage = True, False
    config.model_config.get_multimodal_config = lambda: SimpleNamespace(get_limit_per_prompt=lambda _: 9)
    return without_tower(Parent)(vllm_config=config)


def test_only_an_engine_with_the_connector_has_no_tower() -> None:
    """With vLLM's second model runner too, of which vLLM 0.33 asks where it decides about a tower."""
    assert isinstance(built("another").visual, nn.Linear)
    model = built(CONNECTOR)
    assert not list(model.parameters())
    assert [tuple(level.shape) for level in model.deepstack_input_embeds] == [(8192, 32)] * 3
    assert isinstance(model.visual.__dict__["module"].weight, torch.Tensor)
