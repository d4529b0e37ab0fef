"""vLLM's processors for undecoded files: grid, placeholders, and the file in the request.

Owns what replaces the reference processor and the dummy inputs, for Qwen3-VL and the models with its
processor; ``kimi``, ``qwen3_omni``, ``qwen2_5_vl`` and ``glm`` have the same for their models. vLLM's own
code computes an image's grid from its header, as in the reference; the scheduler compares it with the
encoder's. A clip's grid is in the encoder's answer. vLLM's own code makes the tokens between a clip's frames,
and prepares pixels that the client has decoded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.model_executor.models import qwen3_vl
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems, VideoProcessorItems

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import SAMPLING, ClipFile
from lm_adapter.engines.vllm.api_server.parser import Decoded, FileDataParser, FileProcessorItems
from lm_adapter.engines.vllm.api_server.server import VLLMS_OWN
from lm_adapter.engines.vllm.failures import listening
from lm_adapter.engines.vllm.file_items import CLIP_FIELD, FILE_FIELD, FileItem
from lm_adapter.engines.vllm.settings import given_sizes, is_marked
from lm_adapter.items import Grid, Modality, PreprocessOptions
from lm_adapter.keys import content_digest

SIZE_OPTIONS = {"size", "min_pixels", "max_pixels"}

Factory: TypeAlias = Callable[..., Any]
"""Makes one part of a processor. Its first argument is vLLM's context or ProcessingInfo."""


class Sizes(Protocol):
    """What is read of vLLM's ``ImageDummyOptions``; None where the user gave none."""

    width: int | None
    height: int | None


def file_tensor(file: ImageFile | ClipFile, modality: Modality, options: PreprocessOptions) -> torch.Tensor:
    """The field of a processed item that carries the file: uint8 [n]."""
    reply = listening().name if file.data else ""
    # Clips are announced with their options, images without any.
    is_announced = file.is_announced and (modality is Modality.VIDEO or not options.given())
    item = FileItem(file.data, file.digest, modality, options, reply, is_announced)
    return torch.from_numpy(item.packed())


def pixel_tensor(pixel_values: torch.Tensor, grid: Grid, modality: Modality) -> torch.Tensor:
    """As ``file_tensor``, for pixels that vLLM's processor has prepared. pixel_values: [P, D]."""
    data = pixel_values.to("cpu", torch.float32).contiguous().numpy().tobytes()
    item = FileItem(data, content_digest(data), modality, reply=listening().name, pixel_grid=grid)
    return torch.from_numpy(item.packed())


def choice(ours: Factory, theirs: Factory) -> Factory:
    """Ours where the engine's rows come from the encoder, else vLLM's own."""

    def make(first: Any, *rest: Any, **named: Any) -> Any:
        context = getattr(first, "ctx", first)
        return (ours if is_marked(context.get_mm_config()) else theirs)(first, *rest, **named)

    return make


def factories(theirs: Any, name: str) -> tuple[Factory, Factory, Factory]:
    """Factories of processor, ProcessingInfo and dummy inputs of a Qwen family. theirs: vLLM's module of the
    model's class. name: of that class."""
    module = importlib.import_module(getattr(theirs, name).__module__)
    parent = getattr(module, name.replace("ForConditionalGeneration", "ProcessingInfo"))
    return (
        choice(Qwen3VLFileProcessor, qwen3_vl.Qwen3VLMultiModalProcessor),
        choice(file_info(parent), parent),
        choice(FileDummyInputsBuilder, qwen3_vl.Qwen3VLDummyInputsBuilder),
    )


def file_info(parent: Any) -> type:
    """The family's ProcessingInfo, with a parser for files."""

    class FileProcessingInfo(parent):  # type: ignore[misc]
        def get_data_parser(self) -> Any:
            return FileDataParser(
                self.get_hf_config().vision_config.spatial_merge_size, video_needs_metadata=True
            )

    FileProcessingInfo.__name__ = f"File{parent.__name__}"
    return FileProcessingInfo


class FileDummyInputsBuilder(qwen3_vl.Qwen3VLDummyInputsBuilder):  # type: ignore[misc]
    """The largest image and clip, without files: the encoder is not asked."""

    def _get_dummy_images(
        self, *, width: int, height: int, num_images: int, overrides: Sizes | None = None
    ) -> list[ImageFile]:
        if overrides is not None:
            width = min(width, overrides.width or width)
            height = min(height, overrides.height or height)
        return [ImageFile(b"", width, height)] * num_images

    def _get_dummy_videos(
        self, *, width: int, height: int, num_frames: int, num_videos: int, overrides: Sizes | None = None
    ) -> list[ClipFile]:
        """vLLM has applied ``overrides`` to width and height, which are multiples of the patch size."""
        config = self.info.get_hf_config().vision_config
        depth = -(-num_frames // config.temporal_patch_size)
        grid = Grid(depth, height // config.patch_size, width // config.patch_size)
        return [ClipFile(b"", grid=grid, patch_times_s=(0.0,) * depth)] * num_videos


class FileProcessing:
    """What a processor for files does in place of its parent, which is one of vLLM's. size_options: the
    options of a request for images."""

    size_options: ClassVar[Set[str]] = SIZE_OPTIONS
    info: Any

    def _apply_hf_processor_main(
        self, mm_items: Mapping[str, FileProcessorItems], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        images = mm_items["image"].get_all() if "image" in mm_items else ()
        clips = mm_items["video"].get_all() if "video" in mm_items else ()
        fields: dict[str, Any] = {}
        if images:
            of_images = [self._image_fields(image, hf_kwargs) for image in images]
            fields["image_grid_thw"] = torch.tensor([grid for grid, _ in of_images])
            fields[FILE_FIELD] = [file for _, file in of_images]
        if clips:
            of_clips = [self._clip_fields(clip, hf_kwargs) for clip in clips]
            fields["video_grid_thw"] = torch.tensor([grid for grid, _, _ in of_clips])
            fields["timestamps"] = [times_s for _, times_s, _ in of_clips]
            fields[CLIP_FIELD] = [file for _, _, file in of_clips]
        return BatchFeature(fields)

    def _image_fields(
        self, image: ImageFile | Decoded, hf_kwargs: Mapping[str, object]
    ) -> tuple[list[int], torch.Tensor]:
        """Grid and file."""
        if isinstance(image, Decoded):
            prepared = self._prepared({"image": ImageProcessorItems([image.media])}, hf_kwargs)
            grid = Grid(*prepared["image_grid_thw"][0].tolist())
            return list(grid), pixel_tensor(prepared["pixel_values"], grid, Modality.IMAGE)
        options = self._image_options(hf_kwargs)
        return self._image_grid(image, hf_kwargs), file_tensor(image, Modality.IMAGE, options)

    def _clip_fields(
        self, clip: ClipFile | Decoded, hf_kwargs: Mapping[str, object]
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """Grid, times of the temporal patches, and file."""
        if isinstance(clip, Decoded):
            prepared = self._prepared({"video": VideoProcessorItems([clip.media])}, hf_kwargs)
            grid = Grid(*prepared["video_grid_thw"][0].tolist())
            return (
                list(grid),
                self._times_s(prepared),
                pixel_tensor(prepared["pixel_values_videos"], grid, Modality.VIDEO),
            )
        self._check_clip_options(hf_kwargs)
        return (
            list(clip.grid),
            list(clip.patch_times_s),
            file_tensor(clip, Modality.VIDEO, clip.options),
        )

    def _times_s(self, prepared: BatchFeature) -> list[float]:
        """Times of the temporal patches of one clip that vLLM has prepared. GLM's processor makes the texts
        of the metadata, not of a field."""
        return list(map(float, prepared.get("timestamps", [()])[0]))

    def _prepared(self, items: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """One item, prepared by vLLM's own processor and normalised, as the encoder takes pixels."""
        scopes: dict[str, Any] = {
            name: hf_kwargs.get(name) or {} for name in ("images_kwargs", "videos_kwargs")
        }
        # Inside a scope: outside of it vLLM turns these options off.
        normalised = {name: {**scope, **dict.fromkeys(VLLMS_OWN, True)} for name, scope in scopes.items()}
        parent: Any = super()
        prepared: BatchFeature = parent._apply_hf_processor_main(
            MultiModalDataItems(items), {**hf_kwargs, **normalised}
        )
        return prepared

    def _image_options(self, hf_kwargs: Mapping[str, object]) -> PreprocessOptions:
        """Raises ValueError for options that the encoder does not have."""
        options = self._options("images_kwargs", hf_kwargs)
        unknown = set(options) - self.size_options
        if unknown:
            raise ValueError(
                f"mm_processor_kwargs has {sorted(unknown)}, the encoder takes {sorted(self.size_options)}"
            )
        return PreprocessOptions(**given_sizes(options))

    def _image_grid(self, image: ImageFile, hf_kwargs: Mapping[str, object]) -> list[int]:
        """t, h, w in patches."""
        size, _ = self.info._get_vision_info(
            image_width=image.width,
            image_height=image.height,
            image_processor=self.info.get_image_processor(),
            mm_kwargs=hf_kwargs,
            modality="image",
        )
        patch_size = self.info.get_hf_config().vision_config.patch_size
        return [1, size.height // patch_size, size.width // patch_size]

    def _check_clip_options(self, hf_kwargs: Mapping[str, object]) -> None:
        """A clip's frames are chosen before vLLM's processor sees it. Raises ValueError for options that
        would choose others."""
        configured, requested = self._options("videos_kwargs", {}), self._options("videos_kwargs", hf_kwargs)
        unknown = set(configured) - SIZE_OPTIONS
        if unknown:
            raise ValueError(
                f"--mm-processor-kwargs has {sorted(unknown)} for clips, the encoder takes "
                f"{sorted(SIZE_OPTIONS)}; {list(SAMPLING)} go into media_io_kwargs"
            )
        if requested != configured:
            changed = sorted(name for name in requested if requested[name] != configured.get(name))
            raise ValueError(
                f"mm_processor_kwargs of a request with clips has {changed}: give sizes at the start, by "
                f"--mm-processor-kwargs, and {list(SAMPLING)} in media_io_kwargs"
            )

    def _options(self, scope: str, hf_kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The options of the start and of the request, for media of this scope."""
        merged = self.info._merge_and_resolve_mm_processor_kwargs(hf_kwargs).get(scope, {})
        return {name: value for name, value in merged.items() if value is not None and name not in VLLMS_OWN}

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        of_images, of_clips = (
            MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for modality in ("image", "video")
        )
        return {
            "image_grid_thw": of_images,
            FILE_FIELD: of_images,
            "video_grid_thw": of_clips,
            "timestamps": of_clips,
            CLIP_FIELD: of_clips,
        }


class Qwen3VLFileProcessor(FileProcessing, qwen3_vl.Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    """Qwen3-VL's and Qwen3.5's."""
