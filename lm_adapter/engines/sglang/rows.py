"""Rows for a request: from files to checked rows, on a thread of its own.

Owns what is asked of the encoder and what is refused. The thread, its retries and its time limits are
``engines.plugin.calls``. Imports neither SGLang nor torch; torch where rows go to a GPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.plugin.calls import EncoderCalls
from lm_adapter.engines.plugin.geometry import Geometry
from lm_adapter.engines.plugin.images import ImageFile
from lm_adapter.engines.sglang.settings import Settings
from lm_adapter.errors import EncoderError, InvalidRequest, InvalidRows
from lm_adapter.items import Grid, ImageItem
from lm_adapter.types import EncodedRows


class RowReader:
    """Thread-safe. ``read`` is for any event loop."""

    def __init__(self, settings: Settings, geometry: Geometry, gpu: int | None = None) -> None:
        """gpu: the index of the GPU that rows go to; None for the host. Raises InvalidRequest for transports
        that leave no way there."""
        if gpu is None:
            transports = tuple(name for name in settings.transports if name != "device")
            if not transports:
                raise InvalidRequest(
                    f"transports is {list(settings.transports)}, but SGLang takes rows from host memory: set "
                    "--mm-feature-transport cuda_ipc"
                )
            settings = dataclasses.replace(settings, transports=transports)
        self._geometry = geometry
        self._gpu = gpu
        self._calls = EncoderCalls(settings, name="rows", reads_rows=True)

    def close(self) -> None:
        self._calls.close()

    async def read(self, images: Sequence[ImageFile], grids: Sequence[Grid]) -> list[EncodedRows]:
        """Checked rows of each image. grids: as the model's processor computes them. Raises EncoderError:
        the first image's that has no rows. A caller that is cancelled takes its call along."""
        items = [ImageItem(image.data, digest=image.digest) for image in images]

        async def call(client: AsyncVisionEncoderClient, left_s: float) -> list[EncodedRows]:
            try:
                return await self._encode(client, items, grids, left_s)
            except InvalidRows:
                # After an encoder's restart the client may have compared them with the former one's model.
                return await self._encode(client, items, grids, left_s)

        outcome: Any = await asyncio.wrap_future(self._calls.ask(call))
        if isinstance(outcome, EncoderError):
            raise outcome
        rows: list[EncodedRows] = outcome
        return rows

    async def _encode(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        left_s: float,
    ) -> list[EncodedRows]:
        if self._gpu is not None:
            import torch

            # Rows go to the calling thread's current GPU.
            torch.cuda.set_device(self._gpu)
        rows = []
        for outcome, grid in zip(await client.encode(items, timeout_s=left_s), grids, strict=True):
            if isinstance(outcome, EncoderError):
                raise outcome
            self._geometry.check(outcome, grid)
            rows.append(outcome)
        return rows
