"""Calls through a gateway to one of many encoders, which a client of one encoder does not load.

Owns how the calls differ from those to one encoder, and the routing digests of the keys that a client got."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from lm_adapter.checks import check_routes
from lm_adapter.errors import CallFailed, EncoderUnavailable, InvalidRequest, ItemFailed, TruncatedStream
from lm_adapter.items import Item
from lm_adapter.keys import routing_digest, with_digests
from lm_adapter.routing import Direct, GroupT, Routes, is_stated
from lm_adapter.types import Limits

FLEET_OPTIONS: dict[str, int | str] = {
    # Round robin over the addresses of a name with several gateways; addresses that are down are skipped.
    "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
    # Calls to an unresponsive peer fail within two seconds. A connection attempt times out after one second.
    "grpc.keepalive_time_ms": 800,
    "grpc.keepalive_timeout_ms": 1_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.min_reconnect_backoff_ms": 1_000,
}
"""Options, in addition to the defaults, for a channel whose calls can be answered by another peer."""
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
MAX_KNOWN_ROUTES = 65_536
"""Keys whose routing digests a client remembers; the least recently used ones are forgotten."""
_UNAVAILABLE = 14


class KnownRoutes:
    """The routing digests of the keys that a client got, so that its user need not keep them."""

    def __init__(self) -> None:
        self._routes: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, key: bytes, route: bytes) -> None:
        self._routes[key] = route
        self._routes.move_to_end(key)
        if len(self._routes) > MAX_KNOWN_ROUTES:
            self._routes.popitem(last=False)

    def of(self, keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> dict[int, bytes]:
        """The routing digest of each key: of routing_digests unless it is empty. Raises InvalidRequest."""
        if routing_digests:
            return check_routes(keys, routing_digests)
        for index, key in enumerate(keys):
            if key not in self._routes:
                raise InvalidRequest(
                    f"keys[{index}] was not announced by this client: give routing_digests, with "
                    "PrefetchStatus.routing_digest of each key"
                )
            self._routes.move_to_end(key)
        return {index: self._routes[key] for index, key in enumerate(keys)}


class Fleet(Direct):
    """Each item is a call of its own, all at once: the gateway selects a replica by the item's digest."""

    is_routed = keeps_info = repeats_unary = True

    def __init__(self, *, repeats: bool) -> None:
        super().__init__(repeats=repeats)
        self._known_routes = KnownRoutes()

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
        return self._known_routes.of(keys, routing_digests)

    def note_key(self, key: bytes, route: bytes | None) -> None:
        if route is not None:
            self._known_routes.note(key, route)

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
        """Why the item's replica stops. None if no replica has stated it."""
        if not isinstance(error, EncoderUnavailable) or not is_stated(error):
            return None
        return ItemFailed(
            error.message,
            reason=error.reason,
            status=_UNAVAILABLE,
            retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
            details=error.details,
        )
