"""The calls of vision_encoder.v1.VisionEncoder on the pipeline.

Owns what a call is made of: its items, its deadline, what is refused as a whole. Every item's failure stays
its own; only a call that cannot be read at all fails as a whole. Streams of items are ``item_stream``'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from encoder_service.errors import (
    InvalidRequest,
    UnknownModel,
    VisionEncoderError,
)
from encoder_service.flights import Flight
from encoder_service.pipeline import Delivered, Pipeline
from encoder_service.rpc import convert, observed
from encoder_service.rpc.call_items import CallItem, CallItems
from encoder_service.rpc.item_stream import ItemStream
from encoder_service.rpc.resident_calls import release_all, renew_all
from encoder_service.rpc.status import abort, as_service_error, failure_of, status_of
from encoder_service.scheduler.admission import Admission
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.shared_memory import LeaseTerms, SharedMemory
from encoder_service.types import EncodedItem, Modality
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

    @property
    def instance_id(self) -> str:
        """Of this start of the server."""
        return self._info.instance_id

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
            statuses = [self._key_status(key, request.namespace) for key in request.keys]
            absent = {status.key: status for status in statuses if status.state == pb.KEY_STATE_ABSENT}
            found = await self._pipeline.lookup_shared(
                list(absent),
                namespace=request.namespace,
                deadline_s=deadline_of(context, self._pipeline.clock),
            )
            for status in statuses:
                if status.key in found and status.key in absent:
                    grid = found[status.key]
                    status.state, status.tier = pb.KEY_STATE_RESIDENT, pb.CACHE_TIER_SHARED
                    status.grid_thw.CopyFrom(convert.grid_to_proto(grid))
                    status.num_rows = self._pipeline.model.tower.num_rows(grid)
            return pb.LookupResponse(statuses=statuses)

        return await self._unary("Lookup", context, answer)

    async def prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        async def one(each: CallItem) -> pb.PrefetchStatus:
            try:
                announced = await each.ask(
                    lambda item: self._pipeline.prefetch(item, namespace=request.namespace)
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
            permit = self.requests.acquire(observed.this_call("Prefetch").num_bytes(request))
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
            return renew_all(self._shared, request)

        return await self._unary("Renew", context, answer)

    # -- streams ---------------------------------------------------------------------------------------

    async def encode(self, request: pb.EncodeRequest, context: Context) -> None:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(each: CallItem) -> Delivered:
            return await each.ask(
                lambda item: self._pipeline.encode(
                    item,
                    namespace=request.namespace,
                    deadline_s=deadline_s,
                    rows_ahead=item.modality is Modality.VIDEO and request.delivery in convert.INLINE,
                )
            )

        def check() -> None:
            self._check_call(request.namespace, request.model, len(request.items))

        with self._items(request) as items:
            await self._stream("Encode", context, request, check, one, items)

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        deadline_s = deadline_of(context, self._pipeline.clock)

        async def one(key: bytes) -> Delivered:
            return await self._pipeline.fetch(key, namespace=request.namespace, deadline_s=deadline_s)

        def check() -> None:
            self._check_call(request.namespace, "", len(request.keys))

        await self._stream("Fetch", context, request, check, one, request.keys)

    async def _stream(
        self,
        method: str,
        context: Context,
        call: pb.EncodeRequest | pb.FetchRequest,
        check: Callable[[], None],
        one: Callable[[Any], Coroutine[Any, Any, Delivered]],
        requests: Sequence[Any],
    ) -> None:
        watched = observed.this_call(method)
        try:
            check()
            terms = self._lease_terms(call)
            permit = self.requests.acquire(watched.num_bytes(call))
        except VisionEncoderError as error:
            await self._abort(method, context, error)
        status = "CANCELLED"
        try:
            stream = ItemStream(
                self._pipeline,
                self._shared,
                context,
                watched,
                namespace=call.namespace,
                tier=convert.tier_to_read(call.delivery),
                terms=terms,
                chunk_bytes=self._chunk_bytes,
            )
            await stream.run(one, requests)
            status = "OK"
        finally:
            permit.release()
            self._pipeline.metrics.count(self._pipeline.metrics.requests, method, status)

    def _lease_terms(self, call: pb.EncodeRequest | pb.FetchRequest) -> LeaseTerms | None:
        """How the caller wants its leases, or None when it wants inline rows. Raises TransportUnavailable,
        InvalidRequest."""
        convert.check_delivery(call.delivery, self._offered)
        if call.delivery in convert.INLINE:
            return None
        return convert.lease_terms(call.lease, convert.tier_to_read(call.delivery))

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
        self._pipeline.metrics.count(self._pipeline.metrics.requests, method, "OK")
        return response

    async def _abort(self, method: str, context: Context, error: VisionEncoderError) -> NoReturn:
        status, failure = status_of(error), failure_of(error)
        call = observed.this_call(method)
        call.refused(self._pipeline.metrics, failure, status.name)
        self._pipeline.metrics.count(self._pipeline.metrics.requests, method, status.name)
        await abort(context, error, call.trailers())


def deadline_of(context: Context, clock: Callable[[], float] = time.monotonic) -> float | None:
    """The call's deadline in the pipeline's clock, or None when the caller set none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock() + remaining_s
