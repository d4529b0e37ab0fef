"""vLLM's processor of Qwen3-Omni for undecoded files, as ``processor`` for Qwen3-VL.

Images only: the encoder has the vision tower alone, and vLLM samples and times this model's clips by rules of
its own. Sound and clips are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models import qwen3_omni_moe_thinker as theirs
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import PromptReplacement

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.parser import FileProcessorItems, image_files
from lm_adapter.engines.vllm.api_server.processor import Factory, Qwen3VLFileProcessor, choice
from lm_adapter.engines.vllm.file_items import FILE_FIELD

REASONS = {
    "audio": "the encoder has Qwen3-Omni's vision tower, and no audio tower",
    "video": "the encoder takes images of Qwen3-Omni with vLLM, and no clips",
}
GRID = "image_grid_thw"


class OmniFileDataParser(MultiModalDataParser):  # type: ignore[misc]
    def _parse_image_data(self, data: object) -> FileProcessorItems | None:
        return None if data is None else FileProcessorItems(image_files(data), "image")


class OmniFileInfo(theirs.Qwen3OmniMoeThinkerProcessingInfo):  # type: ignore[misc]
    def get_data_parser(self) -> Any:
        return OmniFileDataParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        if modality in REASONS:
            raise ValueError(f"{modality} is not accepted: {REASONS[modality]}")
        super().validate_num_items(modality, num_items)


class OmniFileDummyInputs(theirs.Qwen3OmniMoeThinkerDummyInputsBuilder):  # type: ignore[misc]
    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The largest image, without a file: the encoder is not asked."""
        width, height = self.info.get_image_size_with_most_features()
        if (size := mm_options.get("image")) is not None:
            width, height = min(width, size.width or width), min(height, size.height or height)
        return {"image": [ImageFile(b"", width, height)] * mm_counts.get("image", 0)}


class OmniFileProcessor(Qwen3VLFileProcessor):
    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        of_images = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return {GRID: of_images, FILE_FIELD: of_images}

    def _get_prompt_updates(
        self,
        mm_items: Mapping[str, FileProcessorItems],
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> list[PromptReplacement]:
        config = self.info.get_hf_config()
        merge_size, token_id = config.vision_config.spatial_merge_size, config.image_token_id

        def placeholders(item: int) -> list[int]:
            num_patches = int(out_mm_kwargs["image"][item][GRID].data.prod())
            return [token_id] * (num_patches // merge_size**2)

        return [PromptReplacement(modality="image", target=[token_id], replacement=placeholders)]


def factories(_theirs: Any, _name: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. Arguments as in ``processor``."""
    return (
        choice(OmniFileProcessor, theirs.Qwen3OmniMoeThinkerMultiModalProcessor),
        choice(OmniFileInfo, theirs.Qwen3OmniMoeThinkerProcessingInfo),
        choice(OmniFileDummyInputs, theirs.Qwen3OmniMoeThinkerDummyInputsBuilder),
    )
