"""One encoder or a fleet of them, for the connector and for the front.

Owns what ``target`` and ``--encoder`` may say, and the difference between the two when rows are fetched. A
request may name the replica that has an image's rows. The name is compared with the replicas that this
process found by itself, so that no address of a request is ever connected to.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Protocol, TypeAlias

from lm_adapter.async_client import AsyncVisionEncoderClient
from lm_adapter.engines.vllm_access import tls_of_service
from lm_adapter.engines.vllm_items import WantedRows
from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.fleet import AsyncFleetClient, DnsEndpoints, FleetSettings
from lm_adapter.transport.channel import ClientTls
from lm_adapter.transport.followed import TokenFile
from lm_adapter.types import Outcome

__all__ = ["EncoderClient", "RowsSource", "Target", "is_fleet", "open_client", "read_target", "rows_source"]

logger = logging.getLogger("vllm.vision_encoder")

Target: TypeAlias = str | tuple[str, ...]
"""Of one encoder, gRPC's form; of a fleet ``dns:///name:port``, or several addresses."""
EncoderClient: TypeAlias = AsyncVisionEncoderClient | AsyncFleetClient

SERVICE = "dns:///"
# An encoder that was away for some time is looked for again at least this often.
RECONNECT = {"grpc.max_reconnect_backoff_ms": 500}
MAX_KNOWN = 4096
MAX_NAMED = 8
NOT_FOUND = 5


def read_target(value: object, name: str) -> Target:
    """An address, a headless service ``dns:///name:port``, or several addresses: in a list, or with commas
    between them. Raises InvalidRequest; name: of the setting."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise InvalidRequest(
            f"{name} is {value!r:.200}, needs host:port, dns:///name:port or a list of host:port"
        )
    targets = tuple(dict.fromkeys(part.strip() for part in parts))
    if not targets or not all(targets):
        raise InvalidRequest(f"{name} is {value!r:.200}, which has an empty address")
    services = [target for target in targets if target.startswith(SERVICE)]
    if services and len(targets) > 1:
        raise InvalidRequest(
            f"{name} has {len(targets)} addresses and {services[0]} among them: a name stands alone"
        )
    for service in services:
        DnsEndpoints(service)
    return targets[0] if len(targets) == 1 else targets


def is_fleet(target: Target) -> bool:
    """Whether the target stands for several encoders."""
    return not isinstance(target, str) or target.startswith(SERVICE)


def open_client(
    target: Target,
    *,
    namespace: str = "",
    model: str = "",
    token: str | TokenFile = "",
    tls: ClientTls | None = None,
    timeout_s: float,
    transports: tuple[str, ...],
    broker_path: str = "",
    settings: FleetSettings | None = None,
) -> EncoderClient:
    """On the running loop; see ``AsyncVisionEncoderClient``. With TLS, encoders behind ``dns:///name:port``
    are known by that name. settings: of a fleet."""
    if isinstance(target, str) and not is_fleet(target):
        return AsyncVisionEncoderClient(
            target,
            namespace=namespace,
            model=model,
            timeout_s=timeout_s,
            transports=transports,
            broker_path=broker_path,
            token=token,
            tls=tls,
            options=RECONNECT,
        )
    if tls is not None and isinstance(target, str):
        tls = tls_of_service(tls, target)
    return AsyncFleetClient(
        target,
        settings=settings,
        namespace=namespace,
        model=model,
        timeout_s=timeout_s,
        transports=transports,
        broker_path=broker_path,
        token=token,
        tls=tls,
        options=RECONNECT,
    )


class RowsSource(Protocol):
    """Where the connector's rows come from."""

    async def fetch(self, wanted: WantedRows, timeout_s: float) -> Outcome:
        """Rows by key. Raises EncoderError."""

    def note(self) -> None:
        """Logs how rows come, where that has changed."""

    async def close(self) -> None: ...


def rows_source(client: EncoderClient) -> RowsSource:
    """Of a client that is this source's from now on."""
    return EncoderFleet(client) if isinstance(client, AsyncFleetClient) else OneEncoder(client)


class OneEncoder:
    """Names of replicas mean nothing here."""

    def __init__(self, client: AsyncVisionEncoderClient) -> None:
        self._client = client
        self._transport = ""

    async def fetch(self, wanted: WantedRows, timeout_s: float) -> Outcome:
        assert wanted.key is not None
        return (await self._client.fetch([wanted.key], timeout_s=timeout_s))[0]

    def note(self) -> None:
        choice = self._client.transport
        if choice.name != self._transport:
            self._transport = choice.name
            logger.info("image rows come by %s: %s", choice.name, choice.reason)

    async def close(self) -> None:
        await self._client.close()


class EncoderFleet:
    """Asks the replica that the request names, where it is one of those known here, and then all of them.

    A key that nobody knows may still come while somebody could not be asked: a replica that was added just
    now, which the front may know before this process does, or, for a request that names none, one that is
    away. Rows of a replica that is known and away are as good as lost: their request is better sent anew.
    """

    def __init__(self, client: AsyncFleetClient) -> None:
        self._client = client
        self._known: OrderedDict[str, None] = OrderedDict()
        self._noted = ""

    async def fetch(self, wanted: WantedRows, timeout_s: float) -> Outcome:
        assert wanted.key is not None
        first = [wanted.replica] if wanted.replica else []
        (outcome,) = await self._client.fetch([wanted.key], first=first, timeout_s=timeout_s)
        self._note_known()
        if isinstance(outcome, ItemFailed) and outcome.reason == "UNKNOWN_KEY":
            unasked = self._unasked(wanted.replica)
            if unasked:
                return ItemFailed(
                    f"{outcome.message}; {unasked}",
                    reason=outcome.reason,
                    status=NOT_FOUND,
                    retryable=True,
                )
        return outcome

    def _unasked(self, replica: str) -> str:
        """Who may have a key that nobody else has; empty for nobody."""
        if replica in self._known:
            return ""
        if replica:
            return f"{replica!r:.80}, said to have it, is no replica known here"
        away = [one.target for one in self._client.replicas if one.state != "up"]
        return f"not asked: {', '.join(away[:MAX_NAMED])}" if away else ""

    def note(self) -> None:
        replicas = ", ".join(
            f"{one.target} {one.state}{' in shared memory' if one.is_local else ''}"
            for one in self._client.replicas
        )
        if replicas != self._noted:
            self._noted = replicas
            logger.info("image rows come from %s", replicas)

    async def close(self) -> None:
        await self._client.close()

    def _note_known(self) -> None:
        for one in self._client.replicas:
            self._known[one.target] = None
            self._known.move_to_end(one.target)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
