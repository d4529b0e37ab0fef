"""The calls of vision_encoder.v1.VisionEncoder on the pipeline.

Owns what a call is made of: its items, deadline, cancellation and stream. Every item's failure stays its
own; only a call that cannot be read at all fails as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from encoder_service.errors import (
    InvalidRequest,
    TransportUnavailable,
    UnknownLease,
    UnknownModel,
    VisionEncoderError,
)
from encoder_service.flights import Flight
from encoder_service.pipeline import Delivered, Pipeline
from encoder_service.rpc import convert, observed
from encoder_service.rpc.call_items import CallItem, CallItems
from encoder_service.rpc.resident_calls import release_all
from encoder_service.rpc.status import abort, as_service_error, failure_of, status_of
from encoder_service.rpc.unread import Unread
from encoder_service.scheduler.admission import Admission
from encoder_service.store.tiers import tier_of
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms, SharedMemory
from encoder_service.types import EncodedItem
from encoder_service.urls.fetch import UrlFetcher
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]

MAX_NAMESPACE_BYTES = 256
MAX_MODEL_NAME_BYTES = 256


class VisionEncoderServicer:
    """Handlers by method name; ``rpc.server`` registers them."""

    def __init__(
        self,
        pipeline: Pipeline,
        info: pb.GetServerInfoResponse,
        *,
        max_items: int,
        chunk_bytes: int,
        max_request_bytes: int,
        shared: SharedMemory | None = None,
        pixels: PixelInput | None = None,
        urls: UrlFetcher | None = None,
    ) -> None:
        """shared: delivery by shared memory, where it is on; pixels: pixel tensors that come so; urls:
        fetches URL items, where they are taken."""
        self._urls = urls
        self._pixels = PixelInput() if pixels is None else pixels
        self._pipeline = pipeline
        self._info = info
        self._offered = frozenset(transport.delivery for transport in info.transports)
        self._shared = shared
        self._max_items = max_items
        self._chunk_bytes = chunk_bytes
        # Messages of the calls in progress: content is held from here on, also by callers that join a
        # flight or whose content still waits to be hashed, whom no item's permit counts.
        self.requests = Admission(0, max_request_bytes)

    # -- unary calls -----------------------------------------------------------------------------------

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async def answer() -> pb.GetServerInfoResponse:
            # Zero is a caller that does not say; it is shown the versions and decides for itself.
            version = request.protocol_version
            if version and version < convert.MIN_PROTOCOL_VERSION:
                least = convert.MIN_PROTOCOL_VERSION
                raise InvalidRequest(f"protocol version {version} is too old, at least {least} is needed")
            return self._info

        return await self._unary("GetServerInfo", context, answer)

    async def lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        async def answer() -> pb.LookupResponse:
            self._check_call(request.namespace, "", len(request.keys))
            return pb.LookupResponse(
                statuses=[self._key_status(key, request.namespace) for key in request.keys]
            )

        return await self._unary("Lookup", context, answer)

    async def prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        async def one(each: CallItem) -> pb.PrefetchStatus:
            try:
                announced = await each.ask(
                    lambda item: self._pipeline.prefetch(
                        item, namespace=request.namespace, priority=request.priority
                    )
                )
            except Exception as error:
                failure = failure_of(error)
                observed.this_call("Prefetch").failed(self._pipeline.metrics, failure)
                return pb.PrefetchStatus(failure=failure)
            return pb.PrefetchStatus(
                key=announced.key,
                content_digest=announced.content_digest,
                state=pb.KEY_STATE_RESIDENT if announced.resident else pb.KEY_STATE_IN_FLIGHT,
                grid_thw=convert.grid_to_proto(announced.grid),
                num_rows=announced.num_rows,
            )

        async def answer() -> pb.PrefetchResponse:
            self._check_call(request.namespace, request.model, len(request.items))
            permit = self.requests.acquire(request.ByteSize())
            try:
                return pb.PrefetchResponse(statuses=await asyncio.gather(*map(one, items)))
            finally:
                permit.release()

        with self._items(request) as items:
            return await self._unary("Prefetch", context, answer)

    async def release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        async def answer() -> pb.ReleaseResponse:
            self._check_call("", "", len(request.lease_ids))
            if self._shared is None:
                return pb.ReleaseResponse(unknown_lease_ids=request.lease_ids)
            return release_all(self._shared, request)

        return await self._unary("Release", context, answer)

    async def renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        async def answer() -> pb.RenewResponse:
            self._check_call("", "", len(request.lease_ids))
            return pb.RenewResponse(
                statuses=[self._renewed(lease_id, request) for lease_id in request.lease_ids]
            )

        return await self._unary("Renew", context, answer)

    def _renewed(self, lease_id: bytes, request: pb.RenewRequest) -> pb.LeaseStatus:
        ttl_s, owner_id = convert.lease_s(request.extend_ms), convert.owner_id(request.owner_id) or None
        try:
            expires_at_unix_ms = self._leases(lease_id).renew(lease_id, ttl_s, owner_id)
        except VisionEncoderError as error:
            return pb.LeaseStatus(lease_id=lease_id, failure=failure_of(error))
        return pb.LeaseStatus(lease_id=lease_id, expires_at_unix_ms=expires_at_unix_ms)

    # -- streams ---------------------------------------------------------------------------------------

    async def encode(
        self, request: pb.EncodeRequest, context: Context
    ) -> AsyncIterator[pb.ItemEvent | bytes]:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(each: CallItem) -> Delivered:
            return await each.ask(
                lambda item: self._pipeline.encode(
                    item, namespace=request.namespace, priority=request.priority, deadline_s=deadline_s
                )
            )

        async def check() -> None:
            self._check_call(request.namespace, request.model, len(request.items))

        with self._items(request) as items:
            async for event in self._stream("Encode", context, request, check, one, items):
                yield event

    async def fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.ItemEvent | bytes]:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(key: bytes) -> Delivered:
            return await self._pipeline.fetch(key, namespace=request.namespace, deadline_s=deadline_s)

        async def check() -> None:
            self._check_call(request.namespace, "", len(request.keys))

        async for event in self._stream("Fetch", context, request, check, one, request.keys):
            yield event

    async def _stream(
        self,
        method: str,
        context: Context,
        call: pb.EncodeRequest | pb.FetchRequest,
        check: Callable[[], Awaitable[None]],
        one: Callable[[Any], Awaitable[Delivered]],
        requests: Sequence[Any],
    ) -> AsyncIterator[pb.ItemEvent | bytes]:
        """Runs ``one`` for every request at once and yields each outcome as it comes; while the caller leaves
        much unread, items that have not begun wait. When the caller leaves, the tasks of what it still waits
        for are cancelled."""
        try:
            await check()
            terms = self._lease_terms(call)
            tier = convert.tier_to_read(call.delivery)
            permit = self.requests.acquire(call.ByteSize())
        except VisionEncoderError as error:
            await self._abort(method, context, error)
        finished: asyncio.Queue[int] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[Delivered]] = {}
        unread = Unread(self._pipeline.undelivered)
        watched, metrics = observed.this_call(method), self._pipeline.metrics

        async def one_when_read(request: Any) -> Delivered:
            await unread.wait_for_room()
            if terms is not None:  # nothing is encoded for a delivery that cannot be
                self._shared_memory().check_owner(terms.owner_id, call.namespace)
            delivered = await one(request)
            try:
                delivered = await self._pipeline.placed(delivered, call.namespace, tier)
            except BaseException:
                delivered.release()
                raise
            unread.add(delivered)
            return delivered

        async def lower(delivered: Delivered) -> Delivered:
            try:
                lowered = await self._pipeline.placed(delivered, call.namespace, "host")
            except BaseException:
                unread.remove(delivered)
                raise
            unread.replace(delivered, lowered)
            return lowered

        def begin(index: int, work: Coroutine[Any, Any, Delivered]) -> None:
            tasks[index] = asyncio.ensure_future(work)
            tasks[index].add_done_callback(lambda _: finished.put_nowait(index))

        for index, request in enumerate(requests):
            begin(index, watched.item(index, one_when_read(request)))
        lowering: set[int] = set()
        status = "CANCELLED"
        try:
            while tasks:
                index = await finished.get()
                delivered = None
                try:
                    delivered = tasks.pop(index).result()
                    leased = None if index in lowering else self._lease(delivered, call.namespace, terms)
                except (Exception, asyncio.CancelledError) as error:
                    if delivered is not None:  # makes room for those that wait for it
                        unread.remove(delivered)
                    failure = failure_of(error)
                    watched.failed(metrics, failure, index)
                    yield pb.ItemEvent(item_index=index, failure=failure)
                    continue
                if leased is None and tier_of(delivered.held) == "device":  # chunks are cut on the host
                    lowering.add(index)
                    begin(index, lower(delivered))
                    continue
                yield convert.result_event(index, delivered, self._chunk_bytes, leased)
                if leased is None:
                    for chunk in convert.chunk_events(index, delivered.encoded.rows, self._chunk_bytes):
                        yield chunk
                transport = "inline" if leased is None else leased.arena.kind
                watched.delivered(metrics, delivered, index, transport, self._pipeline.clock())
                unread.remove(delivered)
                del delivered  # sent: the rows are the store's alone again
            status = "OK"
        finally:
            for task in tasks.values():
                task.cancel()
            unread.clear()
            permit.release()
            self._pipeline.metrics.requests.labels(method, status).inc()

    def _lease_terms(self, call: pb.EncodeRequest | pb.FetchRequest) -> LeaseTerms | None:
        """How the caller wants its leases, or None when it wants inline rows. Raises TransportUnavailable,
        InvalidRequest."""
        convert.check_delivery(call.delivery, self._offered)
        if call.delivery in convert.INLINE:
            return None
        return convert.lease_terms(call.lease, convert.tier_to_read(call.delivery))

    def _lease(self, delivered: Delivered, namespace: str, terms: LeaseTerms | None) -> LeasedRows | None:
        """The rows under a lease; None when they go inline. Raises TransportUnavailable."""
        held = delivered.held
        if terms is None or held is None:
            return None
        return self._shared_memory().lease(held, namespace, terms)

    def _shared_memory(self) -> SharedMemory:
        if self._shared is None:
            raise TransportUnavailable("this server shares no memory; ask for inline rows")
        return self._shared

    def _leases(self, lease_id: bytes) -> SharedMemory:
        """Where leases are known. Raises UnknownLease on a server that gives none."""
        if self._shared is None:
            raise UnknownLease(f"lease {lease_id.hex()} is not held here", lease_id=lease_id.hex())
        return self._shared

    # -- shared ----------------------------------------------------------------------------------------

    def _check_call(self, namespace: str, model: str, num_items: int) -> None:
        """Raises what concerns the call as a whole: InvalidRequest, UnknownModel."""
        if len(namespace.encode()) > MAX_NAMESPACE_BYTES:
            raise InvalidRequest(
                f"namespace has {len(namespace.encode())} bytes, at most {MAX_NAMESPACE_BYTES} are taken"
            )
        if len(model.encode()) > MAX_MODEL_NAME_BYTES:  # an answer that repeats it must fit into the trailers
            raise UnknownModel(
                f"the model name has {len(model.encode())} bytes, at most {MAX_MODEL_NAME_BYTES} are taken"
            )
        if model not in ("", self._pipeline.model.name):
            raise UnknownModel(
                f"model {model!r} is not served here, {self._pipeline.model.name!r} is", model=model
            )
        if not 1 <= num_items <= self._max_items:
            raise InvalidRequest(f"the call has {num_items} items, 1 to {self._max_items} are taken")

    def _items(self, request: pb.EncodeRequest | pb.PrefetchRequest) -> CallItems:
        return CallItems(
            request.items,
            request.namespace,
            source=self._pixels,
            admission=self.requests,
            workers=self._pipeline.workers,
            urls=self._urls,
        )

    def _key_status(self, key: bytes, namespace: str) -> pb.KeyStatus:
        match self._pipeline.lookup(key, namespace=namespace):
            case EncodedItem() as encoded:
                return pb.KeyStatus(
                    key=key,
                    state=pb.KEY_STATE_RESIDENT,
                    grid_thw=convert.grid_to_proto(encoded.grid),
                    num_rows=encoded.spec.num_rows,
                    tier=pb.CACHE_TIER_DEVICE if encoded.rows.is_cuda else pb.CACHE_TIER_HOST,
                )
            case Flight():
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_IN_FLIGHT)
            case _:
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_ABSENT)

    async def _unary(
        self, method: str, context: Context, answer: Callable[[], Awaitable[Response]]
    ) -> Response:
        try:
            response = await answer()
        except Exception as error:
            await self._abort(method, context, as_service_error(error))
        self._pipeline.metrics.requests.labels(method, "OK").inc()
        return response

    async def _abort(self, method: str, context: Context, error: VisionEncoderError) -> NoReturn:
        status, failure = status_of(error), failure_of(error)
        call = observed.this_call(method)
        call.refused(self._pipeline.metrics, failure, status.name)
        self._pipeline.metrics.requests.labels(method, status.name).inc()
        await abort(context, error, call.trailers())


def deadline_of(context: Context, clock: Callable[[], float] = time.monotonic) -> float | None:
    """The call's deadline in the pipeline's clock, or None when the caller set none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock() + remaining_s
