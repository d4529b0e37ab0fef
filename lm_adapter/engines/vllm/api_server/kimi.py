"""vLLM's parser and processor of Kimi-K2.5 for undecoded files, as ``parser`` and ``processor`` for Qwen.

vLLM calls Kimi's media ``vision_chunk``: dictionaries with an image each. Clips are refused: vLLM has no
code that cuts them into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.model_executor.models import kimi_k25 as theirs
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import PromptReplacement

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.parser import FileProcessorItems, image_files
from lm_adapter.engines.vllm.api_server.processor import Factory, choice, file_tensor
from lm_adapter.engines.vllm.file_items import FILE_FIELD
from lm_adapter.items import Modality, PreprocessOptions

CHUNK = "vision_chunk"
GRID = "grid_thws"


class KimiFileDataParser(MultiModalDataParser):  # type: ignore[misc]
    def _parse_vision_chunk_data(self, data: object) -> FileProcessorItems | None:
        if data is None:
            return None
        chunks = data if isinstance(data, list) else [data]
        images = []
        for chunk in chunks:
            if isinstance(chunk, dict) and chunk.get("type") != "image":
                raise ValueError(f"a vision chunk is a {chunk.get('type')}, the encoder takes images here")
            images.append(chunk["image"] if isinstance(chunk, dict) else chunk)
        return FileProcessorItems(image_files(images), CHUNK)


class KimiFileInfo(theirs.KimiK25ProcessingInfo):  # type: ignore[misc]
    def get_data_parser(self) -> Any:
        return KimiFileDataParser()

    def grid_of(self, image: ImageFile) -> tuple[int, int, int]:
        """t, h, w in patches, by the reference's own resize rule."""
        sizes = self.image_processor.get_resize_config({"type": "image", "image": image})
        patch_size = self.get_hf_config().vision_config.patch_size
        height = sizes["new_height"] + sizes["pad_height"]
        width = sizes["new_width"] + sizes["pad_width"]
        return 1, height // patch_size, width // patch_size


class KimiFileDummyInputs(theirs.KimiK25DummyInputsBuilder):  # type: ignore[misc]
    def get_dummy_mm_items(self) -> list[Any]:
        """The largest image, without a file: the encoder is not asked."""
        largest = theirs.MaxImageTokenMeta
        return [{"type": "image", "image": ImageFile(b"", largest.width, largest.height), "uuid": None}]


class KimiFileProcessor(theirs.KimiK25MultiModalProcessor):  # type: ignore[misc]
    def _apply_hf_processor_main(
        self, mm_items: Mapping[str, FileProcessorItems], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        images = mm_items[CHUNK].get_all() if CHUNK in mm_items else ()
        if not images:
            return BatchFeature()
        if hf_kwargs:
            raise ValueError(f"mm_processor_kwargs has {sorted(hf_kwargs)}, Kimi's encoder takes none")
        grids = torch.tensor([self.info.grid_of(image) for image in images])
        files = [file_tensor(image, Modality.IMAGE, PreprocessOptions()) for image in images]
        return BatchFeature({GRID: grids, FILE_FIELD: files})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        return {
            GRID: MultiModalFieldConfig.batched(CHUNK, keep_on_cpu=True),
            FILE_FIELD: MultiModalFieldConfig.batched(CHUNK, keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: Mapping[str, FileProcessorItems],
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> list[PromptReplacement]:
        merge_h, merge_w = self.info.get_hf_config().vision_config.merge_kernel_size
        token_id = self.info.media_token_id

        def placeholders(item: int) -> list[int]:
            _, h, w = out_mm_kwargs[CHUNK][item][GRID].data.reshape(-1).tolist()
            return [token_id] * (h // merge_h * (w // merge_w))

        return [PromptReplacement(modality=CHUNK, target=[token_id], replacement=placeholders)]


def factories(_theirs: Any, _name: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. Arguments as in ``processor``."""
    return (
        choice(KimiFileProcessor, theirs.KimiK25MultiModalProcessor),
        choice(KimiFileInfo, theirs.KimiK25ProcessingInfo),
        choice(KimiFileDummyInputs, theirs.KimiK25DummyInputsBuilder),
    )
