"""The front's side of the encoders: what is asked of them for a request's images, and what is asked again.

Owns ``Prefetch``, the wait for encoders that are away, and the budget that all repetitions of a front are
taken from, those of one encoder and of a fleet alike. What a request's images are is ``vllm_rewrite``'s; what
a fleet tries by itself, out of the same budget, is the fleet client's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Sequence

from lm_adapter import AsyncFleetClient, ItemFailed
from lm_adapter.collect import in_order
from lm_adapter.engines.vllm_encoders import EncoderClient
from lm_adapter.engines.vllm_items import KeyedItem
from lm_adapter.engines.vllm_rewrite import ChatImages
from lm_adapter.errors import DeadlineExceeded, EncoderUnavailable
from lm_adapter.fleet import FleetSettings
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.types import Grid, Item, KeyState, PrefetchStatus

__all__ = ["FrontImages"]

GRID_POLL_S = 0.01
MAX_GRID_POLL_S = 0.1
AWAY = ("UNAVAILABLE", "NO_ENDPOINTS", "DRAINING", "NOT_READY")
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0


class FrontImages:
    """Keys and grids of images, by one encoder or a fleet of them. settings: how much may be asked again
    (``retry_share``, ``retry_reserve_per_s``); a fleet client has its own."""

    def __init__(self, client: EncoderClient, settings: FleetSettings, *, timeout_s: float) -> None:
        self._client = client
        self._fleet = client if isinstance(client, AsyncFleetClient) else None
        self._timeout_s = timeout_s
        if self._fleet is not None:
            self._retries = self._fleet.retries
        else:
            self._retries = RetryBudget(settings.retry_share, settings.retry_reserve_per_s)

    def may_ask_again(self, num_images: int) -> bool:
        """Whether so many images may be asked for once more; counts them when they may."""
        return self._retries.take(time.monotonic(), num_images)

    async def keyed(
        self, images: ChatImages, *, avoid: Collection[str] = (), again: bool = False, wait_s: float
    ) -> tuple[list[KeyedItem], str]:
        """Each image's key, grid and replica, and the model's family; encodes run on. avoid: replicas that
        rows could not be had from. again: they were asked for before, by leave of ``may_ask_again``. wait_s:
        how long an encoder that is away is asked again. Raises EncoderError of the first image that failed,
        where one failed in a way that nothing can be hoped for, of that."""
        statuses, family = await self._statuses(images.items, avoid, again, wait_s)
        failures = [status for status in statuses if isinstance(status, ItemFailed)]
        if failures:
            raise next((one for one in failures if not _is_away(one)), failures[0])
        rows = []
        for status in statuses:
            assert isinstance(status, PrefetchStatus)
            grid = status.grid_thw or await self._grid_of(status)
            rows.append(KeyedItem(status.key, grid, status.target))
        return rows, family

    async def _statuses(
        self, items: Sequence[Item], avoid: Collection[str], again: bool, wait_s: float
    ) -> tuple[list[PrefetchStatus | ItemFailed], str]:
        """What the encoder says of the items. One that restarts, or a fleet none of which is up, is waited
        for, and asked again for what it has not taken."""
        ends_s = time.monotonic() + min(wait_s, self._timeout_s)
        pause_s = FIRST_PAUSE_S
        statuses: dict[int, PrefetchStatus | ItemFailed] = {}
        left = list(range(len(items)))
        if self._fleet is None and not again:
            self._retries.asked(len(items), time.monotonic())
        while True:
            unavailable: EncoderUnavailable | None = None
            try:
                info = await self._client.info(timeout_s=self._timeout_s)
                answers = await self._ask([items[index] for index in left], avoid, again)
                statuses.update(zip(left, answers, strict=True))
                family = info.model().family
                failures = [status for status in statuses.values() if isinstance(status, ItemFailed)]
                if not failures or not all(map(_is_away, failures)):
                    return in_order(statuses), family
                advice_ms = max(failure.retry_after_ms for failure in failures)
                left = [index for index, status in statuses.items() if isinstance(status, ItemFailed)]
            except EncoderUnavailable as error:
                unavailable, advice_ms = error, error.retry_after_ms
            # Not all callers at the same time, and none before the encoder asks for it.
            rest_s = max(pause_s * random.uniform(0.5, 1.0), advice_ms / 1e3)  # noqa: S311
            if time.monotonic() + rest_s > ends_s or not self.may_ask_again(len(left)):
                if unavailable is not None:
                    raise unavailable
                return in_order(statuses), family
            await asyncio.sleep(rest_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            again = True

    async def _ask(
        self, items: Sequence[Item], avoid: Collection[str], again: bool
    ) -> list[PrefetchStatus | ItemFailed]:
        if self._fleet is None:
            return await self._client.prefetch(items, timeout_s=self._timeout_s)
        return await self._fleet.prefetch(items, avoid=avoid, again=again, timeout_s=self._timeout_s)

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
                            details={"replica": image.target},
                        )
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, MAX_GRID_POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the image was not encoded within {self._timeout_s} s") from error


def _is_away(failure: ItemFailed) -> bool:
    """Of what no encoder took, whatever its content."""
    return failure.reason in AWAY
