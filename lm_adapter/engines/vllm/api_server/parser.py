"""vLLM's data parser for undecoded files, and for pixels that the client has decoded.

Owns which forms of an image or a clip are accepted. Float arrays, and the frames of a clip, stay as they are
(``Decoded``): ``processor`` lets vLLM prepare them, and they go to the encoder in that form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.model_executor.models import qwen3_vl
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile

METADATA = {"fps", "frames_indices", "total_num_frames"}
"""What vLLM has to know of a decoded clip."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A float array or tensor of an image, or (frames, metadata) of a clip, as vLLM takes them."""

    media: object


class FileProcessorItems(ProcessorBatchItems[Any]):  # type: ignore[misc]
    """ImageFiles, ClipFiles or Decoded, or None for those that vLLM has in its cache under the client's
    uuid."""

    def get_item_for_hash(self, index: int) -> object:
        item = self.data[index]
        if isinstance(item, Decoded):
            return item.media
        if isinstance(item, ClipFile):
            return item.name
        return None if item is None else item.digest


def image_files(data: object, *, takes_floats: bool = False) -> list[ImageFile | Decoded | None]:
    """Converts vLLM's image inputs to files. takes_floats: pass float pixels through as Decoded (they cannot
    be a file). Raises ValueError for embeddings, which only the encoder makes here, and for pixels of another
    form."""
    if isinstance(data, dict) or (isinstance(data, torch.Tensor) and data.ndim == 3):
        raise ValueError("image_embeds are not accepted: image rows come from the encoder")
    is_batch = isinstance(data, list | tuple) or getattr(data, "ndim", 3) == 4
    images = list(cast("Iterable[object]", data)) if is_batch else [data]
    return [_image_file(image, takes_floats=takes_floats) for image in images]


def _image_file(image: object, *, takes_floats: bool) -> ImageFile | Decoded | None:
    if isinstance(image, MediaWithBytes):
        image = image.media if isinstance(image.media, ImageFile) else ImageFile.read(image.original_bytes)
    if image is None or isinstance(image, ImageFile | Decoded):
        # vLLM parses items again that its cache does not have.
        return image
    if isinstance(image, dict) or (isinstance(image, torch.Tensor) and image.ndim == 2):
        raise ValueError("image_embeds are not accepted: image rows come from the encoder")
    if takes_floats and "float" in str(getattr(image, "dtype", "")):
        return Decoded(image)
    return ImageFile.of_pixels(image)


def clip_files(data: object) -> list[ClipFile | Decoded | None]:
    """Converts vLLM's video inputs with metadata. Raises ValueError for frames without metadata, and for
    embeddings."""
    return [_clip_file(clip) for clip in (data if isinstance(data, list) else [data])]


def _clip_file(clip: object) -> ClipFile | Decoded | None:
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


class ImageFileParser(MultiModalDataParser):  # type: ignore[misc]
    """Of models that take images only."""

    def _parse_image_data(self, data: object) -> FileProcessorItems | None:
        return None if data is None else FileProcessorItems(image_files(data), "image")


class FileDataParser(qwen3_vl.Qwen3VLMultiModalDataParser):  # type: ignore[misc]
    def _parse_image_data(self, data: object) -> FileProcessorItems | None:
        return None if data is None else FileProcessorItems(image_files(data, takes_floats=True), "image")

    def _parse_video_data(self, data: object) -> FileProcessorItems | None:
        return None if data is None else FileProcessorItems(clip_files(data), "video")
