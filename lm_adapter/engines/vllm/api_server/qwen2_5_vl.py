"""vLLM's processor of Qwen2.5-VL for undecoded files, as ``processor`` for Qwen3-VL.

A clip is one run of placeholders, without texts between its frames. vLLM computes positions of the seconds
between a clip's temporal patches, which are of the times that the encoder states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.model_executor.models import qwen2_5_vl as theirs
from vllm.multimodal.inputs import MultiModalFieldConfig

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile
from lm_adapter.engines.vllm.api_server.parser import FileProcessorItems
from lm_adapter.engines.vllm.api_server.processor import (
    Factory,
    FileDummyInputsBuilder,
    FileProcessing,
    Sizes,
    choice,
    file_info,
)
from lm_adapter.items import Grid

SECONDS = "second_per_grid_ts"


class Qwen25FileDummyInputs(theirs.Qwen2_5_VLDummyInputsBuilder):  # type: ignore[misc]
    """The largest image and clip, without files: the encoder is not asked."""

    _get_dummy_images = FileDummyInputsBuilder._get_dummy_images

    def _get_dummy_videos(
        self, *, width: int, height: int, num_frames: int, num_videos: int, overrides: Sizes | None = None
    ) -> list[ClipFile]:
        (largest,) = self._get_dummy_images(width=width, height=height, num_images=1, overrides=overrides)
        assert isinstance(largest, ImageFile)
        size, _ = self.info._get_vision_info(
            image_width=largest.width,
            image_height=largest.height,
            image_processor=self.info.get_image_processor(),
            mm_kwargs={},
            modality="video",
        )
        config = self.info.get_hf_config().vision_config
        depth = max(1, -(-num_frames // config.temporal_patch_size))
        grid = Grid(depth, size.height // config.patch_size, size.width // config.patch_size)
        return [ClipFile(b"", grid=grid, patch_times_s=(0.0,) * depth)] * num_videos


class Qwen25FileProcessor(FileProcessing, theirs.Qwen2_5_VLMultiModalProcessor):  # type: ignore[misc]
    def _apply_hf_processor_main(
        self, mm_items: Mapping[str, FileProcessorItems], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        fields = super()._apply_hf_processor_main(mm_items, hf_kwargs)
        if "timestamps" in fields:
            fields[SECONDS] = torch.tensor([_distance_s(times_s) for times_s in fields.pop("timestamps")])
        return fields

    def _times_s(self, prepared: BatchFeature) -> list[float]:
        return [0.0, float(prepared[SECONDS][0])]

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        del fields["timestamps"]
        return fields | {SECONDS: MultiModalFieldConfig.batched("video", keep_on_cpu=True)}


def _distance_s(patch_times_s: list[float]) -> float:
    """Seconds from the first temporal patch to the second; a last one with a repeated frame is nearer."""
    return patch_times_s[1] - patch_times_s[0] if len(patch_times_s) > 1 else 1.0


def factories(_theirs: Any, _architecture: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. Arguments as in ``processor``."""
    return (
        choice(Qwen25FileProcessor, theirs.Qwen2_5_VLMultiModalProcessor),
        choice(file_info(theirs.Qwen2_5_VLProcessingInfo), theirs.Qwen2_5_VLProcessingInfo),
        choice(Qwen25FileDummyInputs, theirs.Qwen2_5_VLDummyInputsBuilder),
    )
