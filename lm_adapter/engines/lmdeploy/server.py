"""What is replaced in the API server's process.

Owns what ends a start that would serve images by LMDeploy's own tower or not at all, and how long rows are
kept for the engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from lmdeploy.metrics.metrics_processor import metrics_processor
from lmdeploy.pytorch.engine.mp_engine.base import MPEngineInstance
from lmdeploy.serve.core.async_engine import AsyncEngine
from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
from lmdeploy.serve.processors import multimodal
from lmdeploy.vl import engine as vl_engine

from lm_adapter.engines.lmdeploy.encoder import RowEncoder, check_model
from lm_adapter.engines.lmdeploy.interfaces import logger
from lm_adapter.engines.lmdeploy.media import FileMediaIO, refuse_media
from lm_adapter.engines.lmdeploy.settings import Settings
from lm_adapter.engines.shared.first_contact import start_of
from lm_adapter.errors import InvalidRequest


def _with_an_encoder(stock: Any) -> Any:
    @functools.wraps(stock)
    def __init__(self: Any, model_path: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with start_of(Settings.ENGINE, logger):
            if not isinstance(getattr(self, "vl_encoder", None), RowEncoder):
                check_model(model_path, kwargs.get("trust_remote_code", False))
                raise InvalidRequest(
                    "--language-model-only refuses images: start LMDeploy without it, the plugin leaves the "
                    "tower out by itself"
                )
        stock(self, model_path, *args, **kwargs)

    return __init__


def _with_checked_prompts(stock: Any) -> Any:
    @functools.wraps(stock)
    async def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = await stock(self, *args, **kwargs)
        if not request.inputs.get("multimodal"):
            try:
                self.vl_encoder.check_text(request.inputs["input_ids"])
            except ValueError as error:
                self.session_mgr.remove(request.session)
                metrics_processor.increase_total_requests()
                metrics_processor.increase_failed_requests("error")
                raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from error
        return request

    return preprocess


def _with_checked_ids(stock: Any) -> Any:
    """Of what is scored, which ``preprocess`` does not see: a prompt, or a list of prompts."""

    @functools.wraps(stock)
    async def scored(self: Any, input_ids: list[Any], *args: Any, **kwargs: Any) -> Any:
        for ids in input_ids if input_ids and isinstance(input_ids[0], list) else [input_ids]:
            self.vl_encoder.check_text(ids)
        return await stock(self, input_ids, *args, **kwargs)

    return scored


def _keeping_rows(stock: Any) -> Any:
    @functools.wraps(stock)
    async def async_stream_infer(self: Any, session_id: int, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """LMDeploy drops a request once it is pickled. Here its rows stay until the first token, by which the
        engine's process has taken them, and they have left the GPU."""
        kept = [kwargs.get("multimodal")]
        outputs = stock(self, session_id, *args, **kwargs)
        kwargs.clear()
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                kept.clear()
                yield output

    return async_stream_infer


def install() -> None:
    multimodal.ImageMediaIO = FileMediaIO
    for name in ("VideoMediaIO", "AudioMediaIO", "TimeSeriesMediaIO"):
        setattr(multimodal, name, refuse_media)
    vl_engine.ImageEncoder = RowEncoder
    AsyncEngine.__init__ = _with_an_encoder(AsyncEngine.__init__)
    AsyncEngine.preprocess = _with_checked_prompts(AsyncEngine.preprocess)
    AsyncEngine.async_get_ppl = _with_checked_ids(AsyncEngine.async_get_ppl)
    MPEngineInstance.async_stream_infer = _keeping_rows(MPEngineInstance.async_stream_infer)
