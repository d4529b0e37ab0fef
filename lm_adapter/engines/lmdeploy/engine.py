"""What is replaced in the engine's process: requests get their rows there, models are built without towers.

A request whose rows are gone fails alone, before LMDeploy's scheduler knows it. Nothing here raises into the
engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lmdeploy.messages import EngineOutput, ResponseType
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.engine import engine as lmdeploy_engine
from lmdeploy.pytorch.engine.engine_instance import EngineInstance
from lmdeploy.pytorch.engine.executor.uni_executor import UniExecutor

import lm_adapter
from lm_adapter.engines.lmdeploy import module_map
from lm_adapter.engines.lmdeploy.interfaces import logger
from lm_adapter.engines.lmdeploy.rank import Rank
from lm_adapter.engines.lmdeploy.settings import Settings
from lm_adapter.engines.shared.first_contact import start_of
from lm_adapter.errors import InvalidRequest

MODULE_MAP = str(Path(module_map.__file__))
"""The file by which each rank finds the model classes."""


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
        # Without a process of its own for the engine, these keep the rows.
        handles = [item["pixel_values"] for item in multimodal or ()]
        try:
            taken = [self.engine.executor.image_rows.take(handle) for handle in handles]
        except LookupError as error:
            # As usual after a client has left: then the API server has dropped the rows.
            logger.warning("session %d ends, it has no rows: %s", session_id, error)
            yield EngineOutput(ResponseType.INTERNAL_ENGINE_ERROR, [])
            return
        if multimodal is not None:
            multimodal = [item | {"pixel_values": rows} for item, rows in zip(multimodal, taken, strict=True)]
        outputs = stock(self, session_id, input_ids, gen_config, multimodal, **kwargs)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                # Those whose image the prefix cache had were in no step.
                while taken:
                    taken.pop().leave_gpu()
                handles.clear()
                yield output

    return async_stream_infer


def _naming_a_package_that_ranks_lack(stock: Any) -> Any:
    """Ranks in other processes import this package with the model. Ray raises their errors again, by their
    types."""

    @functools.wraps(stock)
    def build_model() -> None:
        with start_of(Settings.ENGINE, logger):
            try:
                stock()
            except (AssertionError, ModuleNotFoundError) as error:
                package = Path(lm_adapter.__file__).parent
                lacking = (f"No module named '{package.name}", f'"{MODULE_MAP}" not exists')
                if not any(text in str(error) for text in lacking):
                    raise
                raise InvalidRequest(
                    f"a rank has no {package.name} at {package}, where this process has it: install it so on "
                    "every node, for the Python of Ray's actors"
                ) from error

    return build_model


def _with_rank(stock: Any) -> Any:
    @functools.wraps(stock)
    def build_executor(*args: Any, **kwargs: Any) -> Any:
        executor = stock(*args, **kwargs)
        is_alone = isinstance(executor, UniExecutor)
        if not is_alone:
            executor.build_model = _naming_a_package_that_ranks_lack(executor.build_model)
        # The model is loaded later, and its KV cache gets a share of what is free then.
        with start_of(Settings.ENGINE, logger):
            executor.image_rows = Rank(executor.model_config, is_alone=is_alone)
        executor.release = _with_its_rank(executor.release, executor.image_rows)
        return executor

    return build_executor


def _with_its_rank(stock: Any, rank: Rank) -> Any:
    """LMDeploy's engine releases its executor when it ends, whatever ends it. Its process may live on."""

    @functools.wraps(stock)
    def release() -> None:
        try:
            rank.close()
        finally:
            stock()

    return release


def _without_towers(stock: Any) -> Any:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = stock.__func__(cls, *args, **kwargs)
        # LMDeploy's own option for it, PytorchEngineConfig.custom_module_map, does not arrive here.
        config.custom_module_map = MODULE_MAP
        return config

    return classmethod(from_pretrained)


def install() -> None:
    lmdeploy_engine.build_executor = _with_rank(lmdeploy_engine.build_executor)
    EngineInstance.async_stream_infer = _reading_rows(EngineInstance.async_stream_infer)
    ModelConfig.from_pretrained = _without_towers(ModelConfig.from_pretrained)
