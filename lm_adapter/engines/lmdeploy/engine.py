"""What is replaced in the engine's process: requests get their rows there, models are built without towers.

A request whose rows are gone fails alone, before LMDeploy's scheduler knows it. Nothing here raises into the
engine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lmdeploy.messages import EngineOutput, ResponseType
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.engine.engine_instance import EngineInstance

from lm_adapter.engines.lmdeploy import module_map
from lm_adapter.engines.lmdeploy.rows_file import RowsHandle

logger = logging.getLogger("lmdeploy.vision_encoder")


def with_rows(items: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A request's images, with rows in place of their handles. Raises OSError for rows that are gone."""
    if items is None:
        return None
    return [
        {name: value.open() if isinstance(value, RowsHandle) else value for name, value in item.items()}
        for item in items
    ]


def _reading_rows(stock: Any) -> Any:
    @functools.wraps(stock)
    async def async_stream_infer(
        self: Any,
        session_id: int,
        input_ids: list[int],
        gen_config: Any = None,
        multimodal: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        try:
            multimodal = with_rows(multimodal)
        except (OSError, ValueError) as error:
            # As usual after a client has left: then the API server has freed the rows.
            logger.warning("session %d ends, its rows cannot be read: %s", session_id, error)
            yield EngineOutput(ResponseType.INTERNAL_ENGINE_ERROR, [])
            return
        outputs = stock(self, session_id, input_ids, gen_config, multimodal, **kwargs)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    return async_stream_infer


def _without_towers(stock: Any) -> Any:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = stock.__func__(cls, *args, **kwargs)
        # LMDeploy's own option for it, PytorchEngineConfig.custom_module_map, does not arrive here.
        config.custom_module_map = str(Path(module_map.__file__))
        return config

    return classmethod(from_pretrained)


def install() -> None:
    EngineInstance.async_stream_infer = _reading_rows(EngineInstance.async_stream_infer)
    ModelConfig.from_pretrained = _without_towers(ModelConfig.from_pretrained)
