"""vLLM's processors for files that nobody decodes: placeholders from an image's header, or from what the
encoder says of a clip, and the file itself. Pixels that the client has decoded are the exception: float
arrays, and the frames of a clip, are prepared by vLLM's own processor, and go to the encoder in its form.

Owns what takes the place of parsing, of the reference processor and of dummies, for Qwen3-VL and Qwen3.5; the
same for Kimi-K2.5 is in ``kimi``. An image's grid is computed as the reference does, by vLLM's own code; the
encoder compares it with its own. What stands between a clip's frames is vLLM's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.model_executor.models import qwen3_vl
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import (
    ImageProcessorItems,
    MultiModalDataItems,
    ProcessorBatchItems,
    VideoProcessorItems,
)

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import SAMPLING, ClipFile
from lm_adapter.engines.vllm.api_server.frontend import VLLMS_OWN
from lm_adapter.engines.vllm.failures import listening
from lm_adapter.engines.vllm.file_requests import CLIP_FIELD, FILE_FIELD, FileRequest
from lm_adapter.engines.vllm.settings import given_sizes, is_marked
from lm_adapter.items import Grid, Modality, PreprocessOptions
from lm_adapter.keys import content_digest

SIZE_OPTIONS = {"size", "min_pixels", "max_pixels"}
METADATA = {"fps", "frames_indices", "total_num_frames"}
"""What vLLM has to know of a decoded clip."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A float array or tensor of an image, or (frames, metadata) of a clip, as vLLM takes them."""

    media: Any


class FileItems(ProcessorBatchItems[Any]):  # type: ignore[misc]
    """ImageFiles, ClipFiles or Decoded, or None for those that vLLM has in its cache under the client's
    uuid."""

    def get_item_for_hash(self, index: int) -> object:
        file = self.data[index]
        if isinstance(file, Decoded):
            return file.media
        return file.name if isinstance(file, ClipFile) else None if file is None else file.digest


def image_files(data: Any, *, takes_floats: bool = False) -> list[ImageFile | Decoded | None]:
    """What vLLM takes as images. takes_floats: as Decoded, of which no file can be written. Raises ValueError
    for embeddings, which only the encoder makes here, and for pixels of another form."""
    if isinstance(data, dict) or (isinstance(data, torch.Tensor) and data.ndim == 3):
        raise ValueError("image_embeds are not accepted: image rows come from the encoder")
    if isinstance(data, list | tuple):
        several = list(data)
    else:
        several = list(data) if getattr(data, "ndim", 3) == 4 else [data]
    return [_image_file(one, takes_floats=takes_floats) for one in several]


def _image_file(image: Any, *, takes_floats: bool) -> ImageFile | Decoded | None:
    if isinstance(image, MediaWithBytes):
        image = image.media if isinstance(image.media, ImageFile) else ImageFile.read(image.original_bytes)
    if image is None or isinstance(image, ImageFile | Decoded):
        # vLLM parses again what its cache has not.
        return image
    if isinstance(image, dict) or (isinstance(image, torch.Tensor) and image.ndim == 2):
        raise ValueError("image_embeds are not accepted: image rows come from the encoder")
    if takes_floats and "float" in str(getattr(image, "dtype", "")):
        return Decoded(image)
    return ImageFile.of_pixels(image)


def clip_files(data: Any) -> list[ClipFile | Decoded | None]:
    """What vLLM takes as clips with metadata. Raises ValueError for frames without, and for embeddings."""
    return [_clip_file(one) for one in (data if isinstance(data, list) else [data])]


def _clip_file(clip: Any) -> ClipFile | Decoded | None:
    if isinstance(clip, MediaWithBytes):
        clip = clip.media
    if clip is None or isinstance(clip, ClipFile | Decoded):
        return clip
    if not (isinstance(clip, tuple) and len(clip) == 2 and isinstance(clip[1], Mapping)):
        raise ValueError(
            f"a clip is a {type(clip).__name__}, needs a file in video_url or (frames, metadata): rows come "
            "from the encoder"
        )
    missing = sorted(METADATA - set(clip[1]))
    if missing:
        raise ValueError(f"the metadata of a clip lack {missing}")
    return Decoded(clip)


def request_tensor(
    file: ImageFile | ClipFile, modality: Modality, options: PreprocessOptions
) -> torch.Tensor:
    """The field of a processed item: uint8 [n]."""
    reply = listening().name if file.data else ""
    # Clips are announced with their options, images without any.
    is_announced = file.is_announced and (modality is Modality.VIDEO or not options.given())
    request = FileRequest(file.data, file.digest, modality, options, reply, is_announced)
    return torch.from_numpy(request.packed())


def pixel_tensor(pixel_values: torch.Tensor, grid: Grid, modality: Modality) -> torch.Tensor:
    """As ``request_tensor``, of what vLLM's processor made of decoded pixels. pixel_values: [P, D]."""
    data = pixel_values.to("cpu", torch.float32).contiguous().numpy().tobytes()
    request = FileRequest(data, content_digest(data), modality, reply=listening().name, pixel_grid=grid)
    return torch.from_numpy(request.packed())


class FileDataParser(qwen3_vl.Qwen3VLMultiModalDataParser):  # type: ignore[misc]
    def _parse_image_data(self, data: Any) -> FileItems | None:
        return None if data is None else FileItems(image_files(data, takes_floats=True), "image")

    def _parse_video_data(self, data: Any) -> FileItems | None:
        return None if data is None else FileItems(clip_files(data), "video")


def choice(ours: Any, theirs: Any) -> Callable[..., Any]:
    """What makes a part of a processor: ours where the engine's rows come from the encoder. Its first
    argument is vLLM's context or ProcessingInfo."""

    def make(first: Any, *rest: Any, **named: Any) -> Any:
        context = getattr(first, "ctx", first)
        return (ours if is_marked(context.get_mm_config()) else theirs)(first, *rest, **named)

    return make


def qwen_factories(parent: Any) -> tuple[Any, Any, Any]:
    """Of processor, ProcessingInfo (the parent, or ours) and dummy inputs of a Qwen family."""
    return (
        choice(Qwen3VLFileProcessor, qwen3_vl.Qwen3VLMultiModalProcessor),
        choice(_file_info(parent), parent),
        choice(FileDummyInputsBuilder, qwen3_vl.Qwen3VLDummyInputsBuilder),
    )


def _file_info(parent: Any) -> type:
    """vLLM's ProcessingInfo, for files."""

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
        self, *, width: int, height: int, num_images: int, overrides: Any = None
    ) -> list[ImageFile]:
        if overrides is not None:
            width = min(width, overrides.width or width)
            height = min(height, overrides.height or height)
        return [ImageFile(b"", width, height)] * num_images

    def _get_dummy_videos(
        self, *, width: int, height: int, num_frames: int, num_videos: int, overrides: Any = None
    ) -> list[ClipFile]:
        """As vLLM calls it: overrides are in the sizes already, which are whole patches."""
        config = self.info.get_hf_config().vision_config
        depth = -(-num_frames // config.temporal_patch_size)
        grid = Grid(depth, height // config.patch_size, width // config.patch_size)
        return [ClipFile(b"", grid=grid, patch_times_s=(0.0,) * depth)] * num_videos


class Qwen3VLFileProcessor(qwen3_vl.Qwen3VLMultiModalProcessor):  # type: ignore[misc]
    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        images = mm_items["image"].get_all() if "image" in mm_items else ()
        clips = mm_items["video"].get_all() if "video" in mm_items else ()
        fields: dict[str, Any] = {}
        if images:
            found = [self._image_fields(image, hf_kwargs) for image in images]
            fields["image_grid_thw"] = torch.tensor([grid for grid, _ in found])
            fields[FILE_FIELD] = [file for _, file in found]
        if clips:
            found_clips = [self._clip_fields(clip, hf_kwargs) for clip in clips]
            fields["video_grid_thw"] = torch.tensor([grid for grid, _, _ in found_clips])
            fields["timestamps"] = [times_s for _, times_s, _ in found_clips]
            fields[CLIP_FIELD] = [file for _, _, file in found_clips]
        return BatchFeature(fields)

    def _image_fields(
        self, image: ImageFile | Decoded, hf_kwargs: Mapping[str, object]
    ) -> tuple[list[int], torch.Tensor]:
        """Grid and file."""
        if isinstance(image, Decoded):
            found = self._prepared({"image": ImageProcessorItems([image.media])}, hf_kwargs)
            grid = Grid(*found["image_grid_thw"][0].tolist())
            return list(grid), pixel_tensor(found["pixel_values"], grid, Modality.IMAGE)
        options = self._image_options(hf_kwargs)
        return self._image_grid(image, hf_kwargs), request_tensor(image, Modality.IMAGE, options)

    def _clip_fields(
        self, clip: ClipFile | Decoded, hf_kwargs: Mapping[str, object]
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """Grid, times of the temporal patches, and file."""
        if isinstance(clip, Decoded):
            found = self._prepared({"video": VideoProcessorItems([clip.media])}, hf_kwargs)
            grid = Grid(*found["video_grid_thw"][0].tolist())
            times_s = list(map(float, found["timestamps"][0]))
            return list(grid), times_s, pixel_tensor(found["pixel_values_videos"], grid, Modality.VIDEO)
        self._check_clip_options(hf_kwargs)
        return (
            list(clip.grid),
            list(clip.patch_times_s),
            request_tensor(clip, Modality.VIDEO, clip.options),
        )

    def _prepared(self, items: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        """What vLLM's own processor makes of one item, normalised, as the encoder takes pixels."""
        scopes: dict[str, Any] = {
            name: hf_kwargs.get(name) or {} for name in ("images_kwargs", "videos_kwargs")
        }
        # Within a scope, as vLLM turns them off outside.
        normalised = {name: {**scope, **dict.fromkeys(VLLMS_OWN, True)} for name, scope in scopes.items()}
        return super()._apply_hf_processor_main(MultiModalDataItems(items), {**hf_kwargs, **normalised})

    def _image_options(self, hf_kwargs: Mapping[str, object]) -> PreprocessOptions:
        """Raises ValueError for options that the encoder has not."""
        options = self._options("images_kwargs", hf_kwargs)
        unknown = set(options) - SIZE_OPTIONS
        if unknown:
            raise ValueError(
                f"mm_processor_kwargs has {sorted(unknown)}, the encoder takes {sorted(SIZE_OPTIONS)}"
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
        """A clip's frames are decided before vLLM's processor sees it. Raises ValueError for options that
        would decide otherwise."""
        configured, asked = self._options("videos_kwargs", {}), self._options("videos_kwargs", hf_kwargs)
        unknown = set(configured) - SIZE_OPTIONS
        if unknown:
            raise ValueError(
                f"--mm-processor-kwargs has {sorted(unknown)} for clips, the encoder takes "
                f"{sorted(SIZE_OPTIONS)}; {list(SAMPLING)} go into media_io_kwargs"
            )
        if asked != configured:
            changed = sorted(name for name in asked if asked[name] != configured.get(name))
            raise ValueError(
                f"mm_processor_kwargs of a request with clips has {changed}: give sizes at the start, by "
                f"--mm-processor-kwargs, and {list(SAMPLING)} in media_io_kwargs"
            )

    def _options(self, scope: str, hf_kwargs: Mapping[str, object]) -> dict[str, Any]:
        """Those of the start and of the request that are for media of this scope."""
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
