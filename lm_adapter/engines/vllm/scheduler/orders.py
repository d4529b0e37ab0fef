"""The calls that put rows on every rank: one for each identifier whose rows are held.

Owns what a call does. The API server's ``Prefetch`` has sent most files; this module sends the others by a
``Prefetch`` of its own. Then the ranks read the rows by key (``worker.ranks``), and confirm
(``rank_socket``). The calls run on ``shared.encoder_thread``, which repeats transient failures. Rows never
come here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.rank_socket import RankSocket, RowsOrder, RowsRead
from lm_adapter.engines.vllm.scheduler.items import RequestItem
from lm_adapter.engines.vllm.scheduler.rows import RowsEntry
from lm_adapter.errors import EncoderError, InvalidRows, ItemFailed
from lm_adapter.types import PrefetchStatus

MIN_CALL_S = 0.001
GONE = "UNKNOWN_KEY"
"""The reason of rows that an encoder no longer has, or never had."""


class RowOrders:
    """For the scheduler's thread. ``_obtain`` and ``_read`` run on the loop of the encoder thread."""

    def __init__(
        self, encoder_thread: EncoderThread, rank_socket: RankSocket, clock: Callable[[], float]
    ) -> None:
        """rank_socket: on the loop of ``encoder_thread``. clock: in seconds, monotonic."""
        self._encoder_thread = encoder_thread
        self._rank_socket = rank_socket
        self._clock = clock
        self._numbers = itertools.count(1)

    def start(self, entry: RowsEntry) -> None:
        """Has every rank read the rows. ``take_completed`` returns the outcome."""
        self._encoder_thread.submit(entry, functools.partial(self._obtain, entry.item))

    def cancel(self, entry: RowsEntry) -> None:
        """Ends the call. Its outcome may come nevertheless, if it has ended already."""
        self._encoder_thread.cancel(entry)

    def drop(self, number: int) -> None:
        """Frees the rows of this number on every rank."""
        self._encoder_thread.call_soon(self._rank_socket.drop, number)

    def wait(self, timeout_s: float) -> None:
        """Waits until some call has ended."""
        self._encoder_thread.wait(timeout_s)

    def take_completed(self) -> Iterator[tuple[RowsEntry, RowsRead | EncoderError]]:
        """Each call that has ended: how every rank has read the rows, or why they are not available."""
        while self._encoder_thread.completed:
            completed = self._encoder_thread.completed.popleft()
            assert isinstance(completed.handle, RowsEntry)
            yield completed.handle, completed.outcome

    async def _obtain(self, item: RequestItem, client: AsyncVisionEncoderClient, left_s: float) -> RowsRead:
        """How every rank has read the rows. The key of an announced item is enough. Rows that a rank does not
        find are encoded once more before they are ordered again: then the encoder has them, or says what is
        wrong with the item. Raises EncoderError."""
        ends_s = self._clock() + left_s

        def left() -> float:
            return max(MIN_CALL_S, ends_s - self._clock())

        if item.file.is_announced:
            named = replace(item.file, data=b"").item()
            key = await client.known_key(named, timeout_s=left())
            if key is not None:
                with _unless_gone():
                    return await self._read(item, key, item.file.digest, left())
                # The encoder may be another one by now, which has other keys.
                await client.info(timeout_s=left())
        sent = item.file.item()
        for is_second in (False, True):
            (status,) = await client.prefetch([sent], timeout_s=left(), until_encoded=is_second)
            if isinstance(status, ItemFailed):
                raise status
            _check_grid(status, item)
            route = status.routing_digest or item.file.digest
            with contextlib.nullcontext() if is_second else _unless_gone():
                return await self._read(item, status.key, route, left())
        raise AssertionError

    async def _read(self, item: RequestItem, key: bytes, route: bytes, timeout_s: float) -> RowsRead:
        """Has every rank read the rows. Raises ItemFailed."""
        order = RowsOrder(next(self._numbers), key, route, item.grid)
        return await self._rank_socket.read(order, timeout_s)


def _check_grid(status: PrefetchStatus, item: RequestItem) -> None:
    """Raises InvalidRows if the encoder's grid is not the prompt's."""
    if status.grid_thw is not None and status.grid_thw != item.grid:
        found, expected = list(status.grid_thw), list(item.grid)
        text = f"the encoder's grid_thw is {found}, the prompt was made for {expected}"
        raise InvalidRows("grid_thw", text, found=found, expected=expected)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Goes on if the encoder has no rows of the key."""
    try:
        yield
    except ItemFailed as error:
        if error.reason != GONE:
            raise
