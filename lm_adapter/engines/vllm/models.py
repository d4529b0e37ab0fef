"""vLLM's model classes without their vision towers.

Owns what vLLM 0.32 lacks for an engine whose image rows come from elsewhere, as subclasses that take the
place of vLLM's own under the same architecture names (the registry's way for models out of the tree). Without
this plugin's connector they are their parents. Nothing is built before vLLM asks for the class by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from lm_adapter.engines.shared.geometry import GRID_FIELDS, Geometry
from lm_adapter.engines.vllm.settings import has_connector, is_marked
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid

logger = logging.getLogger("vllm.vision_encoder")

VLLM_SERIES = "0.32."
ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "KimiK25ForConditionalGeneration": "kimi_k25",
}
"""Architecture -> the module of vLLM's class. The class here has the architecture's name."""
TOWER_PREFIXES = "visual.", "vision_tower.", "mm_projector."
"""Of modules that are not built here. vLLM skips their part of a LoRA adapter."""


def supported(version: str) -> bool:
    """Whether these classes were written for this version of vLLM."""
    return version.startswith(VLLM_SERIES)


def register() -> None:
    """Called in each of vLLM's processes. With another version of vLLM nothing is registered, and the
    connector refuses to start."""
    import vllm
    from vllm import ModelRegistry

    if not supported(vllm.__version__):
        logger.warning("vLLM is %s, this plugin is for %sx: not registered", vllm.__version__, VLLM_SERIES)
        return
    from lm_adapter.engines.vllm.api_server.frontend import hook_config, register_media
    from lm_adapter.engines.vllm.failures import answer_with_reasons

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")
        hook_config(architecture)
    register_media()
    answer_with_reasons()


def check_model(vllm_config: Any) -> None:
    """Raises InvalidRequest for a model that cannot consume rows under this version of vLLM, and for an
    engine whose plugin was not loaded."""
    import vllm

    architecture = vllm_config.model_config.architecture
    if not supported(vllm.__version__):
        raise InvalidRequest(f"vLLM is {vllm.__version__}, this connector is for {VLLM_SERIES}x")
    if architecture not in ARCHITECTURES:
        raise InvalidRequest(f"the model is a {architecture}, image rows are for {', '.join(ARCHITECTURES)}")
    found = vllm.ModelRegistry.models.get(architecture)
    if getattr(found, "module_name", None) != __name__:
        raise InvalidRequest(
            f"{architecture} is served by {found}, not by {__name__}: the plugin vision_encoder of "
            "vllm.general_plugins was not loaded (VLLM_PLUGINS leaves it out, or this package is not "
            "installed)"
        )
    if not is_marked(vllm_config.model_config.get_multimodal_config()):
        raise InvalidRequest(
            f"the configuration hook of {architecture} was not called: another plugin has its place"
        )
    if vllm_config.model_config.runner_type == "pooling":
        # vLLM 0.32 ends the whole server when a pooling request fails in its scheduler.
        raise InvalidRequest("the runner is pooling, this connector is for generate")
    if vllm_config.parallel_config.nnodes_within_dp > 1:
        raise InvalidRequest("the ranks are on several nodes, this connector is for one")
    backend = vllm_config.parallel_config.distributed_executor_backend
    if backend in ("ray", "external_launcher"):
        # Its ranks may be on other nodes, or have schedulers of their own.
        raise InvalidRequest(f"distributed_executor_backend is {backend}, this connector is for mp and uni")
    if getattr(vllm_config.lora_config, "enable_tower_connector_lora", False):
        raise InvalidRequest("enable_tower_connector_lora is set, the encoder's tower takes no adapters")


def __getattr__(name: str) -> Any:
    """vLLM's registry looks classes up by name."""
    if name in ARCHITECTURES:
        return _build(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _build(architecture: str) -> type:
    module = ARCHITECTURES[architecture]
    if module == "kimi_k25":
        from lm_adapter.engines.vllm.api_server.kimi import kimi_k25

        model = kimi_k25()
    else:
        model = _qwen(importlib.import_module(f"vllm.model_executor.models.{module}"), architecture)
    # vLLM tells models apart by the names of their classes.
    model.__module__, model.__qualname__, model.__name__ = __name__, architecture, architecture
    return model


def without_tower(parent: Any) -> type:
    """The parent, with rows from elsewhere: its tower is neither built nor loaded, and where vLLM measures
    memory by a largest image, rows of zeros take the place of the tower's."""

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
            # As vLLM does it where all limits are 0.
            none = SimpleNamespace(get_limit_per_prompt=lambda _modality: 0)
            stand_in = SimpleNamespace(model_config=SimpleNamespace(get_multimodal_config=lambda: none))
            before = set(self._modules)
            with super()._mark_tower_model(stand_in, modalities, **kwargs):
                yield
            missing = [self._modules[name] for name in set(self._modules) - before]
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
    """vLLM turns deepstack off together with the tower, so that rows of all levels do not fit the embedding.
    Here it stays on: the levels come with the rows."""
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


def _qwen(theirs: Any, architecture: str) -> type:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from lm_adapter.engines.vllm.api_server.processing import qwen_factories

    parent = getattr(theirs, architecture.replace("ForConditionalGeneration", "ProcessingInfo"))
    processor, info, dummy_inputs = qwen_factories(parent)
    register = MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)
    registered: type = register(without_tower(getattr(theirs, architecture)))
    return registered
