"""Calls to the service: the RPCs to one address, and the streams of events that become items' outcomes.

Owns deadlines, the server's information, and what is repeated: an item whose rows were lost, once, inline; a
failed call, once, if ``routing`` says so; what an overloaded server refused, when ``window`` grants it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from lm_adapter import convert
from lm_adapter.assembly import Assembler, PlacedRows
from lm_adapter.channel import Channel, Metadata
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ProtocolMismatch,
    StreamViolation,
    from_rpc_error,
)
from lm_adapter.routing import Direct, Routes
from lm_adapter.types import EncodedRows, ModelInfo, Outcome, ServerInfo
from lm_adapter.window import Permits, Window, is_overload, pause_s
from vision_encoder.layout.keys import GATEWAY_KEY, ROUTING_KEY
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from lm_adapter.resident import ResidentRows

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_TIMEOUT_S = 365 * 86_400.0
"""Longer timeouts are cut to this, also infinite ones: gRPC treats a deadline beyond its range as past."""
MIN_INFO_AGE_S = 1.0
"""Younger information is kept when another server answers: several servers may share the address."""
INSTANCE_KEY = "x-instance-id"
"""Trailing metadata: the ``instance_id`` of the server that answered."""
_SERVICE = pb.DESCRIPTOR.services_by_name["VisionEncoder"].full_name

ResponseT = TypeVar("ResponseT", bound=Message)


class Deadline:
    """The time left of one call that may take several RPCs."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}, needs to be above 0")
        self._expires_at_s = time.monotonic() + min(timeout_s, MAX_TIMEOUT_S)

    @property
    def left_s(self) -> float:
        """Never negative: gRPC answers 0 with DEADLINE_EXCEEDED."""
        return max(0.0, self._expires_at_s - time.monotonic())


class Server:
    """The server at one address: its RPCs, and the information that it gave. For one event loop."""

    def __init__(
        self,
        target: str,
        channel: Channel,
        routing: Direct,
        window: Window,
        on_info: Callable[[ServerInfo], None],
    ) -> None:
        """on_info: is called with each information that the server gives, and may refuse it by raising."""
        self.target = target
        self.info: ServerInfo | None = None
        """None: not known, or void."""
        self.routing = routing
        self.window = window
        self._is_gateway = False
        self._channel = channel
        self._on_info = on_info
        self._info_lock = asyncio.Lock()
        self._info_time_s = 0.0
        self._pid = os.getpid()
        self._is_closed = False

    async def close(self) -> None:
        """Ends calls in progress with CallCancelled. Can be repeated."""
        self._is_closed = True
        self.window.close()
        await self._channel.close()

    def check_open(self, method: str) -> None:
        """Raises CallCancelled."""
        if os.getpid() != self._pid:
            raise CallCancelled(f"{method} at {self.target}: the client belongs to the parent process")
        if self._is_closed:
            raise self._closed_during(method)

    async def known_info(self, deadline: Deadline, max_age_s: float = math.inf) -> ServerInfo:
        """The server's information, requested if it is unknown or older. Raises CallFailed, and
        InvalidRequest at a gateway if calls are not routed."""
        info = await self._info(deadline, max_age_s)
        if self._is_gateway and not self.routing.is_routed:
            raise InvalidRequest(
                f"{self.target} is a gateway before several encoders, and this client is for one encoder: "
                "use fleet=True, or --fleet"
            )
        return info

    async def _info(self, deadline: Deadline, max_age_s: float) -> ServerInfo:
        self.check_open("GetServerInfo")
        known = self.info
        age_s = time.monotonic() - self._info_time_s
        if known is not None and age_s <= min(max_age_s, self.routing.max_info_age_s):
            return known
        try:
            async with asyncio.timeout(deadline.left_s), self._info_lock:
                if self.info is not None and self.info is not known:
                    return self.info
                return await self.request_info(deadline)
        except (EncoderUnavailable, EncoderOverloaded):
            if self.info is None:
                raise
            return self.info
        except TimeoutError as error:
            raise DeadlineExceeded(f"the server at {self.target} did not describe itself in time") from error

    async def request_info(self, deadline: Deadline) -> ServerInfo:
        """Raises CallFailed."""
        request = pb.GetServerInfoRequest(protocol_version=PROTOCOL_VERSION)
        # While the service is overloaded, calls use what is known.
        waits = self.window.waits and self.info is None
        response = await self.unary("GetServerInfo", request, pb.GetServerInfoResponse, deadline, waits=waits)
        info = convert.server_info(response)
        if info.min_protocol_version > PROTOCOL_VERSION or info.protocol_version < MIN_PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the server at {self.target} speaks protocol versions {info.min_protocol_version} to "
                f"{info.protocol_version}, this adapter {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: "
                f"install the server's version of vision-encoder, {info.server_version}, on both sides"
            )
        self.info = None
        self._on_info(info)
        self._info_time_s = time.monotonic()
        self.info = info
        return info

    def forget_info(self) -> None:
        """The next call requests it again."""
        self.info = None

    async def is_serving(self, deadline: Deadline) -> bool:
        """The answer of grpc.health.v1. Raises CallFailed."""
        response = await self._unary_once("Check", b"", deadline, service="grpc.health.v1.Health")
        # HealthCheckResponse: field 1 (status) has the value 1 (SERVING).
        return response.startswith(b"\x08\x01")

    async def unary(
        self,
        method: str,
        request: Message,
        response_type: type[ResponseT],
        deadline: Deadline,
        route: bytes | None = None,
        *,
        waits: bool = False,
    ) -> ResponseT:
        """One RPC, and its repeats. route: its routing digest. waits: while the server is overloaded. Raises
        CallFailed."""
        message = request.SerializeToString()
        is_repeated = False
        while True:
            try:
                response = await self._unary_once(method, message, deadline, route)
                break
            except EncoderOverloaded as error:
                wait_s = pause_s(error)
                if not (waits and error.retryable and wait_s < deadline.left_s):
                    raise
            except CallFailed as error:
                repeat_s = self.routing.pause_s(error, deadline.left_s, 0)
                if repeat_s is None or is_repeated or not self.routing.repeats_unary:
                    raise
                wait_s, is_repeated = repeat_s, True
            await asyncio.sleep(min(wait_s, deadline.left_s))
        try:
            return response_type.FromString(response)
        except DecodeError as error:
            raise StreamViolation(
                f"{method} answered {len(response)} bytes that are not a message"
            ) from error

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        request: Message,
        deadline: Deadline,
        route: bytes | None,
        num_items: int,
        outcomes: Mapping[int, Outcome],
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The serialised messages of one RPC, which ends with the block. Raises CallFailed.

        num_items, outcomes: of the whole call, for the texts of errors."""
        self.check_open(method)
        # Without a deserialiser, messages arrive as bytes.
        start: Any = self._channel.current().unary_stream(f"/{_SERVICE}/{method}")
        rpc = start(request.SerializeToString(), timeout=deadline.left_s, metadata=self._metadata(route))
        try:
            with self._adapter_errors(method, num_items, outcomes):
                yield rpc
                self._note_instance(await rpc.trailing_metadata())
        finally:
            rpc.cancel()

    async def _unary_once(
        self,
        method: str,
        request: bytes,
        deadline: Deadline,
        route: bytes | None = None,
        *,
        service: str = _SERVICE,
    ) -> bytes:
        self.check_open(method)
        # Without serialisers, messages are bytes.
        start: Any = self._channel.current().unary_unary(f"/{service}/{method}")
        with self._adapter_errors(method):
            rpc = start(request, timeout=deadline.left_s, metadata=self._metadata(route))
            response: bytes = await rpc
            self._note_instance(await rpc.trailing_metadata())
            if method == "GetServerInfo":
                self._is_gateway = GATEWAY_KEY in dict(await rpc.initial_metadata())
        return response

    def _metadata(self, route: bytes | None) -> Metadata:
        headers = self._channel.metadata()
        return headers if route is None else (*headers, (ROUTING_KEY, route.hex()))

    def _note_instance(self, trailers: Any) -> None:
        """Voids the information when another instance has answered."""
        info = self.info
        if info is None or time.monotonic() - self._info_time_s < MIN_INFO_AGE_S:
            return
        if dict(trailers or ()).get(INSTANCE_KEY, info.instance_id) != info.instance_id:
            self._server_ended()

    def _server_ended(self) -> None:
        if not self.routing.keeps_info:
            self.forget_info()

    @contextlib.contextmanager
    def _adapter_errors(
        self, method: str, num_items: int = 0, outcomes: Mapping[int, Outcome] | None = None
    ) -> Iterator[None]:
        """Replaces gRPC's errors by the adapter's.

        gRPC may cancel the tasks that wait for a channel that is being closed, and may state the cancellation
        of a task as the status CANCELLED. Only the task itself knows whether it was cancelled."""
        try:
            yield
        except (grpc.RpcError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            is_cancelled = task is not None and task.cancelling() > 0
            if isinstance(error, asyncio.CancelledError):
                if self._is_closed and not is_cancelled:
                    raise self._closed_during(method) from error
                raise
            if is_cancelled and error.code() is grpc.StatusCode.CANCELLED:
                raise asyncio.CancelledError from error
            if self._is_closed:
                raise self._closed_during(method) from error
            failure = from_rpc_error(
                error,
                target=self.target,
                method=method,
                num_items=num_items,
                num_arrived=len(outcomes or ()),
            )
            if isinstance(failure, EncoderUnavailable):
                self._server_ended()
            raise failure from error

    def _closed_during(self, method: str) -> CallCancelled:
        return CallCancelled(f"{method} at {self.target} was cancelled: the client is closed")


@dataclass
class RowsCall:
    """One ``encode`` or ``fetch``, which may take several RPCs, and the outcomes of its items.

    request: makes a message without items or keys. models: whose geometry rows may have. max_rows_bytes:
    limit of one item. resident: reads located rows; None: rows come inline. routes, outcomes: by the caller's
    index, of all num_items."""

    server: Server
    request: Callable[[], pb.EncodeRequest | pb.FetchRequest]
    info: ServerInfo
    models: Sequence[ModelInfo]
    max_rows_bytes: int
    resident: ResidentRows | None
    deadline: Deadline
    num_items: int
    routes: Routes = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    async def read_listed(self, keys: Mapping[int, bytes]) -> None:
        """Takes the rows that the directory in shared memory lists."""
        if self.resident is not None and keys:
            self.outcomes.update(await self.resident.read_listed(keys))

    async def run(self, groups: Sequence[Mapping[int, pb.Item | bytes]]) -> list[Outcome]:
        """Requests groups of items or keys, by the caller's index. Returns all outcomes, in order. Raises
        CallFailed, with the outcomes that had come."""
        try:
            await self.server.routing.run_each(self._run_group, groups)
        except CallFailed as error:
            error.completed = dict(self.outcomes)
            raise
        return [self._noted(self.outcomes[index]) for index in range(self.num_items)]

    def _noted(self, outcome: Outcome) -> Outcome:
        """With the fact that a first copy of the rows was lost."""
        if self.resident is None or not isinstance(outcome, EncodedRows):
            return outcome
        return replace(outcome, was_lost=True) if outcome.key in self.resident.lost else outcome

    async def _run_group(self, group: Mapping[int, pb.Item | bytes]) -> None:
        window, routing = self.server.window, self.server.routing
        ticket, is_repeated = window.ticket(), False
        lost: set[int] = set()
        while missing := [index for index in group if index not in self.outcomes]:
            first = [index for index in missing if index not in lost]
            indices = first or missing
            async with window.permits(ticket, len(indices), self.deadline) as permits:
                entries = {index: group[index] for index in indices[: permits.num_left]}
                try:
                    await self._stream(entries, self.resident if first else None, lost, permits)
                except CallFailed as error:
                    num_bytes = sum(item.ByteSize() for item in entries.values() if isinstance(item, pb.Item))
                    repeat_s = routing.pause_s(error, self.deadline.left_s, num_bytes)
                    if repeat_s is None or is_repeated:
                        failure = routing.item_failure(error)
                        if failure is None:
                            raise
                        self.outcomes.update(dict.fromkeys(entries, failure))
                        continue
                    is_repeated = True
                    await asyncio.sleep(min(repeat_s, self.deadline.left_s))

    async def _stream(
        self, entries: Mapping[int, Any], resident: ResidentRows | None, lost: set[int], permits: Permits
    ) -> None:
        """One RPC for these items or keys. Adds to the outcomes, and to ``lost`` the indices of lost rows.
        Refused items get no outcome. resident: None for rows inline. Raises CallFailed."""
        request = self.request()
        request.delivery = pb.DELIVERY_INLINE if resident is None else resident.memory.delivery
        request.after_lost_read = not lost.isdisjoint(entries)
        digests: list[bytes | None] = [None] * len(entries)
        keys: Sequence[bytes] = ()
        if isinstance(request, pb.EncodeRequest):
            method = "Encode"
            request.items.extend(entries.values())
            digests = [item.content_digest or None for item in request.items]
        else:
            method = "Fetch"
            request.keys.extend(entries.values())
            keys = request.keys
        assembler = Assembler(
            digests,
            keys=keys,
            models=self.models,
            max_rows_bytes=self.max_rows_bytes,
            allows_places=resident is not None,
        )
        indices = list(entries)
        async with self.server.stream(
            method, request, self.deadline, self.routes.get(indices[0]), self.num_items, self.outcomes
        ) as messages:
            async for message in messages:
                event = assembler.feed(message)
                if isinstance(event, PlacedRows):
                    assert resident is not None
                    position, outcome = event.position, await resident.read_placed(event)
                elif event is not None:
                    position, outcome = event
                else:
                    continue
                if outcome is None:
                    lost.add(indices[position])
                    continue
                if is_overload(outcome):
                    permits.refuse(outcome)
                    continue
                if isinstance(outcome, EncodedRows):
                    self.server.routing.note_key(outcome.key, self.routes.get(indices[position]))
                self.outcomes[indices[position]] = outcome
                permits.end()
                if isinstance(outcome, InvalidRows):
                    self.server.forget_info()  # it may serve another model now
        assembler.finish()
