"""The ordinary asyncio client of one replica, with what a fleet asks of it beside.

Owns its channel's options, and no state. A fleet's attempts run in tasks of their own, so the streams that
were current for the caller are handed in, where the ordinary client takes those of the moment."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from lm_adapter.async_client import AsyncVisionEncoderClient
from lm_adapter.errors import ProtocolMismatch
from lm_adapter.fleet.replica import Check
from lm_adapter.session import Deadline
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.channel import ClientTls, FollowedTls, bearer, followed_credentials
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.settings import TransportOptions, TransportSettings
from lm_adapter.types import Item, Outcome, ServerInfo

__all__ = ["ReplicaClient", "replica_opener"]

# On top of the channel's own: a replica that is back is found within a second, a host that vanished in
# fifteen.
_CHANNEL_OPTIONS: dict[str, int | str] = {
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
}


OTHER_WEIGHTS = "OTHER_WEIGHTS"


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
        try:
            await self._known_info(deadline)
        except ProtocolMismatch as error:
            if error.reason == OTHER_WEIGHTS:
                return Check.MISFIT
            raise
        return Check.SERVING

    async def _known_info(self, deadline: Deadline) -> ServerInfo:
        """As ever, and before every call: a replica of other weights is not asked even where there is no
        other. Raises ProtocolMismatch for it."""
        info = await super()._known_info(deadline)
        models = self._session.models(info)
        if self.fingerprint and all(one.model_fingerprint != self.fingerprint for one in models):
            self._session.forget_info()
            found = ", ".join(one.model_fingerprint.hex() for one in models) or "none"
            raise ProtocolMismatch(
                f"{self.target} serves the weights {found}, this client asks for {self.fingerprint.hex()}",
                reason=OTHER_WEIGHTS,
                details={"status": "FAILED_PRECONDITION", "target": self.target},
            )
        return info

    async def encode_for(
        self, streams: CallerStreams, items: Sequence[Item], deadline: Deadline, handling: RowsHandling
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """As ``encode_iter``, on these streams."""
        info = await self._known_info(deadline)
        await self._require_transport(deadline)
        resident = await self._session.resident.of_items_on_loop(info, items, handling, streams)
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
        ordinary = partial(self._fetch, info, deadline, streams)
        async with aclosing(resident.run_on_loop(deadline, streams, ordinary)) as stream:
            async for finished in stream:
                yield finished


def replica_opener(
    *,
    fingerprint: bytes,
    credentials: grpc.ChannelCredentials | None,
    tls: ClientTls | None,
    options: Mapping[str, int | str] | None,
    transport: TransportOptions,
    **arguments: Any,
) -> Callable[[str], ReplicaClient]:
    """What opens the client of a target, with these arguments of ``AsyncVisionEncoderClient``. What is wrong
    with them is found now, and all replicas follow the same files. Raises InvalidRequest."""
    files = followed_credentials(credentials, tls)
    followed = None if files is None or tls is None else FollowedTls(files, tls.server_name)
    token = TransportSettings(**transport).token_now
    bearer(token())
    of_all: TransportOptions = {**transport, "token": token}

    def open_client(target: str) -> ReplicaClient:
        client = ReplicaClient(
            target,
            credentials=credentials,
            tls=followed,
            options={**_CHANNEL_OPTIONS, **(options or {})},
            **arguments,
            **of_all,
        )
        client.fingerprint = fingerprint
        return client

    return open_client
