"""The front's side of the encoders: what is asked of them for a request's images, and what is asked again.

Owns ``Prefetch``, the wait for encoders that are away, and the budget that all repetitions of a front are
taken from. What a request's images are is ``vllm_rewrite``'s.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.vllm_items import KeyedItem
from lm_adapter.engines.vllm_rewrite import ChatImages
from lm_adapter.errors import DeadlineExceeded, EncoderUnavailable, ItemFailed
from lm_adapter.items import Grid, Item
from lm_adapter.types import KeyState, PrefetchStatus

__all__ = ["FrontImages"]

GRID_POLL_S = 0.01
MAX_GRID_POLL_S = 0.1
AWAY = ("UNAVAILABLE", "NO_ENDPOINTS", "DRAINING", "NOT_READY")
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
RETRY_SHARE = 0.2
"""Of the images asked for within WINDOW_S, how many may be asked for once more."""
RETRY_RESERVE_PER_S = 10.0
"""Images a second that may be asked for once more beside that."""
WINDOW_S = 10.0
BUCKET_S = 1.0


class FrontImages:
    """Keys and grids of images."""

    def __init__(self, client: AsyncVisionEncoderClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._retries = RetryBudget(RETRY_SHARE, RETRY_RESERVE_PER_S)

    def may_ask_again(self, num_images: int) -> bool:
        """Whether so many images may be asked for once more; counts them when they may."""
        return self._retries.take(time.monotonic(), num_images)

    async def keyed(
        self, images: ChatImages, *, again: bool = False, wait_s: float
    ) -> tuple[list[KeyedItem], str]:
        """Each image's key and grid, and the model's family; encodes run on. again: they were asked for before, by leave of ``may_ask_again``. wait_s:
        how long an encoder that is away is asked again. Raises EncoderError of the first image that failed,
        where one failed in a way that nothing can be hoped for, of that."""
        statuses, family = await self._statuses(images.items, again, wait_s)
        failures = [status for status in statuses if isinstance(status, ItemFailed)]
        if failures:
            raise next((one for one in failures if not _is_away(one)), failures[0])
        rows = []
        for status in statuses:
            assert isinstance(status, PrefetchStatus)
            grid = status.grid_thw or await self._grid_of(status)
            rows.append(KeyedItem(status.key, grid))
        return rows, family

    async def _statuses(
        self, items: Sequence[Item], again: bool, wait_s: float
    ) -> tuple[list[PrefetchStatus | ItemFailed], str]:
        """What the encoder says of the items. One that restarts, or a fleet none of which is up, is waited
        for, and asked again for what it has not taken."""
        ends_s = time.monotonic() + min(wait_s, self._timeout_s)
        pause_s = FIRST_PAUSE_S
        statuses: dict[int, PrefetchStatus | ItemFailed] = {}
        left = list(range(len(items)))
        if not again:
            self._retries.asked(len(items), time.monotonic())
        while True:
            unavailable: EncoderUnavailable | None = None
            try:
                info = await self._client.info(timeout_s=self._timeout_s)
                answers = await self._client.prefetch(
                    [items[index] for index in left], timeout_s=self._timeout_s
                )
                statuses.update(zip(left, answers, strict=True))
                family = info.model().family
                failures = [status for status in statuses.values() if isinstance(status, ItemFailed)]
                if not failures or not all(map(_is_away, failures)):
                    return [statuses[index] for index in range(len(items))], family
                advice_ms = max(failure.retry_after_ms for failure in failures)
                left = [index for index, status in statuses.items() if isinstance(status, ItemFailed)]
            except EncoderUnavailable as error:
                unavailable, advice_ms = error, error.retry_after_ms
            # Not all callers at the same time, and none before the encoder asks for it.
            rest_s = max(pause_s * random.uniform(0.5, 1.0), advice_ms / 1e3)  # noqa: S311
            if time.monotonic() + rest_s > ends_s or not self.may_ask_again(len(left)):
                if unavailable is not None:
                    raise unavailable
                return [statuses[index] for index in range(len(items))], family
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            again = True

    async def _grid_of(self, image: PrefetchStatus) -> Grid:
        """Of an image whose header does not tell: known when it is encoded."""
        pause_s = GRID_POLL_S
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    (status,) = await self._client.lookup([image.key])
                    if status.grid_thw is not None:
                        return status.grid_thw
                    if status.state is KeyState.ABSENT:
                        raise ItemFailed(
                            "the image could not be encoded",
                            reason="UNKNOWN_KEY",
                            status=5,
                        )
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, MAX_GRID_POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the image was not encoded within {self._timeout_s} s") from error


def _is_away(failure: ItemFailed) -> bool:
    """Of what no encoder took, whatever its content."""
    return failure.reason in AWAY


class RetryBudget:
    """Each image asked for adds ``share`` of an attempt, each further attempt takes one. Both are forgotten after
    WINDOW_S; the reserve is always there."""

    def __init__(self, share: float, reserve_per_s: float) -> None:
        self._share = share
        self._reserve = reserve_per_s * WINDOW_S
        self._balance = 0.0
        self._buckets: deque[tuple[float, float]] = deque()
        """Start in seconds, and the attempts added since, less those taken."""

    def asked(self, num_items: int, now_s: float) -> None:
        """Items that a caller asked for."""
        self._left(now_s)
        self._add(num_items * self._share, now_s)

    def take(self, now_s: float, num_attempts: int = 1) -> bool:
        """Whether so many more attempts may be made, all of them; counts them when they may."""
        if self._left(now_s) < num_attempts:
            return False
        self._add(-float(num_attempts), now_s)
        return True

    def _left(self, now_s: float) -> float:
        while self._buckets and now_s - self._buckets[0][0] >= WINDOW_S:
            self._balance -= self._buckets.popleft()[1]
        return self._reserve + self._balance

    def _add(self, attempts: float, now_s: float) -> None:
        if not self._buckets or now_s - self._buckets[-1][0] >= BUCKET_S:
            self._buckets.append((now_s, 0.0))
        start_s, total = self._buckets[-1]
        self._buckets[-1] = (start_s, total + attempts)
        self._balance += attempts
