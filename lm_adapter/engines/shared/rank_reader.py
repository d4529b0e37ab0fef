"""Rows on one rank, in the process that computes with them.

Owns the reads, on a thread and a CUDA stream of their own, the checks of rows, and the rows that the engine
has not computed with yet. Every rank reads for itself: from the encoder's shared memory if it can, else by
gRPC. Who is at the other end of ``rank_socket`` orders the reads and bounds the bytes that are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.rank_socket import (
    LINK_ERRORS,
    RowsOrder,
    RowsRead,
    connect,
    failure_frame,
    receive,
    send,
)
from lm_adapter.engines.shared.settings import Settings
from lm_adapter.errors import EncoderError, InvalidRows, ItemFailed

CLOSE_S = 10.0
RECONNECT_S = 0.2


class RankReader:
    """The engine's threads take rows from ``rows``; the rest runs on the reader's own thread."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        device: Any,
        socket_name: str,
        *,
        max_bytes: int,
        logger: logging.Logger,
    ) -> None:
        """device: a torch.device; without an index it means the current device of the calling thread.
        socket_name: of the ``RankSocket``. max_bytes: of the rows that are ordered to the device at once."""
        self.rows: dict[int, Any] = {}
        """The rows that this rank has confirmed, by number: [num_rows, width] on the rank's device, or on the
        host."""
        self.transport = ""
        """How rows came last: as in ``client.transport``. Empty before the first rows."""
        self._settings = settings
        self._geometry = geometry
        self._device = device
        self._socket_name = socket_name
        self._max_bytes = max_bytes
        self._logger = logger
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._client: AsyncVisionEncoderClient | None = None
        self._stream: Any = None
        self._reserve: Any = None
        if device.type == "cuda":
            import torch

            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = torch.device("cuda", index)
            new_stream: Any = torch.cuda.Stream  # untyped in torch
            self._stream = new_stream(self._device)
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="vision-encoder-rows", daemon=True)
        self._thread.start()

    @property
    def is_reading(self) -> bool:
        """Whether it carries out orders."""
        return bool(self._reads)

    def close(self) -> None:
        """Ends the thread, and frees what was reserved. Can be repeated."""
        if not self._loop.is_closed() and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: self._main and self._main.cancel())
            self._thread.join(CLOSE_S)
        self._reserve = None

    def reserve(self) -> int:
        """Holds as much device memory as waiting rows may take, until the first read: engines measure the
        memory in use after they have loaded the model, and give the rest to their KV cache. Returns the
        number of bytes: 0 on the CPU."""
        if self._device.type == "cpu":
            return 0
        import torch

        self._reserve = torch.empty(self._max_bytes, dtype=torch.uint8, device=self._device)
        return self._max_bytes

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._stream is not None:
            import torch

            # A stream of its own: copies do not wait for forward passes.
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        self._main = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _serve(self) -> None:
        """Carries out orders until ``close``. Reconnects when the connection breaks."""
        try:
            while True:
                await self._serve_connection(*await connect(self._socket_name))
                await asyncio.sleep(RECONNECT_S)
        finally:
            if self._client is not None:
                # Closing needs a thread, and an interpreter that is ending starts none.
                with contextlib.suppress(RuntimeError):
                    await self._client.close()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends with the connection. The other side then fails the pending orders; confirmed rows stay, as it
        relies on them."""
        try:
            while True:
                frame = await receive(reader)
                if "drop" in frame:
                    self._drop(frame["drop"])
                else:
                    order = RowsOrder.of_frame(frame)
                    self._reads[order.number] = self._loop.create_task(self._read(order, writer))
        except LINK_ERRORS as error:
            self._logger.warning("the connection that orders rows broke: %s: %s", type(error).__name__, error)
        finally:
            writer.close()
            reads, self._reads = self._reads, {}
            for read in reads.values():
                read.cancel()
            await asyncio.gather(*reads.values(), return_exceptions=True)
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _drop(self, number: int) -> None:
        self.rows.pop(number, None)
        read = self._reads.pop(number, None)
        if read is not None:
            read.cancel()

    async def _read(self, order: RowsOrder, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                frame = await self._rows_of(order)
            except InvalidRows:
                # After a restart of the encoder, the client may have checked them against the old model.
                frame = await self._rows_of(order)
        except EncoderError as error:
            frame = failure_frame(order.number, error)
        except Exception as error:
            # No error may end more than this item.
            failure = ItemFailed(f"reading rows failed: {type(error).__name__}: {error}")
            frame = failure_frame(order.number, failure)
        self._reads.pop(order.number, None)
        send(writer, frame)

    async def _rows_of(self, order: RowsOrder) -> dict[str, Any]:
        """Puts the rows into ``rows``, and returns the report of it. Raises EncoderError."""
        if self._reserve is not None:
            import torch

            # Torch would keep the memory for the stream that reserved it; rows are allocated on another one.
            self._reserve = None
            torch.cuda.empty_cache()
        if self._client is None:
            self._client = Agreement(self._settings, self._geometry).client(reads_rows=True)
        digests = [order.routing_digest] if self._settings.is_routed else []
        (rows,) = await self._client.fetch([order.key], routing_digests=digests)
        if isinstance(rows, EncoderError):
            raise rows
        self._geometry.check(rows, order.grid)
        transport = self._client.transport
        if transport.name != self.transport:
            self.transport = transport.name
            self._logger.info("image rows come by %s: %s", transport.name, transport.reason)
        tensor = rows.torch()
        if order.on_host:
            tensor = tensor.cpu()
        elif tensor.device != self._device:
            tensor = tensor.to(self._device)
            if self._stream is not None:
                self._stream.synchronize()
        self.rows[order.number] = tensor
        return RowsRead(order.number, rows.transport, rows.was_lost).frame()
