"""vLLM's models under this plugin: which classes it registers, and which configurations it refuses.

Owns the registration in each of vLLM's processes. The classes of ``worker.without_tower``, with the
processors of ``api_server``, replace vLLM's own classes of the same architecture names, by vLLM's
registration of out-of-tree models. Nothing is built before vLLM asks for a class by name.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, NamedTuple

from lm_adapter.engines.vllm.interfaces import INTERFACES
from lm_adapter.engines.vllm.settings import CONNECTOR, MODULE, has_connector, is_marked
from lm_adapter.engines.vllm.vllm_types import VllmConfig
from lm_adapter.engines.vllm.worker.without_tower import without_tower
from lm_adapter.errors import InvalidRequest

logger = logging.getLogger("vllm.vision_encoder")


class Model(NamedTuple):
    """module: of vLLM's class, in ``vllm.model_executor.models`` unless it begins with ``vllm.``. processor:
    the module of ``api_server`` whose ``factories`` make its processor. name: of vLLM's class, where it is
    not the architecture."""

    module: str
    processor: str = "processor"
    name: str = ""


ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": Model("qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Model("qwen3_vl_moe"),
    "Qwen3_5ForConditionalGeneration": Model("qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": Model("qwen3_5"),
    "Qwen4ExpForConditionalGeneration": Model("vllm.models.qwen4_exp"),
    "Qwen3OmniMoeForConditionalGeneration": Model(
        "qwen3_omni_moe_thinker", "qwen3_omni", "Qwen3OmniMoeThinkerForConditionalGeneration"
    ),
    "InternS1ProForConditionalGeneration": Model("interns1_pro"),
    "InternS2PreviewForConditionalGeneration": Model("interns2_preview"),
    "KimiK25ForConditionalGeneration": Model("kimi_k25", "kimi"),
    "KimiVLForConditionalGeneration": Model("kimi_vl", "kimi_images"),
    "KimiK3ForConditionalGeneration": Model("vllm.models.kimi_k3", "kimi_images"),
    "Glm4vForConditionalGeneration": Model("glm4_1v", "glm"),
    "Glm4vMoeForConditionalGeneration": Model("glm4_1v", "glm"),
    "GlmOcrForConditionalGeneration": Model("glm_ocr", "glm"),
    "Glm5NextForConditionalGeneration": Model("vllm.models.glm5next", "glm"),
    "BailingMoeV3VLForConditionalGeneration": Model("bailing_moe_v3_vl", "ling"),
    "Qwen2_5_VLForConditionalGeneration": Model("qwen2_5_vl", "qwen2_5_vl"),
}
"""By architecture. The class here has the architecture's name."""


def register() -> None:
    """Called in each of vLLM's processes. With a vLLM that ``interfaces`` refuses nothing is registered, and
    the connector refuses to start."""
    import vllm
    from vllm import ModelRegistry

    if reason := INTERFACES.refusal(vllm.__version__):
        logger.warning("%s. Nothing is registered", reason)
        return
    from lm_adapter.engines.vllm.api_server.media import register_media
    from lm_adapter.engines.vllm.api_server.server import hook_config
    from lm_adapter.engines.vllm.failures import answer_with_reasons

    # A series of vLLM may lack a model that the next one has.
    for architecture in ARCHITECTURES.keys() & ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")
        hook_config(architecture)
    register_media()
    answer_with_reasons()


def check_model(vllm_config: VllmConfig) -> None:
    """Raises InvalidRequest for a model that cannot consume rows under this version of vLLM, and for an
    engine whose plugin was not loaded."""
    import vllm

    architecture = vllm_config.model_config.architecture
    if reason := INTERFACES.refusal(vllm.__version__):
        raise InvalidRequest(reason)
    if architecture not in ARCHITECTURES:
        raise InvalidRequest(f"the model is a {architecture}, image rows are for {', '.join(ARCHITECTURES)}")
    model = vllm.ModelRegistry.models.get(architecture)
    if getattr(model, "module_name", None) != __name__:
        raise InvalidRequest(
            f"{architecture} is served by {model}, not by {__name__}: the plugin vision_encoder of "
            "vllm.general_plugins was not loaded (VLLM_PLUGINS leaves it out, or this package is not "
            "installed)"
        )
    if not has_connector(vllm_config):
        # Registered by ECConnectorFactory.register_connector, vLLM needs no path, but ``has_connector`` does.
        transfer = vllm_config.ec_transfer_config
        assert transfer is not None, "vLLM makes a connector only where one is configured"
        raise InvalidRequest(
            f"--ec-transfer-config has ec_connector {transfer.ec_connector} and ec_connector_module_path "
            f"{transfer.ec_connector_module_path}: set them to {CONNECTOR} and {MODULE}"
        )
    if not is_marked(vllm_config.model_config.get_multimodal_config()):
        raise InvalidRequest(
            f"the configuration hook of {architecture} was not called: another plugin has its place"
        )
    if vllm_config.model_config.runner_type == "pooling":
        # vLLM ends the whole server when a pooling request fails in its scheduler.
        raise InvalidRequest("the runner is pooling, this connector is for generate")
    if vllm_config.parallel_config.nnodes_within_dp > 1:
        raise InvalidRequest("the ranks are on several nodes, this connector is for one")
    backend = vllm_config.parallel_config.distributed_executor_backend
    if backend in ("ray", "external_launcher"):
        # Their ranks may be on other nodes, or have schedulers of their own.
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
    """The class without its tower, with its processor registered."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    module, processor, name = ARCHITECTURES[architecture]
    name = name or architecture
    is_absolute = module.startswith("vllm.")
    theirs = importlib.import_module(module if is_absolute else f"vllm.model_executor.models.{module}")
    ours = importlib.import_module(f"lm_adapter.engines.vllm.api_server.{processor}")
    files, info, dummy_inputs = ours.factories(theirs, name)
    register = MULTIMODAL_REGISTRY.register_processor(files, info=info, dummy_inputs=dummy_inputs)
    model: type = register(without_tower(getattr(theirs, name)))
    # vLLM tells models apart by the names of their classes.
    model.__module__, model.__qualname__, model.__name__ = __name__, architecture, architecture
    return model
