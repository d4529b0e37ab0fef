"""Kimi-K2.5 in vLLM with images that are a grid and a key.

Owns the processor that vLLM 0.32 lacks for this model: it knows Kimi's media as ``vision_chunk`` with pixels
only, while Qwen's processors size an image's placeholders by its grid alone when the engine consumes rows.
Here such an image has the modality ``image`` and the field ``grid_thws``; media with pixels stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["kimi_consumer"]

GRID = "grid_thws"
ROWS = "image_embeds"


def kimi_consumer() -> type:
    """The model class, with its processor registered."""
    from vllm.model_executor.models import kimi_k25
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor, info = _processor(kimi_k25), _info(kimi_k25)

    class KimiK25Consumer(kimi_k25.KimiK25ForConditionalGeneration):  # type: ignore[misc]
        @classmethod
        def get_placeholder_str(cls, modality: str, i: int) -> str | None:
            text: str | None = super().get_placeholder_str(
                "image" if modality == "image_embeds" else modality, i
            )
            return text

    register = MULTIMODAL_REGISTRY.register_processor(
        processor, info=info, dummy_inputs=kimi_k25.KimiK25DummyInputsBuilder
    )
    registered: type = register(KimiK25Consumer)
    return registered


def _data_parser() -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig
    from vllm.multimodal.parse import DictEmbeddingItems, MultiModalDataParser

    class KimiConsumerDataParser(MultiModalDataParser):  # type: ignore[misc]
        embedding_fields: Mapping[str, Mapping[str, str]] = {"image": {ROWS: "values", GRID: "metadata"}}

        def _parse_image_data(self, data: Any) -> Any:
            if not isinstance(data, dict):
                return super()._parse_image_data(data)
            required, optional = self.embedding_field_sets("image")
            return DictEmbeddingItems(
                data,
                modality="image",
                required_fields=required,
                optional_fields=optional,
                fields_factory=lambda _: {
                    ROWS: MultiModalFieldConfig.batched("image"),
                    GRID: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
                },
            )

    return KimiConsumerDataParser


def _info(kimi_k25: Any) -> Any:
    data_parser = _data_parser()

    class KimiConsumerInfo(kimi_k25.KimiK25ProcessingInfo):  # type: ignore[misc]
        def get_data_parser(self) -> Any:
            if not self.allow_missing_mm_embeddings:
                return super().get_data_parser()
            return data_parser(
                expected_hidden_size=self._get_expected_hidden_size(), allow_missing_mm_embeddings=True
            )

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            limits = dict(super().get_supported_mm_limits())
            return {**limits, "image": None} if self.allow_missing_mm_embeddings else limits

        def get_mm_max_tokens_per_item(
            self, seq_len: int, mm_counts: Mapping[str, int]
        ) -> Mapping[str, int] | None:
            """Of the largest item, as vLLM measures it on a dummy."""
            if not self.allow_missing_mm_embeddings:
                found: Mapping[str, int] | None = super().get_mm_max_tokens_per_item(seq_len, mm_counts)
                return found
            (largest,) = kimi_k25.KimiK25DummyInputsBuilder(self).get_dummy_mm_items()
            return dict.fromkeys(mm_counts, self.media_tokens_calculator(largest))

    return KimiConsumerInfo


def _processor(kimi_k25: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig
    from vllm.multimodal.processing import PromptReplacement

    class KimiConsumerProcessor(kimi_k25.KimiK25MultiModalProcessor):  # type: ignore[misc]
        def _get_mm_fields_config(
            self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
        ) -> Mapping[str, Any]:
            if "pixel_values" in hf_inputs or not self.info.allow_missing_mm_embeddings:
                fields: Mapping[str, Any] = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
                return fields
            return {
                ROWS: MultiModalFieldConfig.batched("image"),
                GRID: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            }

        def _get_prompt_updates(
            self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
        ) -> Any:
            if "image" not in mm_items:
                return super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
            merge_h, merge_w = self.info.get_hf_config().vision_config.merge_kernel_size
            token_id = self.info.media_token_id

            def placeholders(item: int) -> list[int]:
                _, h, w = out_mm_kwargs["image"][item][GRID].data.reshape(-1).tolist()
                return [token_id] * (h // merge_h * (w // merge_w))

            return [PromptReplacement(modality="image", target=[token_id], replacement=placeholders)]

    return KimiConsumerProcessor
