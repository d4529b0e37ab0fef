"""vLLM's media connector for undecoded files.

Owns what replaces vLLM's decoders: an image's file with the facts of its header, and a clip's file. The code
that loads the bytes stays vLLM's own, with its rules for domains, paths, redirects, sizes and timeouts.
``server`` sends the files to the encoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pybase64
from vllm import envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import Qwen3VLVideoBackend

from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.vllm.api_server.clips import ClipFile, sampling_options
from lm_adapter.engines.vllm.api_server.server import MEDIA_CONNECTOR, ApiServer
from lm_adapter.items import PreprocessOptions


class ImageFileIO(ImageMediaIO):  # type: ignore[misc]
    """In place of vLLM's decoder: the same limits, and the file as it is."""

    def load_bytes(self, data: bytes) -> Any:
        """Raises ValueError for a file that is no image, or an image with too many pixels."""
        image = ImageFile.read(data)
        num_pixels, max_pixels = image.width * image.height, envs.VLLM_MAX_IMAGE_PIXELS
        if 0 < max_pixels < num_pixels:
            raise ValueError(
                f"Image dimensions {image.width}x{image.height} ({num_pixels} pixels) exceed the maximum of "
                f"{max_pixels} pixels. Set VLLM_MAX_IMAGE_PIXELS to increase this limit."
            )
        server = ApiServer.current
        is_announced = server is not None and server.prefetch(image)
        return MediaWithBytes(replace(image, is_announced=is_announced), data)

    def load_base64(self, media_type: str, data: str) -> Any:
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Any:
        return self.load_bytes(filepath.read_bytes())


class ClipFileIO(MediaIO[Any]):  # type: ignore[misc]
    """In place of vLLM's decoder: the file as it is. A sequence of JPEG files is decoded by vLLM."""

    def __init__(self, sizes: Mapping[str, int], sampling: Mapping[str, Any], decoded_budget: Any) -> None:
        """sizes: ``ApiServer.clip_sizes``. sampling: ``media_io_kwargs`` of clips. decoded_budget: vLLM's, of
        the request, for what vLLM decodes; None before vLLM 0.33."""
        self._sizes = sizes
        self._sampling = sampling
        self._decoded_budget = decoded_budget

    def load_bytes(self, data: bytes) -> ClipFile:
        """Raises ValueError for options that the encoder does not have."""
        sampling = sampling_options(
            self._sampling,
            max_fps=Qwen3VLVideoBackend._MAX_FPS,
            max_frames=Qwen3VLVideoBackend._MAX_FRAMES,
        )
        return ClipFile.read(data, PreprocessOptions(**self._sizes, **sampling))

    def load_base64(self, media_type: str, data: str) -> Any:
        if media_type.lower() == "video/jpeg":
            frames = ImageMediaIO(decoded_budget=self._decoded_budget)
            return VideoMediaIO(frames, **self._sampling).load_base64(media_type, data)
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> ClipFile:
        return self.load_bytes(filepath.read_bytes())


class FileMediaConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's connector, with this module's readers."""

    def _image_file_io(self) -> MediaIO[Any]:
        options = self.media_io_kwargs.get("image", {})
        if options not in ({}, {"image_mode": "RGB"}):
            raise ValueError(
                f"media_io_kwargs of images are {options}, which the encoder decides by its settings"
            )
        return ImageFileIO()

    def fetch_image(self, image_url: str, **_: Any) -> Any:
        return self.load_from_url(
            image_url, self._image_file_io(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )

    async def fetch_image_async(self, image_url: str, **_: Any) -> Any:
        return await self.load_from_url_async(
            image_url, self._image_file_io(), fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )

    def _server_for_clips(self) -> ApiServer:
        """Raises ValueError where vLLM takes no clips."""
        server = ApiServer.current
        if server is None or server.clip_sizes is None:
            raise ValueError("vLLM takes no video with this model")
        return server

    def _clip_io(self, server: ApiServer) -> ClipFileIO:
        assert server.clip_sizes is not None
        budget = getattr(self, "decoded_budget", None)
        return ClipFileIO(server.clip_sizes, self.media_io_kwargs.get("video", {}), budget)

    def fetch_video(self, video_url: str, **_: Any) -> Any:
        server = self._server_for_clips()
        clip = self.load_from_url(
            video_url, self._clip_io(server), fetch_timeout=envs.VLLM_VIDEO_FETCH_TIMEOUT
        )
        if not isinstance(clip, ClipFile):
            return clip
        return server.announced(server.announce(clip).result())

    async def fetch_video_async(self, video_url: str, **_: Any) -> Any:
        server = self._server_for_clips()
        clip = await self.load_from_url_async(
            video_url, self._clip_io(server), fetch_timeout=envs.VLLM_VIDEO_FETCH_TIMEOUT
        )
        if not isinstance(clip, ClipFile):
            return clip
        return server.announced(await asyncio.wrap_future(server.announce(clip)))


def register_media() -> None:
    MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)(FileMediaConnector)
