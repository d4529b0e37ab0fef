"""LMDeploy's image encoder, fed by the service.

Replaces decoding and the reference processor. LMDeploy prepares the images of all requests on one thread;
here they are encoded at the same time. Owns the answer to a client whose image has no rows. Computes the grid
from the size in the file's header, by the reference's rule; the grid of the encoder's rows has to be equal.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from lmdeploy.archs import get_model_arch
from lmdeploy.pytorch.config import _update_torch_dtype
from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
from lmdeploy.utils import _get_and_verify_max_len
from lmdeploy.vl.constants import Modality
from lmdeploy.vl.engine import ImageEncoder

from lm_adapter.engines.lmdeploy.interfaces import logger
from lm_adapter.engines.lmdeploy.module_map import CUSTOM_MODULE_MAP
from lm_adapter.engines.lmdeploy.orders import HeldRows, RowOrders
from lm_adapter.engines.lmdeploy.settings import Settings
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.engines.shared.error_text import message_of, status_of
from lm_adapter.engines.shared.first_contact import start_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.grid_rule import grid_rule
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.prompt import ImagePrompt
from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.items import Grid

NUM_THREADS = 4
"""Of those that read files. LMDeploy's own threads may all wait for downloads."""
CODES = {400: ErrorCode.INVALID_REQUEST, 503: ErrorCode.ENGINE_UNAVAILABLE}
"""LMDeploy's code for a status; it decides what kind of error a client sees."""


def check_model(model_path: str, trust_remote_code: bool) -> None:
    """Raises InvalidRequest for a model whose rows no encoder has."""
    architecture, _ = get_model_arch(model_path, trust_remote_code=trust_remote_code)
    if architecture not in CUSTOM_MODULE_MAP:
        raise InvalidRequest(
            f"the model is a {architecture}, image rows are for {', '.join(CUSTOM_MODULE_MAP)}: serve it "
            "without this plugin (lmdeploy serve)"
        )


class RowEncoder(ImageEncoder):  # type: ignore[misc]
    """LMDeploy creates one in its API server's process."""

    @start_of(Settings.ENGINE, logger)
    def __init__(
        self,
        model_path: str,
        backend: str,
        vision_config: Any = None,
        backend_config: Any = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Raises InvalidRequest for settings and models that cannot work, and as ``check_encoder``."""
        settings = Settings.of_variable(os.environ)
        check_model(model_path, trust_remote_code)
        if backend != "pytorch":
            raise InvalidRequest(
                f"the backend is {backend}, which takes no rows with M-RoPE positions: set "
                "--backend pytorch, or give pipeline() a PytorchEngineConfig"
            )
        if backend_config is not None and backend_config.mp_engine_backend == "ray":
            raise InvalidRequest(
                "mp_engine_backend is 'ray', by which the engine may be on another machine: set 'mp'"
            )
        super().__init__(model_path, backend, vision_config, backend_config, trust_remote_code)
        config, processor = self.model.hf_config, self.model.processor
        length = getattr(backend_config, "session_len", None)
        self._max_tokens = length or _get_and_verify_max_len(config, None)
        self._num_ids = config.get_text_config().vocab_size
        self._interface = vision_interface(config.to_dict())
        self._grid_of = grid_rule(self._interface, config, processor)
        self._tokenizer = processor.tokenizer
        dtype = getattr(backend_config, "dtype", "auto")
        model_config = _update_torch_dtype(SimpleNamespace(hf_config=config), dtype)
        geometry = Geometry.of_model(model_config, check_finite=settings.finite)
        self._rows = RowOrders(settings, geometry, logger)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "image rows")
        weakref.finalize(self, self._rows.close)

    async def preprocess(
        self,
        messages: list[dict[str, Any]],
        input_prompt: str | list[int] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A request's ids with placeholders, and its images for the engine. Raises ValueError, which LMDeploy
        answers with 400, and RequestError, which it answers with the error's status."""
        if mm_processor_kwargs:
            raise ValueError(
                f"mm_processor_kwargs has {sorted(mm_processor_kwargs)}: the encoder's settings decide"
            )
        loop = asyncio.get_running_loop()
        media = self.model.collect_multimodal_items(messages)
        images = await asyncio.gather(
            *(loop.run_in_executor(self._threads, _image_file, *item) for item in media)
        )
        grids = [self._grid_of(image) for image in images]
        try:
            prompt, held = await self._hold(images, grids, input_prompt)
        except EncoderError as error:
            # Its frames refer to it, and would keep the images until the next collection of garbage.
            raise _rejection(error) from error.with_traceback(None)
        multimodal = [
            {
                "modality": Modality.IMAGE,
                "pixel_values": handle,
                "grid_thw": torch.tensor(grid),
                "offset": (first, last + 1),
                "image_token_id": self._interface.image_placeholder_id,
                "content_hash": order.key.hex(),
            }
            for handle, order, grid, (first, last) in zip(
                held.handles(), held.orders, grids, prompt.offsets, strict=True
            )
        ]
        return {"input_ids": prompt.ids, "multimodal": multimodal}

    def check_text(self, ids: Sequence[int]) -> None:
        """Raises ValueError for a prompt without images that has a placeholder, for which LMDeploy would take
        rows of another request in the same batch, or an id beyond the vocabulary. Both may end its engine."""
        self._check_ids(ids)
        placeholder_id = self._interface.image_placeholder_id
        if placeholder_id in ids:
            num_placeholders = list(ids).count(placeholder_id)
            raise ValueError(f"the prompt has {num_placeholders} image placeholders and no image")

    async def _hold(
        self, images: Sequence[ImageFile], grids: Sequence[Grid], input_prompt: str | list[int] | None
    ) -> tuple[ImagePrompt, HeldRows]:
        """The prompt, and as ``RowOrders.hold``. A text is tokenized while the images are encoded."""
        if not isinstance(input_prompt, str):
            prompt = self._prompt(input_prompt or (), grids)
            return prompt, await self._rows.hold(images, grids)
        held = asyncio.create_task(self._rows.hold(images, grids))
        try:
            # On one thread: two that use a tokenizer at once may fail.
            loop = asyncio.get_running_loop()
            tokenized = await loop.run_in_executor(self.executor, self._tokenizer, input_prompt)
            prompt = self._prompt(tokenized["input_ids"], grids)
            return prompt, await held
        except BaseException:
            # What it raises all the same is of a request that is refused already.
            held.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            held.cancel()
            raise

    def _prompt(self, ids: Sequence[int], grids: Sequence[Grid]) -> ImagePrompt:
        """Raises ValueError where ids and images cannot be aligned."""
        self._check_ids(ids)
        try:
            prompt = ImagePrompt.of(ids, grids, self._interface)
        except InvalidRequest as error:
            # Unlike the encoder's own refusals, which are EncoderErrors too.
            raise ValueError(error.message) from error
        self._check_length(len(prompt.ids))
        return prompt

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._num_ids:
            raise ValueError(
                f"the prompt has ids from {min(ids)} to {max(ids)}, the model has 0 to {self._num_ids - 1}"
            )

    def _check_length(self, num_tokens: int) -> None:
        """LMDeploy would refuse the request after the encode."""
        if num_tokens >= self._max_tokens:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {num_tokens} tokens with its images, less than {self._max_tokens} are taken",
            )


def _image_file(modality: Any, data: Any, _params: Any) -> ImageFile:
    """Raises ValueError for what is no image."""
    if modality != Modality.IMAGE:
        raise ValueError(f"{modality} is not accepted: images in messages of a user or a tool are")
    return data if isinstance(data, ImageFile) else ImageFile.of_pixels(data)


def _rejection(error: EncoderError) -> RequestError:
    logger.warning("a request is rejected: %s", message_of(error))
    status = status_of(error)
    rejection = RequestError(CODES.get(status, ErrorCode.INTERNAL_ERROR), message_of(error))
    rejection.status_code = status
    return rejection
