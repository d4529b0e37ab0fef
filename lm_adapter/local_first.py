"""A client with two targets: the encoder on this node, which delivers in shared memory, then a gateway.

Owns which items are sent to the gateway: those that got no rows from the local encoder because it was
unreachable, broke the connection, was draining, or lost its device. ``client`` owns the rest of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, Unpack

from lm_adapter.checks import check_items, check_keys
from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderUnavailable,
    ItemFailed,
    TruncatedStream,
)
from lm_adapter.fleet import FLEET_OPTIONS, KnownRoutes
from lm_adapter.items import Item
from lm_adapter.keys import routing_digest
from lm_adapter.options import ClientOptions
from lm_adapter.shm.attachment import Transport
from lm_adapter.types import KeyStatus, Outcome, PrefetchStatus, ServerInfo

LEAVING = frozenset(("DRAINING", "DEVICE_FAULT"))
"""Failure reasons of items that failed only because their encoder is stopping."""
MIN_LEFT_S = 1e-3
_LOCAL_ONLY = frozenset(("transports", "broker_path", "device"))

ResultT = TypeVar("ResultT")


class LocalFirstClient(AsyncVisionEncoderClient):
    """A client of the encoder at ``target`` that falls back to the gateway at ``fallback_target``.

    ``fetch`` and ``lookup`` need the routing digest of each key that another client announced."""

    def __init__(self, target: str, *, fallback_target: str, **options: Unpack[ClientOptions]) -> None:
        """options: those of ``AsyncVisionEncoderClient``. Transports, broker path and device apply to the
        local encoder only, all other options to both targets. Raises InvalidRequest."""
        both: Any = {name: value for name, value in options.items() if name not in _LOCAL_ONLY}
        local: Any = dict(options) | {"options": FLEET_OPTIONS | dict(options.get("options") or {})}
        # No retries here: an item that failed locally is retried once, at the gateway.
        super().__init__(target, repeats=False, **local)
        self._gateway = AsyncVisionEncoderClient(fallback_target, fleet=True, repeats=False, **both)
        self._known_routes = KnownRoutes()

    async def close(self) -> None:
        await self._gateway.close()
        await super().close()

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        try:
            return await super().info(timeout_s=timeout_s)
        except EncoderUnavailable:
            return await self._gateway.info(timeout_s=timeout_s)

    async def known_key(self, item: Item, *, timeout_s: float | None = None) -> bytes | None:
        deadline = self._deadline(timeout_s)
        try:
            return await super().known_key(item, timeout_s=timeout_s)
        except EncoderUnavailable:
            return await self._gateway.known_key(item, timeout_s=max(MIN_LEFT_S, deadline.left_s))

    async def wait_ready(self, timeout_s: float) -> ServerInfo:
        """Waits until either target is ready."""
        waiting = [
            asyncio.ensure_future(super().wait_ready(timeout_s)),
            asyncio.ensure_future(self._gateway.wait_ready(timeout_s)),
        ]
        try:
            for first in asyncio.as_completed(waiting):
                with contextlib.suppress(DeadlineExceeded):
                    return await first
            return await waiting[0]
        finally:
            for wait in waiting:
                wait.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def wait_transport(self, timeout_s: float | None = None) -> Transport:
        with contextlib.suppress(EncoderUnavailable):
            return await super().wait_transport(timeout_s)
        return self.transport

    async def _encode(
        self, items: Sequence[Item], *, timeout_s: float | None, stream: Any = None
    ) -> list[Outcome]:
        return await self._ask_both(super()._encode, self._gateway._encode, items, timeout_s, stream=stream)

    async def fetch(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> list[Outcome]:
        routes = self._routes_of(keys, routing_digests)
        return await self._ask_both(
            super().fetch, self._gateway.fetch, keys, timeout_s, routes, stream=stream
        )

    async def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None, until_encoded: bool = False
    ) -> list[PrefetchStatus | ItemFailed]:
        items = check_items(items)
        statuses = await self._ask_both(
            super().prefetch, self._gateway.prefetch, items, timeout_s, until_encoded=until_encoded
        )
        routes = await asyncio.to_thread(list, map(routing_digest, items))
        for index, (status, route) in enumerate(zip(statuses, routes, strict=True)):
            if isinstance(status, PrefetchStatus):
                self._known_routes.note(status.key, route)
                statuses[index] = dataclasses.replace(status, routing_digest=route)
        return statuses

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[KeyStatus]:
        routes = self._routes_of(keys, routing_digests)
        return await self._ask_both(super().lookup, self._gateway.lookup, keys, timeout_s, routes)

    def _routes_of(self, keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> list[bytes]:
        """In the order of the keys. Raises InvalidRequest."""
        return list(self._known_routes.of(check_keys(keys), routing_digests).values())

    async def _ask_both(
        self,
        local: Callable[..., Awaitable[list[ResultT]]],
        gateway: Callable[..., Awaitable[list[ResultT]]],
        items: Sequence[Any],
        timeout_s: float | None,
        routes: Sequence[bytes] | None = None,
        **options: Any,
    ) -> list[ResultT]:
        """The local results. Items that are missing or whose encoder is stopping come from the gateway.
        items: or keys, with their routing digests."""
        deadline = self._deadline(timeout_s)
        by_item = {} if routes is None else {"routing_digests": routes}
        results: dict[int, Any] = {}
        try:
            results.update(enumerate(await local(items, timeout_s=timeout_s, **by_item, **options)))
        except (EncoderUnavailable, TruncatedStream) as error:
            results.update(error.completed)
        missing = [index for index in range(len(items)) if _needs_gateway(results.get(index))]
        if missing:
            for index in missing:
                results.pop(index, None)
            by_item = {name: [values[index] for index in missing] for name, values in by_item.items()}
            entries, left_s = [items[index] for index in missing], max(MIN_LEFT_S, deadline.left_s)
            try:
                answers = await gateway(entries, timeout_s=left_s, **by_item, **options)
            except CallFailed as error:
                error.completed = results | {
                    missing[index]: outcome for index, outcome in error.completed.items()
                }
                raise
            results.update(zip(missing, answers, strict=True))
        return [results[index] for index in range(len(items))]


def _needs_gateway(outcome: object) -> bool:
    return outcome is None or (isinstance(outcome, ItemFailed) and outcome.reason in LEAVING)
