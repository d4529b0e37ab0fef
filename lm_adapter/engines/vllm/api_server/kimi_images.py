"""vLLM's parser and processors of Kimi-VL and Kimi-K3 for undecoded files, as ``parser`` and ``processor``
for Qwen. Both models take images only, under vLLM's plain name for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseMultiModalProcessor,
    PromptReplacement,
    PromptUpdateDetails,
    cached_encode,
)
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.kimi import k3_media_texts, kimi_vl_grid
from lm_adapter.engines.vllm.api_server.parser import FileProcessorItems, ImageFileParser
from lm_adapter.engines.vllm.api_server.processor import Factory, FileDummyInputsBuilder, choice, file_tensor
from lm_adapter.engines.vllm.file_items import FILE_FIELD
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid, Modality, PreprocessOptions

GRID = "grid_thws"
SETTINGS_FILE = "preprocessor_config.json"


class KimiImageProcessor(BaseMultiModalProcessor):  # type: ignore[misc]
    """Grids, files and placeholders. A model's ProcessingInfo has ``grid_of`` and ``image_token_id``."""

    def _apply_hf_processor_main(
        self, mm_items: Mapping[str, FileProcessorItems], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        images = mm_items["image"].get_all() if "image" in mm_items else ()
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
            GRID: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            FILE_FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: Mapping[str, FileProcessorItems],
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> list[PromptReplacement]:
        def replacement(item: int) -> Any:
            _, h, w = out_mm_kwargs["image"][item][GRID].data.reshape(-1).tolist()
            merge_h, merge_w = self.info.get_hf_config().vision_config.merge_kernel_size
            return self.replacement(mm_items["image"].get(item), h // merge_h * (w // merge_w))

        return [PromptReplacement(modality="image", target=self.target(), replacement=replacement)]

    def target(self) -> list[int]:
        """The tokens that stand for an image in a prompt."""
        return [self.info.image_token_id]

    def replacement(self, image: ImageFile, num_rows: int) -> Any:
        """The tokens in their place."""
        return [self.info.image_token_id] * num_rows


class KimiK3ImageProcessor(KimiImageProcessor):
    """An image's size is in the prompt too."""

    def target(self) -> list[int]:
        tokens: list[int] = self._encoded(self.info.get_hf_config().image_placeholder)
        return tokens

    def replacement(self, image: ImageFile, num_rows: int) -> Any:
        before, after = k3_media_texts(image.width, image.height)
        token_id = self.info.image_token_id
        ids = [*self._encoded(before), *[token_id] * num_rows, *self._encoded(after)]
        return PromptUpdateDetails.select_token_id(ids, token_id)

    def _encoded(self, text: str) -> Any:
        return cached_encode(self.info.get_tokenizer(), text, add_special_tokens=False)


def factories(theirs: Any, architecture: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. Arguments as in ``processor``."""
    name = architecture.removesuffix("ForConditionalGeneration")
    parts, files, make_info = theirs, KimiImageProcessor, _vl_info
    if name == "KimiK3":
        from vllm.models.kimi_k3.common import mm_preprocess

        parts, files, make_info = mm_preprocess, KimiK3ImageProcessor, _k3_info
    processor, info, dummies = (
        getattr(parts, f"{name}{part}")
        for part in ("MultiModalProcessor", "ProcessingInfo", "DummyInputsBuilder")
    )
    return choice(files, processor), choice(make_info(info), info), choice(_dummies(dummies), dummies)


def _vl_info(parent: Any) -> type:
    """Kimi-VL's ProcessingInfo without its processor, which is code of the checkpoint."""

    class KimiVLFileInfo(parent):  # type: ignore[misc]
        def get_data_parser(self) -> Any:
            return ImageFileParser()

        def grid_of(self, image: ImageFile) -> Grid:
            """Raises ValueError for an image that the reference refuses."""
            model = self.ctx.model_config
            settings = get_hf_file_to_dict(SETTINGS_FILE, model.model, model.revision)
            if not settings:
                raise InvalidRequest(f"{model.model} has no {SETTINGS_FILE}", reason="CHECKPOINT")
            return kimi_vl_grid(
                image.width,
                image.height,
                patch_size=settings["patch_size"],
                merge_size=self.get_hf_config().vision_config.merge_kernel_size[0],
                max_patches=settings["in_token_limit"],
            )

    return KimiVLFileInfo


def _k3_info(parent: Any) -> type:
    class KimiK3FileInfo(parent):  # type: ignore[misc]
        @property
        def image_token_id(self) -> int:
            token_id: int = self.media_token_id
            return token_id

        def get_data_parser(self) -> Any:
            return ImageFileParser()

        def grid_of(self, image: ImageFile) -> Grid:
            """By the reference's own resize rule."""
            sizes = self.image_processor.get_resize_config({"type": "image", "image": image})
            patch_size = self.get_hf_config().vision_config.patch_size
            height = sizes["new_height"] + sizes["pad_height"]
            width = sizes["new_width"] + sizes["pad_width"]
            return Grid(1, height // patch_size, width // patch_size)

    return KimiK3FileInfo


def _dummies(parent: Any) -> type:
    class FileDummyInputs(parent):  # type: ignore[misc]
        """The largest image, without a file: the encoder is not asked."""

        def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
            """Kimi-K3's own text; Kimi-VL's without its processor."""
            config = self.info.get_hf_config()
            placeholder: str = getattr(config, "image_placeholder", "")
            placeholder = placeholder or self.info.get_tokenizer().decode(self.info.image_token_id)
            return placeholder * mm_counts.get("image", 0)

        _get_dummy_images = FileDummyInputsBuilder._get_dummy_images

    return FileDummyInputs
