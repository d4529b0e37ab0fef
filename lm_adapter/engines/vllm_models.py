"""vLLM's model classes as consumers: Qwen3-VL keeps deepstack without a tower, Kimi-K2.5 takes grids alone.

Owns what vLLM 0.32 lacks for a consumer without tower weights, as subclasses that take the place of vLLM's
own under the same architecture names (the registry's way for models out of the tree; nothing of vLLM is
rewritten). They differ from their parents only where the engine consumes image rows. ``docs/vllm.md`` reports
both as one would upstream. Nothing here is imported or built before vLLM asks for the class by name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lm_adapter.errors import InvalidRequest

__all__ = ["check_model", "register", "supported"]

logger = logging.getLogger("vllm.vision_encoder")

VLLM_SERIES = "0.32."
_OWN = {
    "Qwen3VLForConditionalGeneration": "Qwen3VLConsumer",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConsumer",
    "KimiK25ForConditionalGeneration": "KimiK25Consumer",
}
"""Architecture -> the class here."""
_AS_THEY_ARE = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
_MODALITIES = {"KimiK25ForConditionalGeneration": ("vision_chunk", "image")}


def supported(version: str) -> bool:
    """Whether these classes were written for this version of vLLM."""
    return version.startswith(VLLM_SERIES)


def register() -> None:
    """Called in each of vLLM's processes. With another version of vLLM nothing is registered, and the
    connector refuses to start."""
    import vllm
    from vllm import ModelRegistry

    if not supported(vllm.__version__):
        logger.warning("vLLM is %s, the consumers are for %sx: not registered", vllm.__version__, VLLM_SERIES)
        return
    for architecture, name in _OWN.items():
        ModelRegistry.register_model(architecture, f"{__name__}:{name}")


def check_model(vllm_config: Any) -> bool:
    """Whether the engine has a tower of its own. Raises InvalidRequest for a model that cannot consume rows
    under this version of vLLM, and for an engine whose plugin was not loaded."""
    import vllm

    model_config = vllm_config.model_config
    architecture = model_config.architecture
    if not supported(vllm.__version__):
        raise InvalidRequest(f"vLLM is {vllm.__version__}, this connector is for {VLLM_SERIES}x")
    if architecture not in (*_OWN, *_AS_THEY_ARE):
        raise InvalidRequest(
            f"the model is a {architecture}, image rows are for {', '.join((*_OWN, *_AS_THEY_ARE))}"
        )
    modalities = _MODALITIES.get(architecture, ("image", "video"))[:1]
    has_tower = any(model_config.get_multimodal_config().get_limit_per_prompt(m) > 0 for m in modalities)
    if architecture in _OWN:
        found = vllm.ModelRegistry.models.get(architecture)
        if getattr(found, "module_name", None) != __name__:
            raise InvalidRequest(
                f"{architecture} is served by {found}, not by {__name__}: the plugin vision_encoder of "
                "vllm.general_plugins was not loaded (VLLM_PLUGINS leaves it out, or this package is not "
                "installed)"
            )
    return has_tower


def __getattr__(name: str) -> Any:
    """vLLM's registry looks classes up by name."""
    if name in _BUILDERS:
        return _build(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _build(name: str) -> type:
    model = _BUILDERS[name]()
    model.__module__, model.__qualname__ = __name__, name
    return model


def _qwen3_vl() -> type:
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

    return _with_deepstack("Qwen3VLConsumer", Qwen3VLForConditionalGeneration)


def _qwen3_vl_moe() -> type:
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

    return _with_deepstack("Qwen3VLMoeConsumer", Qwen3VLMoeForConditionalGeneration)


def _with_deepstack(name: str, parent: Any) -> type:
    """vLLM turns deepstack off together with the tower, so that rows of all levels do not fit the embedding.
    Here it stays on: the levels come with the rows."""

    def initialise(self: Any, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        parent.__init__(self, vllm_config=vllm_config, prefix=prefix, **kwargs)
        transfer = vllm_config.ec_transfer_config
        if self.use_deepstack or transfer is None or not transfer.is_ec_consumer:
            return
        import torch

        vision, text = self.config.vision_config, self.config.text_config
        self.deepstack_num_level = len(vision.deepstack_visual_indexes)
        self.use_deepstack = self.deepstack_num_level > 0
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.deepstack_input_embeds = [
            torch.zeros(num_tokens, text.hidden_size) for _ in range(self.deepstack_num_level)
        ]
        self.deepstack_input_embeds_num_tokens = 0

    return type(name, (parent,), {"__init__": initialise})


def _kimi_k25() -> type:
    from lm_adapter.engines.vllm_kimi import kimi_consumer

    return kimi_consumer()


_BUILDERS: dict[str, Callable[[], type]] = {
    "Qwen3VLConsumer": _qwen3_vl,
    "Qwen3VLMoeConsumer": _qwen3_vl_moe,
    "KimiK25Consumer": _kimi_k25,
}
