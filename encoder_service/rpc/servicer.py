"""The calls of vision_encoder.v1.VisionEncoder on the pipeline.

Owns the parts of a call: its items, its deadline, and the checks that refuse it as a whole. An exception of a
handler is the failure of the call, which ``observed`` turns into its status. The failure of an item is in the
item's own event or status. ``item_stream`` owns streams of items, ``delivery`` the choice between places and
inline rows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from encoder_service.errors import InvalidRequest, StoreFull, UnknownModel
from encoder_service.inflight import InFlightEncode
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.rpc import convert, observed
from encoder_service.rpc.delivery import Delivery, RowsRequest
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.item_stream import EventWriter, ItemStream
from encoder_service.scheduler.admission import Permit
from encoder_service.store.embedding_store import RETRY_AFTER_MS
from encoder_service.types import EncodedItem, Item
from vision_encoder.v1 import encoder_pb2 as pb

Request = TypeVar("Request")
Context = grpc.aio.ServicerContext[Any, Any]

MAX_NAMESPACE_BYTES = 256
MAX_MODEL_NAME_BYTES = 256


class VisionEncoderServicer:
    """The handlers of all methods; ``rpc.server`` registers them."""

    def __init__(
        self,
        pipeline: Pipeline,
        info: pb.GetServerInfoResponse,
        reader: ItemReader,
        metrics: Metrics,
    ) -> None:
        """info: the answer of GetServerInfo. reader: reads the items of calls."""
        self.metrics = metrics
        self._pipeline = pipeline
        self._info = info
        self._reader = reader
        self._delivery = Delivery(pipeline, metrics)

    @property
    def instance_id(self) -> str:
        """Identifies this start of the server."""
        return self._info.instance_id

    # -- unary calls -----------------------------------------------------------------------------------

    async def get_server_info(self, request: pb.GetServerInfoRequest, _: Context) -> pb.GetServerInfoResponse:
        version, least = request.protocol_version, convert.MIN_PROTOCOL_VERSION
        if version and version < least:  # 0: the caller compares the versions itself
            raise InvalidRequest(f"protocol version {version} is too old, at least {least} is needed")
        return self._info

    async def lookup(self, request: pb.LookupRequest, _: Context) -> pb.LookupResponse:
        check_call(self._pipeline.model.name, request.namespace, "", len(request.keys))
        return pb.LookupResponse(statuses=[self._key_status(key, request.namespace) for key in request.keys])

    async def prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        deadline_s = self._deadline_s(context)

        async def announce(item: Item, permit: Permit | None) -> EncodedItem:
            if not request.until_encoded:
                return await self._pipeline.prefetch(
                    item, namespace=request.namespace, holder=holder, permit=permit
                )
            result = await self._pipeline.encode(
                item, namespace=request.namespace, holder=holder, permit=permit, deadline_s=deadline_s
            )
            encoded, is_stored = result.encoded, result.held.tier is not None
            result.release()
            if not is_stored:
                raise StoreFull(
                    f"{encoded.spec.num_bytes} bytes of rows are encoded, and there is no room to keep them",
                    retry_after_ms=RETRY_AFTER_MS,
                    needed_bytes=encoded.spec.num_bytes,
                )
            return encoded

        async def prefetch_item(index: int, message: pb.Item) -> pb.PrefetchStatus:
            try:
                announced = await self._reader.use(message, announce, holder, call.permit)
            except Exception as error:
                failure = call.item_failure(self.metrics, error, index, len(request.items))
                return pb.PrefetchStatus(failure=failure)
            return pb.PrefetchStatus(
                key=announced.key,
                content_digest=announced.content_digest,
                state=pb.KEY_STATE_IN_FLIGHT if announced.rows.is_meta else pb.KEY_STATE_RESIDENT,
                grid_thw=convert.grid_to_proto(announced.grid),
                num_rows=announced.spec.num_rows,
                timestamps_s=() if announced.clip is None else announced.clip.timestamps_s,
            )

        call = observed.this_call()
        holder = call.holder_of(request.namespace)
        check_call(self._pipeline.model.name, request.namespace, request.model, len(request.items))
        return pb.PrefetchResponse(
            statuses=await asyncio.gather(*itertools.starmap(prefetch_item, enumerate(request.items)))
        )

    async def touch(self, request: pb.TouchRequest, _: Context) -> pb.TouchResponse:
        check_namespace(request.namespace)
        touch = self._pipeline.store.touch
        num_read = sum(touch(request.namespace, row.key, row.generation) for row in request.rows)
        self._delivery.count_reads(request.namespace, num_read, request.num_lost)
        return pb.TouchResponse()

    # -- streams ---------------------------------------------------------------------------------------

    async def encode(self, request: pb.EncodeRequest, context: Context) -> None:
        deadline_s = self._deadline_s(context)
        call = observed.this_call()
        holder = call.holder_of(request.namespace)

        async def encode(item: Item, permit: Permit | None) -> EncodeResult:
            return await self._pipeline.encode(
                item, namespace=request.namespace, holder=holder, permit=permit, deadline_s=deadline_s
            )

        async def encode_item(message: pb.Item) -> EncodeResult:
            return await self._reader.use(message, encode, holder, call.permit)

        check_call(self._pipeline.model.name, request.namespace, request.model, len(request.items))
        await self._stream(context, request, encode_item, request.items)

    async def fetch(self, request: pb.FetchRequest, context: Context) -> None:
        deadline_s = self._deadline_s(context)

        async def fetch_key(key: bytes) -> EncodeResult:
            return await self._pipeline.fetch(key, namespace=request.namespace, deadline_s=deadline_s)

        check_call(self._pipeline.model.name, request.namespace, "", len(request.keys))
        await self._stream(context, request, fetch_key, request.keys)

    async def _stream(
        self,
        context: Context,
        request: pb.EncodeRequest | pb.FetchRequest,
        encode: Callable[[Request], Awaitable[EncodeResult]],
        items: Sequence[Request],
    ) -> None:
        tier = convert.requested_tier(request.delivery)
        if request.after_lost_read:
            self._delivery.count_reads(request.namespace, 0, len(items))
        requested = RowsRequest(request.namespace, tier, request.after_lost_read)
        call = observed.this_call()
        writer = EventWriter(context, self._pipeline.clock)
        stream = ItemStream(self._pipeline, self._delivery, writer, call, requested=requested)
        await stream.run(encode, items)

    # -- shared ----------------------------------------------------------------------------------------

    def _deadline_s(self, context: Context) -> float | None:
        """The call's deadline in the pipeline's clock; None without a deadline."""
        remaining_s = context.time_remaining()
        return None if remaining_s is None else self._pipeline.clock() + remaining_s

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
            case InFlightEncode():
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_IN_FLIGHT)
            case _:
                return pb.KeyStatus(key=key, state=pb.KEY_STATE_ABSENT)


def check_call(served: str, namespace: str, model: str, num_items: int) -> None:
    """Refuses the call as a whole. served: the model's name. Raises InvalidRequest, UnknownModel."""
    observed.this_call().num_items = num_items
    check_namespace(namespace)
    if len(model.encode()) > MAX_MODEL_NAME_BYTES:  # the error's trailing metadata repeats the name
        raise UnknownModel(
            f"the model name has {len(model.encode())} bytes, at most {MAX_MODEL_NAME_BYTES} are taken"
        )
    if model not in ("", served):
        raise UnknownModel(f"model {model!r} is not served here, {served!r} is", model=model)
    if not 1 <= num_items <= convert.MAX_ITEMS_PER_REQUEST:
        raise InvalidRequest(
            f"the call has {num_items} items, 1 to {convert.MAX_ITEMS_PER_REQUEST} are taken"
        )


def check_namespace(namespace: str) -> None:
    """Raises InvalidRequest for a name above MAX_NAMESPACE_BYTES."""
    if len(namespace.encode()) > MAX_NAMESPACE_BYTES:
        raise InvalidRequest(
            f"namespace has {len(namespace.encode())} bytes, at most {MAX_NAMESPACE_BYTES} are taken"
        )
