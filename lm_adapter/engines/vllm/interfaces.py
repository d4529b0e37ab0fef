"""What the plugin touches in vLLM, and which versions of vLLM it takes.

Owns the tested versions and the tables of vLLM's interfaces. ``shared.interfaces`` owns the comparison.

The tables have what classes and modules have. What only instances have, because an initialiser sets it,
cannot be in them: ``EncoderCacheManager.cached``, ``Request.mm_features``, ``ModelConfig.runner_type``,
``MediaConnector.media_io_kwargs``, and what is set and read of a model (``deepstack_input_embeds``). The
tests with a real vLLM find those.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lm_adapter.engines.shared.interfaces import Interfaces

logger = logging.getLogger("vllm.vision_encoder")

TESTED = (0, 32), (0, 33)
"""Series of vLLM for which the tests run, oldest first."""
MODELS = "vllm.model_executor.models"

CALLED: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        *("ModelRegistry.models", "ModelRegistry.register_model(model_arch, model_cls)", "__version__"),
        "ModelRegistry.get_supported_archs()",
    ),
    "vllm.config": (
        *(
            f"VllmConfig.{name}"
            for name in (
                *("compilation_config", "device_config", "ec_manager_config", "ec_transfer_config"),
                *("lora_config", "max_concurrent_batches", "model_config", "num_prefill_lookahead_tokens"),
                *("parallel_config", "scheduler_config", "kv_transfer_config"),
            )
        ),
        *("ModelConfig.architecture", "ModelConfig.dtype", "ModelConfig.get_multimodal_config()"),
        *("ModelConfig.hf_config", "ModelConfig.max_model_len"),
        *("DeviceConfig.device", "LoRAConfig.enable_tower_connector_lora"),
        "SchedulerConfig.max_num_batched_tokens",
        *("MultiModalConfig.mm_processor_cache_type", "MultiModalConfig.mm_processor_kwargs"),
        *(
            "MultiModalConfig.get_limit_per_prompt(modality)",
            "MultiModalConfig.is_multimodal_pruning_enabled()",
        ),
        "CompilationConfig.cudagraph_mm_encoder",
        "ParallelConfig.data_parallel_index",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.distributed_executor_backend",
        "ParallelConfig.nnodes_within_dp",
        "ParallelConfig.prefill_context_parallel_size",
        "ParallelConfig.tensor_parallel_size",
        "ECTransferConfig.ec_connector",
        "ECTransferConfig.ec_connector_extra_config",
        "ECTransferConfig.ec_connector_module_path",
        *("ECTransferConfig.ec_role", "ECTransferConfig.engine_id", "ECTransferConfig.is_ec_producer"),
        "KVTransferConfig.kv_role",
    ),
    "vllm.config.ec_manager_config": (
        *("EncoderCacheManagerConfig.encoder_cache_manager_cls", "EncoderCacheManagerConfig.manager_config"),
    ),
    "vllm.config.multimodal": (
        *("ImageDummyOptions.height", "ImageDummyOptions.width"),
        *("VideoDummyOptions.height", "VideoDummyOptions.width"),
    ),
    "vllm.distributed.ec_transfer.ec_connector.base": (
        "ECConnectorBase.bind_connector_metadata(connector_metadata)",
        *("ECConnectorMetadata", "ECConnectorRole.SCHEDULER"),
    ),
    "vllm.distributed.ec_transfer.ec_connector.metrics": (
        *("ECConnectorPromMetrics", "ECConnectorStats.data"),
    ),
    "vllm.distributed.parallel_state": ("GroupCoordinator.is_first_rank", "get_pp_group()"),
    "vllm.envs": (
        *("VLLM_IMAGE_FETCH_TIMEOUT", "VLLM_MAX_IMAGE_PIXELS", "VLLM_MEDIA_CONNECTOR"),
        "VLLM_VIDEO_FETCH_TIMEOUT",
    ),
    "vllm.exceptions": (
        *("GenerationError(message)", "RetryableRequestError(message)", "VLLMValidationError"),
    ),
    f"{MODELS}.bailing_moe_v3_vl": (
        *("BailingMoeV3VLForConditionalGeneration", "BailingMoeV3VLProcessingInfo.get_hf_config()"),
        "BailingMoeV3VLProcessingInfo.get_image_processor()",
        "BailingMoeV3VLProcessingInfo._get_vision_info"
        "(image_width, image_height, image_processor, mm_kwargs, modality)",
        "BailingMoeV3VLProcessingInfo._merge_and_resolve_mm_processor_kwargs(mm_kwargs)",
    ),
    f"{MODELS}.config": ("MODELS_CONFIG_MAP",),
    f"{MODELS}.glm4_1v": (
        *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
        *("Glm4vProcessingInfo.get_hf_config()", "Glm4vProcessingInfo.get_image_processor()"),
        "Glm4vProcessingInfo._get_video_max_pixels()",
        "Glm4vProcessingInfo._get_vision_info(image_width, image_height, num_frames, max_image_pixels)",
    ),
    f"{MODELS}.glm_ocr": ("GlmOcrForConditionalGeneration",),
    f"{MODELS}.interfaces": (
        *("SupportsLoRA.lora_skip_prefixes", "SupportsMultiModal._mark_tower_model(vllm_config, modalities)"),
    ),
    f"{MODELS}.interns1_pro": ("InternS1ProForConditionalGeneration", "InternS1ProProcessingInfo"),
    f"{MODELS}.interns2_preview": (
        *("InternS2PreviewForConditionalGeneration", "InternS2PreviewProcessingInfo"),
    ),
    f"{MODELS}.kimi_k25": (
        *("KimiK25ForConditionalGeneration", "KimiK25ProcessingInfo.get_hf_config()"),
        *("MaxImageTokenMeta.height", "MaxImageTokenMeta.width"),
    ),
    f"{MODELS}.kimi_vl": (
        *("KimiVLForConditionalGeneration", "KimiVLMultiModalProcessor"),
        *("KimiVLProcessingInfo.get_hf_config()", "KimiVLProcessingInfo.image_token_id"),
    ),
    f"{MODELS}.qwen2_5_vl": (
        *("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessingInfo.get_hf_config()"),
        "Qwen2_5_VLProcessingInfo.get_image_processor()",
        "Qwen2_5_VLProcessingInfo._get_vision_info"
        "(image_width, image_height, image_processor, mm_kwargs, modality)",
        "Qwen2_5_VLProcessingInfo._merge_and_resolve_mm_processor_kwargs(mm_kwargs)",
    ),
    f"{MODELS}.qwen3_5": (
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        *("Qwen3_5ProcessingInfo", "Qwen3_5MoeProcessingInfo"),
    ),
    f"{MODELS}.qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerProcessingInfo.get_hf_config()",
        "Qwen3OmniMoeThinkerProcessingInfo.get_image_size_with_most_features()",
    ),
    f"{MODELS}.qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMultiModalDataParser(spatial_merge_size, video_needs_metadata)",
        *("Qwen3VLProcessingInfo.get_hf_config()", "Qwen3VLProcessingInfo.get_image_processor()"),
        "Qwen3VLProcessingInfo._get_vision_info"
        "(image_width, image_height, image_processor, mm_kwargs, modality)",
        "Qwen3VLProcessingInfo._merge_and_resolve_mm_processor_kwargs(mm_kwargs)",
    ),
    f"{MODELS}.qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeProcessingInfo"),
    f"{MODELS}.registry": ("_LazyRegisteredModel.module_name",),
    f"{MODELS}.utils": ("StageMissingLayer",),
    "vllm.multimodal": ("MULTIMODAL_REGISTRY.register_processor(processor, info, dummy_inputs)",),
    "vllm.multimodal.inputs": (
        *("MultiModalFeatureSpec.data", "MultiModalFeatureSpec.identifier"),
        *("MultiModalFeatureSpec.mm_position", "MultiModalFeatureSpec.modality"),
        *("MultiModalFieldConfig.batched(modality, keep_on_cpu)", "MultiModalFieldElem.data"),
        *("MultiModalKwargsItem", "PlaceholderRange.get_num_embeds()"),
        *("PlaceholderRange.length", "PlaceholderRange.offset"),
    ),
    "vllm.multimodal.media": (
        "MEDIA_CONNECTOR_REGISTRY.register(name)",
        *("MediaConnector.fetch_image(image_url)", "MediaConnector.fetch_image_async(image_url)"),
        *("MediaConnector.fetch_video(video_url)", "MediaConnector.fetch_video_async(video_url)"),
        "MediaConnector.load_from_url(url, media_io, fetch_timeout)",
        "MediaConnector.load_from_url_async(url, media_io, fetch_timeout)",
        "MediaWithBytes(media, original_bytes)",
    ),
    "vllm.multimodal.media.image": ("ImageMediaIO(decoded_budget)",),
    "vllm.multimodal.media.video": ("VideoMediaIO(image_io)", "VideoMediaIO.load_base64(media_type, data)"),
    "vllm.multimodal.parse": (
        *("ImageProcessorItems(data)", "ImageSize.height", "ImageSize.width", "MultiModalDataItems"),
        *("MultiModalDataParser(video_needs_metadata)", "ProcessorBatchItems(data, modality)"),
        *("ProcessorBatchItems.get_all()", "VideoProcessorItems(data)"),
    ),
    "vllm.multimodal.processing": (
        *("InputProcessingContext.get_mm_config()", "InputProcessingContext.model_config"),
        "PromptReplacement(modality, target, replacement)",
        "PromptUpdateDetails.select_token_id(seq, embed_token_id)",
        "cached_encode(tokenizer, text, add_special_tokens)",
    ),
    "vllm.multimodal.video": ("Qwen3VLVideoBackend._MAX_FPS", "Qwen3VLVideoBackend._MAX_FRAMES"),
    "vllm.models.kimi_k3": ("KimiK3ForConditionalGeneration",),
    "vllm.models.kimi_k3.common.mm_preprocess": (
        *("KimiK3MultiModalProcessor", "KimiK3ProcessingInfo.get_hf_config()"),
    ),
    "vllm.platforms": ("current_platform.current_device()", "current_platform.is_cuda()"),
    "vllm.transformers_utils.repo_utils": ("get_hf_file_to_dict(file_name, model, revision)",),
    "vllm.v1.core.encoder_cache_manager": ("EncoderCacheManager(cache_size)",),
    "vllm.v1.core.sched.output": (
        *("SchedulerOutput.free_encoder_mm_hashes", "SchedulerOutput.num_scheduled_tokens"),
        *("SchedulerOutput.scheduled_encoder_inputs", "SchedulerOutput.total_num_scheduled_tokens"),
    ),
    "vllm.v1.request": ("RequestStatus.RUNNING", "RequestStatus.WAITING_FOR_REMOTE_KVS"),
}
"""Module -> what the plugin calls or reads there. It passes the parameters in brackets; there may be more. So
are methods that it replaces by one that takes any further parameters."""

OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "vllm.distributed.ec_transfer.ec_connector.base": (
        "ECConnectorBase(vllm_config, role)",
        "ECConnectorBase.build_connector_meta(scheduler_output)",
        "ECConnectorBase.build_ec_connector_stats(data)",
        "ECConnectorBase.build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        "ECConnectorBase.ensure_cache_available(request, num_computed_tokens)",
        "ECConnectorBase.get_ec_connector_stats()",
        "ECConnectorBase.has_cache_item(identifier)",
        "ECConnectorBase.request_finished(request)",
        "ECConnectorBase.save_caches(encoder_cache, mm_hash, kwargs)",
        "ECConnectorBase.shutdown()",
        "ECConnectorBase.start_load_caches(encoder_cache, kwargs)",
        "ECConnectorBase.start_worker_services()",
        "ECConnectorBase.take_unavailable_requests()",
        "ECConnectorBase.update_state_after_alloc(request, index)",
        "ECConnectorBase.update_state_after_free(request, index)",
    ),
    "vllm.distributed.ec_transfer.ec_connector.metrics": (
        "ECConnectorPromMetrics.observe(transfer_stats_data, engine_idx)",
        *("ECConnectorStats.aggregate(other)", "ECConnectorStats.is_empty()"),
        *("ECConnectorStats.reduce()", "ECConnectorStats.reset()"),
    ),
    "vllm.entrypoints.generate.base.serving": (
        "GenerateBaseServing._raise_if_error(finish_reason, request_id)",
    ),
    f"{MODELS}.bailing_moe_v3_vl": (
        "BailingMoeV3VLDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "BailingMoeV3VLForConditionalGeneration.embed_multimodal(kwargs)",
        "BailingMoeV3VLMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "BailingMoeV3VLMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "BailingMoeV3VLProcessingInfo.get_data_parser()",
    ),
    f"{MODELS}.config": (
        "VerifyAndUpdateConfig.verify_and_update_config(vllm_config)",
        "VerifyAndUpdateConfig.verify_and_update_model_config(model_config)",
    ),
    f"{MODELS}.glm4_1v": (
        "Glm4vDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "Glm4vDummyInputsBuilder._get_dummy_videos(width, height, num_frames, num_videos, overrides)",
        "Glm4vForConditionalGeneration.embed_multimodal(kwargs)",
        "Glm4vMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "Glm4vMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "Glm4vMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        "Glm4vProcessingInfo._get_video_second_idx_glm46v(metadata, total_frames)",
        "Glm4vProcessingInfo._get_video_second_idx_glm4v(metadata, total_frames)",
        "Glm4vProcessingInfo.get_data_parser()",
    ),
    f"{MODELS}.interfaces": ("SupportsMultiModal.embed_multimodal(kwargs)",),
    f"{MODELS}.kimi_k25": (
        "KimiK25DummyInputsBuilder.get_dummy_mm_items()",
        "KimiK25ForConditionalGeneration.embed_multimodal(kwargs)",
        "KimiK25MultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "KimiK25MultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "KimiK25MultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
        "KimiK25ProcessingInfo.get_data_parser()",
    ),
    f"{MODELS}.kimi_vl": (
        "KimiVLDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "KimiVLDummyInputsBuilder.get_dummy_text(mm_counts)",
        "KimiVLForConditionalGeneration.embed_multimodal(kwargs)",
        "KimiVLProcessingInfo.get_data_parser()",
    ),
    f"{MODELS}.qwen2_5_vl": (
        "Qwen2_5_VLDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "Qwen2_5_VLDummyInputsBuilder._get_dummy_videos(width, height, num_frames, num_videos, overrides)",
        "Qwen2_5_VLForConditionalGeneration.embed_multimodal(kwargs)",
        "Qwen2_5_VLMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "Qwen2_5_VLMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "Qwen2_5_VLProcessingInfo.get_data_parser()",
    ),
    f"{MODELS}.qwen3_5": ("Qwen3_5ForConditionalGeneration.embed_multimodal(kwargs)",),
    f"{MODELS}.qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration.embed_multimodal(kwargs)",
        "Qwen3OmniMoeThinkerProcessingInfo.get_data_parser()",
        "Qwen3OmniMoeThinkerProcessingInfo.get_supported_mm_limits()",
        "Qwen3OmniMoeThinkerProcessingInfo.validate_num_items(modality, num_items)",
    ),
    f"{MODELS}.qwen3_vl": (
        "Qwen3VLDummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "Qwen3VLDummyInputsBuilder._get_dummy_videos(width, height, num_frames, num_videos, overrides)",
        "Qwen3VLForConditionalGeneration.embed_multimodal(kwargs)",
        "Qwen3VLMultiModalDataParser._parse_image_data(data)",
        "Qwen3VLMultiModalDataParser._parse_video_data(data)",
        "Qwen3VLMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "Qwen3VLMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "Qwen3VLProcessingInfo.get_data_parser()",
    ),
    "vllm.multimodal.media": (
        "MediaIO.load_base64(media_type, data)",
        "MediaIO.load_bytes(data)",
        "MediaIO.load_file(filepath)",
    ),
    "vllm.multimodal.parse": (
        "MultiModalDataParser._parse_image_data(data)",
        "MultiModalDataParser._parse_vision_chunk_data(data)",
        "ProcessorBatchItems.get_item_for_hash(index)",
    ),
    "vllm.models.kimi_k3": ("KimiK3ForConditionalGeneration.embed_multimodal(kwargs)",),
    "vllm.models.kimi_k3.common.mm_preprocess": (
        "KimiK3DummyInputsBuilder._get_dummy_images(width, height, num_images, overrides)",
        "KimiK3DummyInputsBuilder.get_dummy_text(mm_counts)",
        "KimiK3ProcessingInfo.get_data_parser()",
    ),
    "vllm.multimodal.processing.processor": (
        "BaseMultiModalProcessor._apply_hf_processor_main(mm_items, hf_kwargs)",
        "BaseMultiModalProcessor._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)",
        "BaseMultiModalProcessor._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)",
    ),
    "vllm.v1.core.encoder_cache_manager": ("EncoderCacheManager.create_manager(cache_size, vllm_config)",),
}
"""Module -> methods that the plugin replaces, which vLLM calls. They have exactly these parameters."""

INTERFACES = Interfaces("vLLM", TESTED, CALLED, OVERRIDDEN, logger)
