"""What the plugin does in vLLM's API server, beside the processor: settings, media, and the first call.

Owns the hook by which vLLM's configuration reaches the plugin, the checks that stop a start, the media
connector that keeps files undecoded, and the ``Prefetch`` by which an encode starts while vLLM still
tokenises. An image waits for nothing here; a clip's request waits for the encoder's answer to it, which says
the clip's frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pybase64
from vllm import envs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import Qwen3VLVideoBackend

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.calls import EncoderCalls
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.reasons import message_of, status_of
from lm_adapter.engines.vllm.api_server.clips import ClipFile, sampling_of
from lm_adapter.engines.vllm.failures import vllm_error
from lm_adapter.engines.vllm.settings import Settings, given_sizes, has_connector, mark
from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.items import ImageItem, PreprocessOptions

logger = logging.getLogger("vllm.vision_encoder")

MEDIA_CONNECTOR = "vision_encoder"
MAX_UNANSWERED = 256
"""Prefetches under way. Those above are left out: the scheduler asks for each image anyway."""

VLLMS_OWN = {"do_normalize", "do_rescale"}
"""Options that vLLM sets for towers that normalise by themselves."""
WITHOUT_CLIPS = {"KimiK25ForConditionalGeneration"}
"""vLLM 0.32 looks for ``split_video_chunks`` in their processors, which none of them has."""


@dataclass(frozen=True)
class Configured:
    """The engine that this process was configured for. announces_images: else each image's key is another
    one, which only the processor knows. geometry, max_tokens: of the model. clip_sizes: options of clips, by
    their names at the encoder; None where vLLM takes no clips."""

    settings: Settings
    geometry: Geometry
    max_tokens: int
    announces_images: bool
    clip_sizes: Mapping[str, int] | None


_configured: Configured | None = None
"""None before, and for engines without this connector."""


def hook_config(architecture: str) -> None:
    """Has ``configure`` called with the configuration of every engine of this architecture."""
    as_it_was = MODELS_CONFIG_MAP.get(architecture)
    if getattr(as_it_was, "is_vision_encoder", False):
        return

    class Hook:
        is_vision_encoder = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if as_it_was is not None:
                as_it_was.verify_and_update_config(vllm_config)
            configure(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if as_it_was is not None:
                as_it_was.verify_and_update_model_config(model_config)

    MODELS_CONFIG_MAP[architecture] = Hook


def configure(vllm_config: Any) -> None:
    """Called in the process that makes the configuration: an API server, or an offline ``LLM``. Raises
    InvalidRequest for what cannot work together."""
    global _configured
    if not has_connector(vllm_config):
        if os.environ.get("VLLM_MEDIA_CONNECTOR") == MEDIA_CONNECTOR:
            # Of an earlier engine in this process.
            del os.environ["VLLM_MEDIA_CONNECTOR"]
        return
    settings = Settings.read(vllm_config.ec_transfer_config.ec_connector_extra_config)
    mm_config = vllm_config.model_config.get_multimodal_config()
    if mm_config.mm_processor_cache_type == "shm":
        raise InvalidRequest(
            "--mm-processor-cache-type is shm, which hides files from the scheduler: use lru"
        )
    if mm_config.is_multimodal_pruning_enabled():
        raise InvalidRequest("video pruning is on, and the encoder gives the rows of whole clips")
    if getattr(vllm_config.compilation_config, "cudagraph_mm_encoder", False):
        raise InvalidRequest("cudagraph_mm_encoder is on, and there is no vision tower to capture")
    given = os.environ.get("VLLM_MEDIA_CONNECTOR", MEDIA_CONNECTOR)
    if given not in (MEDIA_CONNECTOR, "http"):
        raise InvalidRequest(f"VLLM_MEDIA_CONNECTOR is {given}, this plugin has its own, {MEDIA_CONNECTOR}")
    os.environ["VLLM_MEDIA_CONNECTOR"] = MEDIA_CONNECTOR
    mark(mm_config)
    options = mm_config.mm_processor_kwargs or {}
    _configured = Configured(
        settings,
        Geometry.of_model(vllm_config.model_config),
        vllm_config.model_config.max_model_len,
        announces_images=not set(options) - VLLMS_OWN,
        clip_sizes=None if vllm_config.model_config.architecture in WITHOUT_CLIPS else _clip_sizes(options),
    )


def _clip_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """As vLLM resolves ``--mm-processor-kwargs``: those of videos alone come before those of all media."""
    return given_sizes({**options, **(options.get("videos_kwargs") or {})})


class ImageFileIO(ImageMediaIO):  # type: ignore[misc]
    """In place of vLLM's decoder: the same limits, and the file as it is."""

    def load_bytes(self, data: bytes) -> Any:
        image = ImageFile.read(data, envs.VLLM_MAX_IMAGE_PIXELS)
        return MediaWithBytes(replace(image, is_announced=_prefetch(image)), data)

    def load_base64(self, media_type: str, data: str) -> Any:
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Any:
        return self.load_bytes(filepath.read_bytes())


class ClipFileIO(MediaIO[Any]):  # type: ignore[misc]
    """In place of vLLM's decoder: the file as it is. A sequence of JPEG files is decoded by vLLM."""

    def __init__(self, sizes: Mapping[str, int], sampling: Mapping[str, Any]) -> None:
        """sampling: ``media_io_kwargs`` of clips."""
        self._sizes = sizes
        self._sampling = sampling

    def load_bytes(self, data: bytes) -> ClipFile:
        """Raises ValueError for options that the encoder has not."""
        sampling = sampling_of(
            self._sampling,
            max_fps=Qwen3VLVideoBackend._MAX_FPS,
            max_frames=Qwen3VLVideoBackend._MAX_FRAMES,
        )
        return ClipFile.read(data, PreprocessOptions(**self._sizes, **sampling))

    def load_base64(self, media_type: str, data: str) -> Any:
        if media_type.lower() == "video/jpeg":
            return VideoMediaIO(ImageMediaIO(), **self._sampling).load_base64(media_type, data)
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> ClipFile:
        return self.load_bytes(filepath.read_bytes())


class FileMediaConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's own way to the bytes, with its domains, paths, redirects, sizes and timeouts."""

    def _image_io(self) -> MediaIO[Any]:
        given = self.media_io_kwargs.get("image", {})
        if given not in ({}, {"image_mode": "RGB"}):
            raise ValueError(
                f"media_io_kwargs of images are {given}, which the encoder decides by its settings"
            )
        return ImageFileIO()

    def fetch_image(self, image_url: str, **_: Any) -> Any:
        return self.load_from_url(image_url, self._image_io(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT)

    async def fetch_image_async(self, image_url: str, **_: Any) -> Any:
        return await self.load_from_url_async(
            image_url, self._image_io(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )

    def _clip_io(self) -> ClipFileIO:
        sizes = None if _configured is None else _configured.clip_sizes
        if sizes is None:
            raise ValueError("vLLM takes no video with this model")
        return ClipFileIO(sizes, self.media_io_kwargs.get("video", {}))

    def fetch_video(self, video_url: str, **_: Any) -> Any:
        clip = self.load_from_url(video_url, self._clip_io(), fetch_timeout=envs.VLLM_VIDEO_FETCH_TIMEOUT)
        return _announced(_announce(clip).result()) if isinstance(clip, ClipFile) else clip

    async def fetch_video_async(self, video_url: str, **_: Any) -> Any:
        clip = await self.load_from_url_async(
            video_url, self._clip_io(), fetch_timeout=envs.VLLM_VIDEO_FETCH_TIMEOUT
        )
        if not isinstance(clip, ClipFile):
            return clip
        return _announced(await asyncio.wrap_future(_announce(clip)))


def register_media() -> None:
    MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)(FileMediaConnector)


def _prefetch(image: ImageFile) -> bool:
    """Whether the file is being sent. What comes of it is not waited for: the scheduler finds that out."""
    if _configured is None or not _configured.announces_images:
        return False
    calls = _calls(_configured.settings)
    calls.ended.clear()
    if calls.num_under_way >= MAX_UNANSWERED:
        return False
    item = ImageItem(image.data, digest=image.digest)

    async def call(client: AsyncVisionEncoderClient, left_s: float) -> None:
        with contextlib.suppress(Exception):
            await client.prefetch([item], timeout_s=left_s)

    calls.start(object(), call)
    return True


def _announce(clip: ClipFile) -> Future[Any]:
    """Gets the clip with its grid and times, or an EncoderError, within the time limit of an item."""
    assert _configured is not None
    call = functools.partial(clip.announced, geometry=_configured.geometry, max_tokens=_configured.max_tokens)
    return _calls(_configured.settings).ask(call)


def _announced(outcome: Any) -> ClipFile:
    """Raises the failure as vLLM answers it."""
    if isinstance(outcome, EncoderError):
        message = message_of(outcome)
        logger.warning("a request is rejected, its clip cannot be had: %s", message)
        raise vllm_error(status_of(outcome), message) from outcome
    clip: ClipFile = outcome
    return clip


def _calls(settings: Settings) -> EncoderCalls:
    """One thread for each process that takes requests, in which several threads of vLLM read media."""
    with _calls_lock:
        return _new_calls(settings)


_calls_lock = threading.Lock()


@functools.cache
def _new_calls(settings: Settings) -> EncoderCalls:
    return EncoderCalls(settings, name="prefetch")
