"""The ordinary asyncio client of one replica, with what a fleet asks of it beside.

Owns no state. A fleet's attempts run in tasks of their own, so the streams that were current for the caller
are handed in, where the ordinary client takes those of the moment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from lm_adapter.async_client import AsyncVisionEncoderClient
from lm_adapter.fleet.replica import Check
from lm_adapter.session import Deadline
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.types import Item, Outcome

__all__ = ["ReplicaClient"]


class ReplicaClient(AsyncVisionEncoderClient):
    """Of one replica."""

    fingerprint: bytes = b""
    """Of the model's weights, where only these will do."""

    async def check(self, timeout_s: float) -> Check:
        """What its health check says; a replica that serves has said what it is as well. Raises
        CallFailed."""
        deadline = Deadline(timeout_s)
        if not await self._is_serving(deadline):
            return Check.NOT_SERVING
        info = await self._known_info(deadline)
        if self.fingerprint and all(
            one.model_fingerprint != self.fingerprint for one in self._session.models(info)
        ):
            self._session.forget_info()
            return Check.MISFIT
        return Check.SERVING

    async def encode_for(
        self, streams: CallerStreams, items: Sequence[Item], deadline: Deadline, handling: RowsHandling
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """As ``encode_iter``, on these streams."""
        info = await self._known_info(deadline)
        await self._require_transport(deadline)
        resident = self._session.resident.of_items(info, items, handling)
        ordinary = partial(self._encode, info, deadline, streams)
        async with aclosing(resident.run_on_loop(deadline, streams, ordinary)) as stream:
            async for finished in stream:
                yield finished

    async def fetch_for(
        self, streams: CallerStreams, keys: Sequence[bytes], deadline: Deadline, handling: RowsHandling
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """As ``fetch_iter``, on these streams."""
        info = await self._known_info(deadline)
        await self._require_transport(deadline)
        resident = self._session.resident.of_keys(info, keys, handling)
        calls = partial(self._session.fetch_calls, info)
        ordinary = lambda *rest: self._rows(calls(*rest), deadline, streams)  # noqa: E731
        async with aclosing(resident.run_on_loop(deadline, streams, ordinary)) as stream:
            async for finished in stream:
                yield finished
