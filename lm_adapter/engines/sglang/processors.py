"""SGLang's multimodal processor, fed by the service, for every family; other vision models are refused.

Replaces decoding and the reference processor in SGLang's tokenizer process. Owns the answer to a client whose
image has no rows. Computes the grid from the size in the file's header, by the reference's rule; the grid of
the encoder's rows has to be equal.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

import sglang
import torch
from fastapi import HTTPException
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.cache import snapshot_media
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor, MultimodalSpecialTokens
from sglang.srt.utils.common import CLIENT_MEDIA_EXCEPTIONS, ImageData

from lm_adapter.engines.sglang.families import LING, SERVED, image_marks, served_classes
from lm_adapter.engines.sglang.prompt import with_image_sizes, with_line_breaks, with_placeholders
from lm_adapter.engines.sglang.settings import LOADERS, Settings, check_loaded
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.engines.shared.error_text import message_of, status_of
from lm_adapter.engines.shared.first_contact import start_of
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.grid_rule import grid_rule
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.prompt import ImagePrompt
from lm_adapter.engines.shared.rows import RowReader
from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.types import EncodedRows

logger = logging.getLogger("sglang.vision_encoder")

SGLANG_VERSION = "0.5.23"
FROM_ENCODER = "image rows come from the encoder"


class FileProcessor(BaseMultimodalProcessor):  # type: ignore[misc]
    """SGLang creates one in its tokenizer process, for a model of ``models``."""

    models = served_classes()
    generates_input_ids_from_raw_prompt = True

    @start_of(Settings.ENGINE, logger)
    def __init__(self, hf_config: Any, server_args: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
        """Raises InvalidRequest for settings that cannot work, and as ``check_encoder``."""
        check_loaded(os.environ)
        settings = Settings.of_variable(os.environ)
        if sglang.__version__ != SGLANG_VERSION:
            logger.warning("SGLang is %s, this plugin is for %s", sglang.__version__, SGLANG_VERSION)
        super().__init__(hf_config, server_args, processor, *args, **kwargs)
        if self.image_config:
            raise InvalidRequest(
                f"--mm-process-config has {self.image_config} for images: the encoder's settings decide"
            )
        self._interface = vision_interface(hf_config.to_dict())
        self._grid_of = grid_rule(self._interface, hf_config, processor)
        self._placeholder = self._tokenizer.convert_ids_to_tokens(self._interface.image_placeholder_id)
        self._image_text = self._placeholder.join(image_marks(self._interface.model_type))
        self.mm_tokens = MultimodalSpecialTokens(
            image_token=self._placeholder, image_token_id=self._interface.image_placeholder_id
        ).build(processor)
        geometry = Geometry.of_model(ModelConfig.from_server_args(server_args), check_finite=settings.finite)
        gpu = server_args.base_gpu_id if self.use_cuda_ipc else None
        self._rows = RowReader(
            settings, geometry, logger, gpu=gpu, remedy="set --mm-feature-transport cuda_ipc"
        )

    def shutdown(self) -> None:
        self._rows.close()
        super().shutdown()

    async def process_mm_data_async(
        self,
        image_data: Any,
        input_text: Any,
        request_obj: Any,
        *_args: Any,
        max_req_input_len: int | None = None,
        **_kwargs: Any,
    ) -> MultimodalProcessorOutput:
        """max_req_input_len: SGLang's scheduler rejects prompts with this many tokens. Raises ValueError,
        which SGLang answers with 400, and HTTPException, which it answers with the exception's status."""
        for name in ("video_data", "audio_data", "mm_hashes"):
            if getattr(request_obj, name, None):
                raise ValueError(
                    f"{name} is not accepted: the encoder takes images here, and identifies them"
                )
        loop = asyncio.get_running_loop()
        sources = image_data or ()
        hashes = getattr(request_obj, "mm_content_hashes", None) or [None] * len(sources)
        images = await asyncio.gather(
            *(
                loop.run_in_executor(self.io_executor, image_file, source, content_hash)
                for source, content_hash in zip(sources, hashes, strict=True)
            )
        )
        grids = [self._grid_of(image) for image in images]
        ids, pad = self._prompt_ids(input_text), self._interface.image_placeholder_id
        if self._interface.model_type == "kimi_k3":
            ids = with_image_sizes(ids, images, pad, self._tokenizer)
        elif self._interface.model_type == LING:
            ids = with_line_breaks(ids, pad, self._image_text, len(images), self._tokenizer)
        prompt = ImagePrompt.of(ids, grids, self._interface)
        if max_req_input_len is not None and len(prompt.ids) >= max_req_input_len:
            raise ValueError(
                f"the prompt has {len(prompt.ids)} tokens with its images, less than {max_req_input_len} "
                "are taken"
            )
        num_samples = (getattr(request_obj, "sampling_params", None) or {}).get("n", 1)
        try:
            async with self._rows.read(images, grids) as rows:
                return self._output(prompt, rows, num_samples)
        except EncoderError as error:
            logger.warning("request %s is rejected: %s", getattr(request_obj, "rid", ""), message_of(error))
            # Its frames refer to it, and would keep the images until the next collection of garbage.
            raise _rejection(request_obj, error) from error.with_traceback(None)

    def _prompt_ids(self, input_text: Any) -> list[int]:
        if not isinstance(input_text, str):
            return list(input_text)
        text = with_placeholders(input_text, self._placeholder, self._image_text)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def _output(
        self, prompt: ImagePrompt, rows: list[EncodedRows], num_samples: int
    ) -> MultimodalProcessorOutput:
        items = [_item(offset, encoded) for offset, encoded in zip(prompt.offsets, rows, strict=True)]
        if num_samples > 1:
            # SGLang sends these items once for each sample, but its pool in device memory frees them after
            # the first sample. Rows on the host do not enter the pool.
            for item in items:
                item.precomputed_embeddings = item.precomputed_embeddings.cpu()
        positions = prompt.positions
        return MultimodalProcessorOutput(
            input_ids=prompt.ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(prompt.ids, items),
            # Rows travel to the scheduler's process in SGLang's pool in device memory, else in host memory.
            mm_items=self._prepare_mm_items_for_transport(items),
            im_token_id=self._interface.image_placeholder_id,
            mrope_positions=None if positions is None else torch.from_numpy(positions.prompt),
            mrope_position_delta=None if positions is None else torch.tensor([[positions.delta]]),
        )


class _OtherModels:
    """SGLang's models that have another processor. Looked up at each iteration, because SGLang also imports
    this module before it registers its processors."""

    def __iter__(self) -> Iterator[type]:
        return iter([model for model in PROCESSOR_MAPPING if model.__name__ not in SERVED])


class RefusingProcessor(BaseMultimodalProcessor):  # type: ignore[misc]
    """Replaces SGLang's processor of every other model, by which SGLang would run that model's own tower and
    ask no encoder."""

    models = _OtherModels()

    @start_of(Settings.ENGINE, logger)
    def __init__(self, hf_config: Any, *_args: Any, **_kwargs: Any) -> None:
        raise InvalidRequest(
            f"the model is a {' or '.join(hf_config.architectures)}, image rows are for "
            f"{', '.join(SERVED)}: serve it without this plugin ("
            f"{' and '.join(LOADERS)} unset)"
        )

    async def process_mm_data_async(self, *_args: Any, **_kwargs: Any) -> MultimodalProcessorOutput:
        raise NotImplementedError


def _rejection(request_obj: Any, error: EncoderError) -> Exception:
    """The exception by which SGLang answers with the error's status.

    SGLang turns an HTTPException into an answer with its status, except for a stream of its own API: this has
    been answered with 200, and only a ValueError becomes its last event. All other requests get an
    HTTPException, because the OpenAI API answers any ValueError with 400."""
    # Only SGLang's own API leaves ``received_time`` empty; requests for embeddings have no ``stream``.
    is_own_stream = getattr(request_obj, "stream", False) and request_obj.received_time is None
    if not is_own_stream:
        return HTTPException(status_of(error), message_of(error))
    event = ValueError(message_of(error))
    event.status_code = status_of(error)  # type: ignore[attr-defined]
    return event


def _item(offset: tuple[int, int], rows: EncodedRows) -> MultimodalDataItem:
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[offset],
        precomputed_embeddings=rows.torch(),
        model_specific_data={"image_grid_thw": torch.tensor([list(rows.grid_thw)])},
    )
    # SGLang hashes the embedding key to four ids of 62 bits, which tell images apart in its prefix cache.
    item.set_identity(rows.key)
    return item


def image_file(data: Any, content_hash: str | None = None) -> ImageFile:
    """Loads an image in any form SGLang accepts. content_hash: the client's, in SGLang's form. Raises
    ValueError if it is not an image, if it has another hash, and for rows that a client computed itself."""
    if isinstance(data, dict) and "format" in data:
        raise ValueError(f"{data['format']} is not accepted: {FROM_ENCODER}")
    if content_hash is None and not isinstance(data, str | bytes | dict | ImageData):
        return ImageFile.of_pixels(data)
    try:
        snapshot = snapshot_media(data)
    except (*CLIENT_MEDIA_EXCEPTIONS, OSError, TypeError) as error:
        raise ValueError(f"Failed to load image: {error}") from error
    if content_hash not in (None, snapshot.content_digest):
        raise ValueError(f"content_hash is {content_hash}, the image's is {snapshot.content_digest}")
    content = snapshot.data
    return ImageFile.read(content) if isinstance(content, bytes) else ImageFile.of_pixels(content)
