"""gRPC's asyncio server, accepting as many calls in a turn of the event loop as wait for it.

gRPC's own asks for one call and, once its task runs again, for the next: two turns for each call (five since
gRPC 1.84), however many wait. Beside decoding threads a turn takes a millisecond, so a service whose images
are small took some 400 calls a second while its device waited for them. Here several requests for a call are
open at the same time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

# Requests for a call that are open: the most calls that a turn accepts.
OPEN_REQUESTS = 16
GRPCS_CORE: Any = cygrpc.AioServer


class AcceptingCore(GRPCS_CORE):  # type: ignore[misc]
    """The server below ``grpc.aio.Server``. gRPC's loop over the calls takes each from ``_request_call``.
    Where that changes, calls are accepted one by one again, and tests/unit/rpc/test_event_loop.py fails."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._accepted: deque[Any] = deque()
        self._asking: list[asyncio.Task[None]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    async def _request_call(self) -> Any:
        """The next call. Does not wait, and gives the loop no turn, while one is there. Raises gRPC's error
        once the server stops."""
        loop = asyncio.get_running_loop()
        if not self._asking:
            self._asking = [loop.create_task(self._ask()) for _ in range(OPEN_REQUESTS)]
        while not self._accepted:
            if self._failure is not None:
                raise self._failure
            self._waiter = loop.create_future()
            await self._waiter
        return self._accepted.popleft()

    async def _ask(self) -> None:
        """Until the server stops. A call that no one has taken by then is dropped, which ends it: gRPC would
        hold the stop until its end."""
        while self._failure is None:
            try:
                call = await super()._request_call()
                if self._failure is None:
                    self._accepted.append(call)
                del call
            except Exception as error:
                self._failure = error
                self._accepted.clear()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def shutdown(self, grace: float | None) -> None:
        """gRPC's own waits for one of the open requests. All of them have ended when it returns."""
        await super().shutdown(grace)
        if self._asking:
            await asyncio.wait(self._asking)
            self._asking = []


def accepting_server(options: list[tuple[str, Any]]) -> grpc.aio.Server:
    """As ``grpc.aio.server``, on an ``AcceptingCore``. options: gRPC's, by name."""
    # grpc.aio takes the class of its core from there.
    cygrpc.AioServer = AcceptingCore
    try:
        return grpc.aio.server(options=options)
    finally:
        cygrpc.AioServer = GRPCS_CORE
