"""vLLM's processors of GLM for undecoded files, as ``processor`` for Qwen.

vLLM writes a clip's frames as images with their seconds between them, in whole seconds for all of these
models. Its own code writes the tokens here too, from the times that the encoder states.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models import glm4_1v

from lm_adapter.engines.shared.glm_grids import glm_grid
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile
from lm_adapter.engines.vllm.api_server.parser import Decoded, FileProcessorItems
from lm_adapter.engines.vllm.api_server.processor import (
    Factory,
    FileDummyInputsBuilder,
    FileProcessing,
    Sizes,
    choice,
    file_info,
)
from lm_adapter.engines.vllm.settings import given_sizes
from lm_adapter.items import Grid

TIMES = "patch_times_s"
"""Key of a clip's metadata, in place of the frames that vLLM would take the times of."""


class GlmFileProcessing(FileProcessing):
    """Takes the area of ``size`` as an option, which GLM-5.3-Flash's reference does not have."""

    size_options = frozenset({"size"})

    def _image_grid(self, image: ImageFile, hf_kwargs: Mapping[str, object]) -> list[int]:
        """t, h, w in patches, by the reference's own rule: vLLM's leaves the least size out."""
        requested = given_sizes(self._options("images_kwargs", hf_kwargs))
        limits = (requested.get(name, 0) for name in ("min_pixels", "max_pixels"))
        return list(glm_grid(self.info.get_image_processor(), image.height, image.width, *limits))

    def _get_prompt_updates(
        self,
        mm_items: Mapping[str, FileProcessorItems],
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> Sequence[Any]:
        """vLLM's own, which takes frames and metadata of a clip."""
        clips = mm_items["video"].get_all() if "video" in mm_items else ()
        parent: Any = super()
        updates: Sequence[Any] = parent._get_prompt_updates(
            {"video": [_frames(clip) for clip in clips]}, hf_processor_mm_kwargs, out_mm_kwargs
        )
        return updates


def _frames(clip: ClipFile | Decoded | None) -> Any:
    if isinstance(clip, Decoded):
        return clip.media
    return None if clip is None else ((), {TIMES: clip.patch_times_s})


def glm_info(parent: Any) -> type:
    """The family's ProcessingInfo, with a parser for files and times of clips from the encoder."""

    class GlmFileInfo(file_info(parent)):  # type: ignore[misc]
        def _get_video_second_idx_glm4v(self, metadata: dict[str, Any], total_frames: int) -> list[int]:
            return _seconds(metadata) or super()._get_video_second_idx_glm4v(metadata, total_frames)

        def _get_video_second_idx_glm46v(self, metadata: dict[str, Any], total_frames: int) -> list[int]:
            return _seconds(metadata) or super()._get_video_second_idx_glm46v(metadata, total_frames)

    return GlmFileInfo


def _seconds(metadata: Mapping[str, Any]) -> list[int]:
    """Whole seconds, as vLLM has them; none for a clip that vLLM has the frames of."""
    return [int(time_s) for time_s in metadata.get(TIMES, ())]


class GlmFileDummyInputs(glm4_1v.Glm4vDummyInputsBuilder):  # type: ignore[misc]
    """The largest image and clip, without files: the encoder is not asked."""

    _get_dummy_images = FileDummyInputsBuilder._get_dummy_images

    def _get_dummy_videos(
        self, *, width: int, height: int, num_frames: int, num_videos: int, overrides: Sizes | None = None
    ) -> list[ClipFile]:
        if overrides is not None:
            width = min(width, overrides.width or width)
            height = min(height, overrides.height or height)
        config = self.info.get_hf_config().vision_config
        size, _ = self.info._get_vision_info(
            image_width=width,
            image_height=height,
            num_frames=num_frames,
            max_image_pixels=self.info._get_video_max_pixels(),
        )
        depth = max(1, -(-num_frames // config.temporal_patch_size))
        grid = Grid(depth, size.height // config.patch_size, size.width // config.patch_size)
        return [ClipFile(b"", grid=grid, patch_times_s=(0.0,) * depth)] * num_videos


def factories(theirs: Any, architecture: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs. theirs: vLLM's module."""
    processor, info = glm4_1v.Glm4vMultiModalProcessor, glm4_1v.Glm4vProcessingInfo
    options: dict[str, Any] = {}
    if architecture == "Glm5NextForConditionalGeneration":
        own = importlib.import_module(f"{theirs.__name__}.common.multimodal")
        processor, info = own.Glm5NextMultiModalProcessor, own.Glm5NextProcessingInfo
        options = {"size_options": frozenset()}
    ours = type("GlmFileProcessor", (GlmFileProcessing, processor), options)
    return (
        choice(ours, processor),
        choice(glm_info(info), info),
        choice(GlmFileDummyInputs, glm4_1v.Glm4vDummyInputsBuilder),
    )
