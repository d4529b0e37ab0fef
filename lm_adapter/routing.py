"""Where calls go: straight to one encoder, or through a gateway to one of many.

Owns what differs: how items are divided into calls, the routing digest of a call, which failures are repeated
and after which pause, and for how long a server's information applies. ``calls`` makes the calls."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias, TypeVar

from lm_adapter.checks import check_routes
from lm_adapter.errors import CallFailed, EncoderOverloaded, EncoderUnavailable, ItemFailed, TruncatedStream
from lm_adapter.items import Item
from lm_adapter.keys import routing_digest, with_digests
from lm_adapter.types import Limits

MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.3
"""Bounds of the random pause before a repeat through a gateway. When it ends, the gateway has excluded a
replica that ended. Random pauses spread the calls that a crash interrupted: an item that crashes each encoder
then interrupts fewer of them again."""
GATEWAY_BUFFER_BYTES = 16 << 20
"""Largest body that a gateway can retry by itself."""
LARGE_PAUSE_S = 1.5
"""Added to the pause before a larger body is repeated: another gateway, which had no call at the replica that
ended, excludes it after two failed health checks."""
FLEET_INFO_S = 60.0
"""Age at which a fleet's information is requested again: replicas are replaced without notice."""
_UNAVAILABLE, _RESOURCE_EXHAUSTED = 14, 8

GroupT = TypeVar("GroupT")
Routes: TypeAlias = Mapping[int, bytes]
"""The routing digest of each item, by the caller's index. Empty if calls are not routed."""


class Direct:
    """All items go to one encoder, in as few calls as its limits allow."""

    keeps_info: ClassVar[bool] = False
    """Whether the information still applies when the server that gave it has ended."""
    repeats_unary: ClassVar[bool] = False
    """Whether ``pause_s`` is also for calls with one answer."""

    def __init__(self, *, repeats: bool) -> None:
        """repeats: whether any call is repeated."""
        self._repeats = repeats

    @property
    def max_info_age_s(self) -> float:
        return math.inf

    def limits(self, limits: Limits) -> Limits:
        """The limits of one call. limits: the server's."""
        return limits

    async def routed(self, items: Sequence[Item]) -> tuple[Sequence[Item], Routes]:
        """The items as they are sent, and their routes."""
        return items, {}

    def routes_of(self, keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> Routes:
        """Raises InvalidRequest."""
        check_routes(keys, routing_digests, is_routed=False)
        return {}

    async def run_each(self, call: Callable[[GroupT], Awaitable[None]], groups: Sequence[GroupT]) -> None:
        """Makes one call for each group of items, one after another. Raises the first failure."""
        for group in groups:
            await call(group)

    def pause_s(self, error: CallFailed, _left_s: float, _num_bytes: int, /) -> float | None:
        """The pause before a failed call is repeated; None if it is not. left_s: until the deadline.
        num_bytes: of the items that are sent again.

        A broken stream is repeated. A failure that the server states, such as DRAINING, is not: the same
        server would state it again."""
        is_break = isinstance(error, EncoderUnavailable | TruncatedStream) and not _is_stated(error)
        return 0.0 if self._repeats and is_break else None

    def item_failure(self, _error: CallFailed, /) -> ItemFailed | None:
        """The failure of the call's items, if only they fail with the call."""
        return None


class Fleet(Direct):
    """Each item is a call of its own, all at once: the gateway selects a replica by the item's digest."""

    keeps_info = repeats_unary = True

    @property
    def max_info_age_s(self) -> float:
        return FLEET_INFO_S

    def limits(self, limits: Limits) -> Limits:
        return dataclasses.replace(limits, max_items_per_request=1)

    async def routed(self, items: Sequence[Item]) -> tuple[Sequence[Item], Routes]:
        """Adds digests to files: their routes need them anyway."""
        items = await asyncio.to_thread(with_digests, items)
        return items, dict(enumerate(await asyncio.to_thread(list, map(routing_digest, items))))

    def routes_of(self, keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> Routes:
        check_routes(keys, routing_digests, is_routed=True)
        return dict(enumerate(routing_digests))

    async def run_each(self, call: Callable[[GroupT], Awaitable[None]], groups: Sequence[GroupT]) -> None:
        """Makes all calls at once. Raises the first failure when all have ended."""
        for error in await asyncio.gather(*map(call, groups), return_exceptions=True):
            if error is not None:
                raise error

    def pause_s(self, error: CallFailed, left_s: float, num_bytes: int, /) -> float | None:
        """Failures that a server states are repeated as well: another replica may answer otherwise."""
        is_break = isinstance(error, EncoderUnavailable | TruncatedStream)
        if not (self._repeats and is_break and left_s >= MAX_PAUSE_S):
            return None
        pause_s = random.uniform(MIN_PAUSE_S, MAX_PAUSE_S)  # noqa: S311 - only spreads repeats
        return pause_s + LARGE_PAUSE_S if num_bytes > GATEWAY_BUFFER_BYTES else pause_s

    def item_failure(self, error: CallFailed, /) -> ItemFailed | None:
        """Why the item's replica takes no work. None if no replica has stated it."""
        if not isinstance(error, EncoderUnavailable | EncoderOverloaded) or not _is_stated(error):
            return None
        return ItemFailed(
            error.message,
            reason=error.reason,
            status=_UNAVAILABLE if isinstance(error, EncoderUnavailable) else _RESOURCE_EXHAUSTED,
            retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
            details=error.details,
        )


Routing: TypeAlias = Direct | Fleet


def _is_stated(error: CallFailed) -> bool:
    """Whether a server stated the reason. Otherwise it is that of the gRPC status."""
    return error.reason != type(error).default_reason
