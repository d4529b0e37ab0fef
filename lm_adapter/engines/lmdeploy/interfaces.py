"""What the plugin touches in LMDeploy, and which versions of LMDeploy it takes.

Owns the tested versions and the tables of LMDeploy's interfaces. ``shared.interfaces`` owns the comparison.
What only instances have, because an initialiser sets it, cannot be in them; the tests find those.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lm_adapter.engines.shared.interfaces import Interfaces

logger = logging.getLogger("lmdeploy.vision_encoder")
# LMDeploy's is WARNING by default, and how rows come has a few lines at the start.
logger.setLevel(logging.INFO)

TESTED = ((0, 18),)
"""Series of LMDeploy for which the tests run."""
MODELS = "lmdeploy.pytorch.models"

CALLED: Mapping[str, tuple[str, ...]] = {
    "lmdeploy.archs": ("get_model_arch(model_path, trust_remote_code)",),
    "lmdeploy.cli": ("run()",),
    "lmdeploy.messages": (
        "EngineOutput(status, token_ids)",
        *("PytorchEngineConfig.mp_engine_backend", "PytorchEngineConfig.session_len"),
        "ResponseType.INTERNAL_ENGINE_ERROR",
    ),
    "lmdeploy.metrics.metrics_processor": (
        "metrics_processor.increase_failed_requests(failure_type)",
        "metrics_processor.increase_total_requests()",
    ),
    "lmdeploy.pytorch.config": (
        *("ModelConfig.custom_module_map", "ModelConfig.from_pretrained"),
        "_update_torch_dtype(config, dtype)",
    ),
    "lmdeploy.pytorch.engine.executor.uni_executor": ("UniExecutor",),
    "lmdeploy.pytorch.engine.input_process": ("PreprocessInputResult(input_ids, input_multimodals)",),
    f"{MODELS}.module_map": ("CUSTOM_MODULE_MAP", "LMDEPLOY_PYTORCH_MODEL_PATH"),
    f"{MODELS}.patch": (
        "BuildModelContext.language_model_only",
        *("build_model_context(ctx)", "get_build_model_context()"),
        "update_custom_module_map(module_map_path)",
    ),
    f"{MODELS}.qwen3_vl": ("Qwen3VLInputProcessor.make_mrope(grid_thw)",),
    "lmdeploy.pytorch.multimodal.data_type": (
        "MultiModalData(data, start, end, meta, modality, mrope_pos_ids, content_hash)",
    ),
    "lmdeploy.serve.core.async_engine": (
        "AsyncEngine.async_get_ppl(input_ids)",
        *("AsyncEngine(model_path)", "AsyncEngine.preprocess", "PreprocessedRequest.inputs"),
        "PreprocessedRequest.session",
    ),
    "lmdeploy.serve.core.exceptions": (
        *("ErrorCode.CONTEXT_LENGTH_EXCEEDED", "ErrorCode.ENGINE_UNAVAILABLE"),
        *("ErrorCode.INTERNAL_ERROR", "ErrorCode.INVALID_REQUEST", "RequestError(code, message)"),
    ),
    "lmdeploy.serve.processors.multimodal": (
        *("AudioMediaIO", "ImageMediaIO", "TimeSeriesMediaIO", "VideoMediaIO"),
    ),
    "lmdeploy.utils": ("_get_and_verify_max_len(hf_config, max_model_len)",),
    "lmdeploy.vl.constants": ("Modality.IMAGE",),
    "lmdeploy.vl.model.base": ("VisionModel.collect_multimodal_items(messages)",),
}
"""Module -> what the plugin calls or reads there, as in ``Interfaces.called``."""

OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "lmdeploy.pytorch.engine.engine": (
        "build_executor(model_path, cache_config, backend_config, dist_config, misc_config, adapters, "
        "device_type, distributed_executor_backend, dtype, specdecode_config, trust_remote_code)",
    ),
    "lmdeploy.pytorch.engine.engine_instance": (
        "EngineInstance.async_stream_infer(session_id, input_ids, gen_config, multimodal, adapter_name, "
        "notify_add_msg_func, kwargs)",
    ),
    "lmdeploy.pytorch.engine.executor.base": ("ExecutorBase.build_model()", "ExecutorBase.release()"),
    "lmdeploy.pytorch.engine.mp_engine.base": (
        "MPEngineInstance.async_stream_infer(session_id, args, kwargs)",
    ),
    f"{MODELS}.kimi_k25": (
        "KimiK25ForConditionalGeneration.get_image_features(pixel_values, grid_thws)",
        "KimiK25ForConditionalGeneration.load_weights(weights)",
    ),
    f"{MODELS}.qwen3_vl": (
        "Qwen3VLInputProcessor.preprocess_input(input_ids, input_multimodals, kwargs)",
        "Qwen3VLForConditionalGeneration(config, ctx_mgr, dtype, device, prefix)",
        "Qwen3VLForConditionalGeneration.load_weights(weights)",
    ),
    "lmdeploy.pytorch.multimodal.data_type": ("MultiModalData.to_device(device, non_blocking)",),
    "lmdeploy.vl.engine": (
        "ImageEncoder(model_path, backend, vision_config, backend_config, trust_remote_code)",
        "ImageEncoder.preprocess(messages, input_prompt, mm_processor_kwargs)",
    ),
    "lmdeploy.vl.media.image": (
        "ImageMediaIO.load_base64(media_type, data)",
        *("ImageMediaIO.load_bytes(data)", "ImageMediaIO.load_file(file_path)"),
    ),
}
"""Module -> what the plugin replaces, as in ``Interfaces.overridden``."""

INTERFACES = Interfaces("LMDeploy", TESTED, CALLED, OVERRIDDEN, logger)
