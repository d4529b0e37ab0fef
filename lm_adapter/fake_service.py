"""What ``testing.FakeEncoder`` answers: the v1 service over made-up rows.

Owns the handlers and the counts. Identity, keys, failures, chunking and trailing metadata
are those of the real service; there is no tower, no queue and no store of rows, since rows are computed from
digests. numpy only.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from lm_adapter import convert
from lm_adapter.errors import FAILURE_METADATA_KEY, EncoderError, ItemFailed
from lm_adapter.fake_faults import Fault, faulty
from lm_adapter.fake_script import CallRecord, FakeScript, fake_rows
from lm_adapter.keys import content_digest, embedding_key, packed_digest
from lm_adapter.types import DIGEST_BYTES, Grid, Modality, PreprocessOptions
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["FakeService"]

MAX_CALL_RECORDS = 10_000
Context = grpc.ServicerContext
_MODALITY_NUMBERS = {Modality.IMAGE: pb.MODALITY_IMAGE, Modality.VIDEO: pb.MODALITY_VIDEO}
_STATUS_NUMBERS = {"INVALID_REQUEST": 3, "INVALID_DIGEST": 3, "UNSUPPORTED_CONTENT": 3, "UNKNOWN_KEY": 5}


class _Held(NamedTuple):
    """Rows that the fake can make again."""

    namespace: str
    digest: bytes
    grid: Grid


class FakeService:
    """Handlers of one server run. ``stopping`` ends every wait."""

    def __init__(self, script: FakeScript) -> None:
        self.script = script
        self.instance_id = secrets.token_hex(8)
        self.stopping = threading.Event()
        self.resumed = threading.Event()
        self.num_calls: Counter[str] = Counter()
        self.num_cancelled: Counter[str] = Counter()
        self.calls: deque[CallRecord] = deque(maxlen=MAX_CALL_RECORDS)
        self._held: dict[bytes, _Held] = {}
        self._lock = threading.Lock()

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        unary: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_unary_rpc_method_handler
        stream: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_stream_rpc_method_handler
        service = pb.DESCRIPTOR.services_by_name["VisionEncoder"].full_name
        # Responses leave as bytes, so that a fault can send what is no message.
        methods = {
            "GetServerInfo": unary(self._get_server_info, pb.GetServerInfoRequest.FromString),
            "Lookup": unary(self._lookup, pb.LookupRequest.FromString),
            "Encode": stream(self._encode, pb.EncodeRequest.FromString),
            "Prefetch": unary(self._prefetch, pb.PrefetchRequest.FromString),
            "Fetch": stream(self._fetch, pb.FetchRequest.FromString),
            "Release": unary(self._release, pb.ReleaseRequest.FromString),
            "Renew": unary(self._renew, pb.RenewRequest.FromString),
        }
        health = {"Check": unary(self._check_health)}
        return [
            grpc.method_handlers_generic_handler(service, methods),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        ]

    # Calls ------------------------------------------------------------------------------------------------

    def _check_health(self, _request: bytes, _context: Context) -> bytes:
        # HealthCheckResponse{status = 1}: SERVING is 1, NOT_SERVING 2.
        return b"\x08\x01" if self.script.serving else b"\x08\x02"

    def _get_server_info(self, _request: pb.GetServerInfoRequest, context: Context) -> bytes:
        self._begin("GetServerInfo", context, 0)
        script, model = self.script, self.script.model
        plain = {name: value for name, value in vars(model).items() if name not in ("dtype", "modalities")}
        return pb.GetServerInfoResponse(
            protocol_version=script.protocol_version,
            min_protocol_version=script.min_protocol_version,
            server_version="fake",
            instance_id=self.instance_id,
            device="cpu",
            models=[
                pb.ModelInfo(
                    **plain,
                    dtype=convert.dtype_number(model.dtype),
                    modalities=[_MODALITY_NUMBERS[modality] for modality in model.modalities],
                )
            ],
            limits=pb.Limits(**vars(script.limits)),
            transports=[
                pb.TransportInfo(delivery=pb.DELIVERY_INLINE),
                *(script.sharing.transports() if script.sharing is not None else ()),
            ],
        ).SerializeToString()

    def _lookup(self, request: pb.LookupRequest, context: Context) -> bytes:
        self._begin("Lookup", context, len(request.keys))
        return pb.LookupResponse(
            statuses=[self._key_status(key, request.namespace) for key in request.keys]
        ).SerializeToString()

    def _encode(self, request: pb.EncodeRequest, context: Context) -> Iterator[bytes]:
        finished = self._begin("Encode", context, len(request.items))
        self._check_model(request.model, context)

        def events(index: int) -> tuple[bytes, list[pb.ItemEvent]]:
            tier, key, held = self._admit(request.items[index], request.namespace)
            return held.digest, self._item_events(request, index, tier, key, held)

        yield from self._stream(len(request.items), events, context)
        finished.set()

    def _fetch(self, request: pb.FetchRequest, context: Context) -> Iterator[bytes]:
        finished = self._begin("Fetch", context, len(request.keys))

        def events(index: int) -> tuple[bytes, list[pb.ItemEvent]]:
            key = request.keys[index]
            held = self._find(key, request.namespace)
            if held is None:
                raise _refusal("UNKNOWN_KEY", f"key {key.hex()} is neither held nor in flight")
            return held.digest, self._item_events(request, index, pb.CACHE_TIER_HOST, key, held)

        yield from self._stream(len(request.keys), events, context)
        finished.set()

    def _prefetch(self, request: pb.PrefetchRequest, context: Context) -> bytes:
        self._begin("Prefetch", context, len(request.items))
        self._check_model(request.model, context)
        response = pb.PrefetchResponse()
        for item in request.items:
            try:
                _, key, held = self._admit(item, request.namespace)
                response.statuses.append(
                    pb.PrefetchStatus(
                        key=key,
                        content_digest=held.digest,
                        state=pb.KEY_STATE_RESIDENT,
                        grid_thw=_grid_message(held.grid),
                        num_rows=self.script.model.num_rows(held.grid),
                    )
                )
            except EncoderError as error:
                response.statuses.append(pb.PrefetchStatus(failure=_failure(error)))
        return response.SerializeToString()

    def _release(self, request: pb.ReleaseRequest, context: Context) -> bytes:
        self._begin("Release", context, len(request.lease_ids))
        reader = request.reader if request.HasField("reader") else None
        unknown = [lease for lease in request.lease_ids if not self._release_one(lease, reader)]
        return pb.ReleaseResponse(
            num_released=len(request.lease_ids) - len(unknown), unknown_lease_ids=unknown
        ).SerializeToString()

    def _release_one(self, lease_id: bytes, reader: int | None) -> bool:
        sharing = self.script.sharing
        if self.script.leases.pop(lease_id, None) is not None:
            return True
        return sharing is not None and sharing.release(lease_id, reader)

    def _renew(self, request: pb.RenewRequest, context: Context) -> bytes:
        self._begin("Renew", context, len(request.lease_ids))
        response = pb.RenewResponse()
        for lease in request.lease_ids:
            status = response.statuses.add(lease_id=lease)
            if lease in self.script.leases:
                self.script.leases[lease] += request.extend_ms
                status.expires_at_unix_ms = self.script.leases[lease]
            else:
                status.failure.CopyFrom(
                    _failure(ItemFailed("the lease is not held here", reason="UNKNOWN_LEASE", status=5))
                )
        return response.SerializeToString()

    # Items ------------------------------------------------------------------------------------------------

    def _admit(self, item: pb.Item, namespace: str) -> tuple[pb.CacheTier.ValueType, bytes, _Held]:
        """Tier, key and record of an item; holds it from now on. Raises EncoderError."""
        modality = next((m for m, number in _MODALITY_NUMBERS.items() if number == item.modality), None)
        if modality is None:
            raise _refusal("INVALID_REQUEST", f"modality {item.modality} is unknown")
        content = item.WhichOneof("content")
        if content not in ("encoded", "pixels", "digest_only"):
            raise _refusal("UNSUPPORTED_CONTENT", f"the fake takes no {content}")
        pixels_grid = convert.grid(item.pixels.grid_thw) if content == "pixels" else None
        digest = _digest_of(item, pixels_grid)
        if digest in self.script.failures:
            raise self.script.failures[digest]
        options = {descriptor.name: value for descriptor, value in item.options.ListFields()}
        model = self.script.model
        key = embedding_key(
            digest,
            model_fingerprint=model.model_fingerprint,
            preprocess_fingerprint=model.preprocess_fingerprint,
            dtype=model.dtype,
            namespace=namespace,
            modality=modality,
            options=PreprocessOptions(**options),
            pixels_grid=pixels_grid,
        )
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                return pb.CACHE_TIER_HOST, key, held
            if content == "digest_only":
                raise _refusal("UNKNOWN_KEY", f"key {key.hex()} is neither held nor in flight")
            held = _Held(namespace, digest, pixels_grid or self._grid_of(digest))
            self._held[key] = held
        return pb.CACHE_TIER_MISS, key, held

    def _grid_of(self, digest: bytes) -> Grid:
        merge = self.script.model.spatial_merge_size
        return self.script.grids.get(digest) or Grid(
            1, merge * (1 + digest[0] % 4), merge * (1 + digest[1] % 4)
        )

    def _item_events(
        self,
        request: pb.EncodeRequest | pb.FetchRequest,
        index: int,
        tier: pb.CacheTier.ValueType,
        key: bytes,
        held: _Held,
    ) -> list[pb.ItemEvent]:
        model = self.script.model
        num_rows = model.num_rows(held.grid)
        payload = _in_dtype(fake_rows(held.digest, num_rows, model.width), model.dtype)
        chunk_bytes = self.script.limits.chunk_bytes or len(payload)
        offsets = range(0, len(payload), chunk_bytes)
        result = pb.ItemResult(
            key=key,
            content_digest=held.digest,
            grid_thw=_grid_message(held.grid),
            num_rows=num_rows,
            width=model.width,
            dtype=convert.dtype_number(model.dtype),
            num_deepstack_levels=model.num_deepstack_levels,
            tier=tier,
            timings=pb.StageTimings(
                tower_ms=self.script.latency_s * 1000, total_ms=self.script.latency_s * 1000
            ),
            rows_bytes=len(payload),
        )
        if self.script.sharing is not None and request.delivery > pb.DELIVERY_INLINE:
            self.script.sharing.place(request.delivery, request.lease, result, payload)
        if result.WhichOneof("rows") is not None:
            return [pb.ItemEvent(item_index=index, result=result)]
        result.inline.num_chunks = len(offsets)
        events = [pb.ItemEvent(item_index=index, result=result)]
        for offset in offsets:
            chunk = pb.RowsChunk(offset_bytes=offset, data=payload[offset : offset + chunk_bytes])
            events.append(pb.ItemEvent(item_index=index, chunk=chunk))
        return events

    def _stream(
        self,
        num_items: int,
        events_of: Callable[[int], tuple[bytes, list[pb.ItemEvent]]],
        context: Context,
    ) -> Iterator[bytes]:
        order = range(num_items) if self.script.order != "reverse" else range(num_items - 1, -1, -1)
        waiting: list[list[bytes]] = []
        for index in order:
            if self.script.latency_s:
                self.stopping.wait(self.script.latency_s)
            if self.stopping.is_set() or not context.is_active():
                return
            try:
                digest, events = events_of(index)
            except EncoderError as error:
                messages: list[pb.ItemEvent | bytes] = [
                    pb.ItemEvent(item_index=index, failure=_failure(error))
                ]
            else:
                fault = self.script.faults.get(digest)
                self._act(fault, context)
                messages = list(events) if fault is None else faulty(fault, events)
            wire = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
            if self.script.order == "interleaved":
                waiting.append(wire)
            else:
                yield from wire
        for step in range(max(map(len, waiting), default=0)):
            for wire in waiting:
                yield from wire[step : step + 1]

    def _act(self, fault: Fault | None, context: Context) -> None:
        if fault is Fault.ABORT:
            context.abort(grpc.StatusCode.INTERNAL, "the fake was told to abort")
        if fault is Fault.HANG:
            while context.is_active() and not self.stopping.is_set() and not self.resumed.wait(0.01):
                pass

    # Shared -----------------------------------------------------------------------------------------------

    def _begin(self, method: str, context: Context, num_items: int) -> threading.Event:
        """Counts a call, ends it when the script says so. The event marks a call that finished, which tells
        it from one that its caller left."""
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        finished = threading.Event()
        with self._lock:
            self.num_calls[method] += 1
            self.calls.append(CallRecord(method, num_items, metadata))

        def on_end() -> None:
            if not finished.is_set():
                with self._lock:
                    self.num_cancelled[method] += 1

        if method in ("Encode", "Fetch"):
            context.add_callback(on_end)
        if method in self.script.call_failures:
            finished.set()
            code, error = self.script.call_failures[method]
            context.set_trailing_metadata(((FAILURE_METADATA_KEY, _failure(error).SerializeToString()),))
            context.abort(code, f"{error.reason}: {error.message}")
        limit = self.script.limits.max_items_per_request
        if method != "GetServerInfo" and not 1 <= num_items <= (limit or num_items):
            finished.set()
            error = _refusal("INVALID_REQUEST", f"the call has {num_items} items, 1 to {limit} are taken")
            context.set_trailing_metadata(((FAILURE_METADATA_KEY, _failure(error).SerializeToString()),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{error.reason}: {error.message}")
        return finished

    def _check_model(self, name: str, context: Context) -> None:
        if name not in ("", self.script.model.name):
            error = ItemFailed(f"model {name!r} is not served here", reason="UNKNOWN_MODEL", status=5)
            context.set_trailing_metadata(((FAILURE_METADATA_KEY, _failure(error).SerializeToString()),))
            context.abort(grpc.StatusCode.NOT_FOUND, f"{error.reason}: {error.message}")

    def _find(self, key: bytes, namespace: str) -> _Held | None:
        with self._lock:
            held = self._held.get(key)
        return held if held is not None and held.namespace == namespace else None

    def _key_status(self, key: bytes, namespace: str) -> pb.KeyStatus:
        held = self._find(key, namespace)
        if held is None:
            return pb.KeyStatus(key=key, state=pb.KEY_STATE_ABSENT)
        return pb.KeyStatus(
            key=key,
            state=pb.KEY_STATE_RESIDENT,
            grid_thw=_grid_message(held.grid),
            num_rows=self.script.model.num_rows(held.grid),
            tier=pb.CACHE_TIER_HOST,
        )


def _digest_of(item: pb.Item, pixels_grid: Grid | None) -> bytes:
    """The caller's digest, checked, or BLAKE3 of the content. Raises ItemFailed, MissingDependency."""
    digest = item.content_digest
    if digest or item.WhichOneof("content") == "digest_only":
        if len(digest) != DIGEST_BYTES:
            raise _refusal("INVALID_DIGEST", f"content_digest has {len(digest)} bytes, needs {DIGEST_BYTES}")
        return digest
    if pixels_grid is None:
        return content_digest(item.encoded)
    tensor = item.pixels.inline
    return packed_digest(convert.dtype_name(tensor.dtype), list(tensor.shape), tensor.data, pixels_grid)


def _in_dtype(rows: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of rows that the dtype holds exactly."""
    if dtype == "bfloat16":
        return (rows.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return rows.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def _grid_message(grid: Grid) -> pb.GridTHW:
    return pb.GridTHW(t=grid.t, h=grid.h, w=grid.w)


def _refusal(reason: str, message: str) -> ItemFailed:
    return ItemFailed(message, reason=reason, status=_STATUS_NUMBERS[reason])


def _failure(error: EncoderError) -> pb.ItemFailure:
    return pb.ItemFailure(
        reason=error.reason,
        status=error.status if isinstance(error, ItemFailed) else 13,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
        details=error.details,
    )
