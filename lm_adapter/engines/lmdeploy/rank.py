"""Rows in the engine's process: who reads them, and where they are until the request ends.

Owns the choice between GPU and host, made once at the start. ``shared.rank_reader`` reads and checks rows as
``orders`` says.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from lm_adapter.engines.lmdeploy.orders import RowsHandle
from lm_adapter.engines.lmdeploy.settings import SOCKET_VARIABLE, Settings
from lm_adapter.engines.shared.geometry import Geometry, TextModelConfig
from lm_adapter.engines.shared.rank_reader import RankReader
from lm_adapter.engines.shared.rows import MAX_ROWS_BYTES

logger = logging.getLogger("lmdeploy.vision_encoder")


class ImageRows:
    """An image's rows [num_rows, width], for as long as LMDeploy keeps its request. Those on a GPU leave it
    with the first step or token; LMDeploy needs them again if it preempts the request."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._moved: Any = None

    def to(self, device: str, *, non_blocking: bool = False) -> torch.Tensor:
        """For a step, on the current stream."""
        if self._moved is not None:
            torch.cuda.current_stream().wait_event(self._moved)
        rows = self._rows.to(device=device, non_blocking=non_blocking)
        self.leave_gpu()
        return rows

    def leave_gpu(self) -> None:
        """Begins the copy on the current stream. Can be repeated."""
        if not self._rows.is_cuda:
            return
        stream = torch.cuda.current_stream()
        # Allocated on the reader's stream.
        self._rows.record_stream(stream)
        try:
            self._rows = self._rows.to(device="cpu", non_blocking=True)
        except RuntimeError as error:
            # An error here would end LMDeploy's engine.
            logger.warning("image rows stay on the GPU, the host has no pinned memory: %s", error)
            return
        new_event: Any = torch.cuda.Event  # untyped in torch
        self._moved = new_event()
        self._moved.record(stream)


class Rank:
    """Reads rows until the engine ends."""

    def __init__(self, model_config: TextModelConfig, *, is_alone: bool) -> None:
        """is_alone: the model runs in this process, on one GPU. Raises InvalidRequest if ``transports`` has
        none that ends where rows have to go."""
        settings = Settings.of_variable(os.environ)
        device, reason = torch.device("cpu"), _why_host(settings, is_alone=is_alone)
        if not reason:
            device = torch.device("cuda")
        else:
            remedy = f"add host or inline in {settings.SOURCE}"
            settings = settings.on_host(f"rows go by host memory, as {reason}", remedy)
        self._reader = RankReader(
            settings,
            Geometry.of_model(model_config, check_finite=settings.finite),
            device,
            os.environ[SOCKET_VARIABLE],
            max_bytes=MAX_ROWS_BYTES,
            logger=logger,
        )
        if num_bytes := self._reader.reserve():
            logger.info(
                "image rows go to the GPU: %.0f MiB of it are reserved for those that wait",
                num_bytes / 2**20,
            )
        else:
            logger.info("image rows go by host memory: %s", reason)

    def close(self) -> None:
        self._reader.close()

    def take(self, handle: RowsHandle) -> ImageRows:
        """Raises LookupError for rows that have been dropped."""
        rows = self._reader.rows.get(handle.number)
        if rows is None:
            raise LookupError(f"rows {handle.number} have been dropped")
        return ImageRows(rows)


def _why_host(settings: Settings, *, is_alone: bool) -> str:
    if "device" not in settings.transports:
        return f"transports is {list(settings.transports)}"
    if not is_alone:
        return "the model runs in other processes"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return ""
