"""Has the engine's process read the rows of a request, and drop them. Requests for the same images at the
same time share rows: LMDeploy asks for each of a request's ``n`` choices.

Owns what a call does: the encoder encodes all images of a request, then the engine's process reads their rows
by key (``rank``) and confirms them (``shared.rank_socket``). Rows never come here. LMDeploy pickles requests,
and its engine ends when one cannot be unpickled: a handle is only a number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.lmdeploy.settings import SOCKET_VARIABLE, Settings
from lm_adapter.engines.shared import rows
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.rank_socket import RankSocket, RowsOrder
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRows, ItemFailed
from lm_adapter.items import Grid, ImageItem

MIN_CALL_S = 0.001
AWAY_S = 2.0
"""Of the engine's process, after which it is taken to have ended. It reconnects in a fifth of a second."""
Names = tuple[bytes, ...]
"""The digests of a request's images."""
GONE = "UNKNOWN_KEY"
"""The reason of rows that the encoder does not have any more."""


class HeldRows:
    """Rows of requests for the same images, in the engine's process, by their orders and in the images'
    order. They are dropped with this object; what a request has taken stays as long as it keeps it."""

    def __init__(self, orders: Sequence[RowsOrder], drop: Callable[[Sequence[RowsOrder]], None]) -> None:
        self.orders = orders
        self.then(drop, orders)

    def then(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls the function once this object has gone. It must not wait."""
        weakref.finalize(self, function, *arguments).atexit = False

    def handles(self) -> list[RowsHandle]:
        """One of each image."""
        return [RowsHandle(order.number, self) for order in self.orders]


@dataclass(frozen=True, eq=False)
class RowsHandle:
    """An image's rows in the engine's process. held: keeps them; None in that process."""

    number: int
    held: HeldRows | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsHandle, (self.number,)


@dataclass(eq=False)
class _Ongoing:
    """A call for the rows of some images. num_waiting: requests that want them."""

    task: asyncio.Task[HeldRows]
    num_waiting: int = 0


class RowOrders(rows.RowCalls):
    """In the API server's process, before LMDeploy starts the engine's."""

    def __init__(self, settings: Settings, geometry: Geometry, logger: logging.Logger) -> None:
        """Raises as ``check_encoder``."""
        # Text waits for LMDeploy as long as it takes, and rows leave room only with their first token.
        super().__init__(settings, geometry, logger, reads_rows=False, has_room_in_time=False)
        self._held: weakref.WeakValueDictionary[Names, HeldRows] = weakref.WeakValueDictionary()
        self._ongoing: dict[Names, _Ongoing] = {}
        self._numbers = itertools.count(1)
        os.environ[SOCKET_VARIABLE] = f"vision-encoder-{secrets.token_hex(16)}"
        self._socket = RankSocket(os.environ[SOCKET_VARIABLE], 1)
        self._encoder_thread.run_coroutine(self._socket.open())

    def close(self) -> None:
        self._encoder_thread.run_coroutine(self._socket.close())
        super().close()

    async def hold(self, images: Sequence[ImageFile], grids: Sequence[Grid]) -> HeldRows:
        """Returns once the engine's process has checked rows of all images; they count in MAX_ROWS_BYTES as
        long as the result exists. Waits for room as long as it takes. Raises as ``take``."""
        names, loop = tuple(image.digest for image in images), asyncio.get_running_loop()
        for is_second in (False, True):
            held = self._held.get(names)
            if held is not None:
                return held
            ongoing = self._ongoing.get(names)
            has_joined = True
            # The task of a call that has failed stays here until all have noticed.
            if ongoing is None or ongoing.task.done() or ongoing.task.get_loop() is not loop:
                has_joined = False
                task = loop.create_task(self._obtain(names, images, grids))
                ongoing = self._ongoing[names] = _Ongoing(task)
            ongoing.num_waiting += 1
            try:
                # A request that leaves does not take the others' call along.
                return await asyncio.shield(ongoing.task)
            except EncoderError as error:
                # The time was that of the request which began the call.
                if is_second or not has_joined or error.reason != DeadlineExceeded.default_reason:
                    raise
            finally:
                ongoing.num_waiting -= 1
                if not ongoing.num_waiting:
                    ongoing.task.cancel()
                    if self._ongoing.get(names) is ongoing:
                        del self._ongoing[names]
        raise AssertionError

    async def _obtain(self, names: Names, images: Sequence[ImageFile], grids: Sequence[Grid]) -> HeldRows:
        held: HeldRows
        held, give_back = await self.take(images, grids)
        held.then(self._encoder_thread.call_soon, give_back)
        self._held[names] = held
        return held

    async def _encode(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        left_s: float,
    ) -> HeldRows:
        """Rows that are gone before they are read are encoded once more."""
        if not await self._socket.are_connected(AWAY_S):
            raise ItemFailed("LMDeploy's engine has ended: start LMDeploy again", reason="ENGINE_UNAVAILABLE")
        ends_s = time.monotonic() + left_s

        def left() -> float:
            return max(MIN_CALL_S, ends_s - time.monotonic())

        for is_second in (False, True):
            orders = await self._encoded(client, items, grids, left())
            try:
                return await self._read(orders, left())
            except ItemFailed as error:
                if is_second or error.reason != GONE:
                    raise
        raise AssertionError

    async def _encoded(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        timeout_s: float,
    ) -> list[RowsOrder]:
        # A request above the limit is alone, but the GPU has room for the limit only.
        on_host = sum(map(self._geometry.num_bytes, grids)) > rows.MAX_ROWS_BYTES
        orders = []
        statuses = await client.prefetch(items, timeout_s=timeout_s, until_encoded=True)
        for item, status, grid in zip(items, statuses, grids, strict=True):
            if isinstance(status, ItemFailed):
                raise status
            if status.grid_thw is not None and status.grid_thw != grid:
                found, expected = list(status.grid_thw), list(grid)
                text = f"the encoder's grid_thw is {found}, the prompt was made for {expected}"
                raise InvalidRows("grid_thw", text, found=found, expected=expected)
            route = status.routing_digest or item.digest or b""
            orders.append(RowsOrder(next(self._numbers), status.key, route, grid, on_host))
        return orders

    async def _read(self, orders: Sequence[RowsOrder], timeout_s: float) -> HeldRows:
        reads = [asyncio.ensure_future(self._socket.read(order, timeout_s)) for order in orders]
        try:
            await asyncio.gather(*reads)
        except BaseException:
            for read in reads:
                read.cancel()
            self._drop(orders)
            raise
        return HeldRows(orders, self._drop_soon)

    def _drop_soon(self, orders: Sequence[RowsOrder]) -> None:
        self._encoder_thread.call_soon(self._drop, orders)

    def _drop(self, orders: Sequence[RowsOrder]) -> None:
        for order in orders:
            self._socket.drop(order.number)
