"""Where calls go: straight to one encoder; ``fleet`` has the calls through a gateway to one of many.

Owns what differs: how items are divided into calls, the routing digests of calls and of known keys, which
failures are repeated and after which pause, and for how long a server's information applies. ``calls`` makes
the calls."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias, TypeVar

from lm_adapter.checks import check_routes
from lm_adapter.errors import CallFailed, EncoderUnavailable, ItemFailed, TruncatedStream
from lm_adapter.items import Item
from lm_adapter.types import Limits

GroupT = TypeVar("GroupT")
Routes: TypeAlias = Mapping[int, bytes]
"""The routing digest of each item, by the caller's index. Empty if calls are not routed."""


class Direct:
    """All items go to one encoder, in as few calls as its limits allow."""

    is_routed: ClassVar[bool] = False
    """Whether calls go through a gateway."""
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
        if routing_digests:
            check_routes(keys, routing_digests)
        return {}

    def note_key(self, key: bytes, route: bytes | None) -> None:
        """A key that the service gave for the item with this route."""

    async def run_each(self, call: Callable[[GroupT], Awaitable[None]], groups: Sequence[GroupT]) -> None:
        """Makes one call for each group of items, one after another. Raises the first failure."""
        for group in groups:
            await call(group)

    def pause_s(self, error: CallFailed, _left_s: float, _num_bytes: int, /) -> float | None:
        """The pause before a failed call is repeated; None if it is not. left_s: until the deadline.
        num_bytes: of the items that are sent again.

        A broken stream is repeated. A failure that the server states, such as DRAINING, is not: the same
        server would state it again."""
        is_break = isinstance(error, EncoderUnavailable | TruncatedStream) and not is_stated(error)
        return 0.0 if self._repeats and is_break else None

    def item_failure(self, _error: CallFailed, /) -> ItemFailed | None:
        """The failure of the call's items, if only they fail with the call."""
        return None


def is_stated(error: CallFailed) -> bool:
    """Whether a server stated the reason. Otherwise it is that of the gRPC status."""
    return error.reason != type(error).default_reason
