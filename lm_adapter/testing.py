"""A fake encoder for tests, with real sockets, the whole v1 service, and computed rows. No torch, no model.

Owns the fake's server, its script and its faults. Digests, keys, failures, chunks and trailing metadata are
those of the real service. Rows depend only on the content digest (``fake_rows``), so a test can compute the
expected rows::

    with FakeEncoder() as fake, VisionEncoderClient(fake.target) as client:
        rows = client.encode_one(ImageItem(jpeg_bytes, digest=digest))
        assert (rows.numpy() == fake_rows(digest, rows.num_rows, rows.width)).all()

Items without a digest are hashed with BLAKE3.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

from lm_adapter import convert
from lm_adapter.errors import FAILURE_METADATA_KEY, EncoderError, ItemFailed
from lm_adapter.items import Grid, Modality
from lm_adapter.keys import content_digest, pixels_digest
from lm_adapter.types import Limits, ModelInfo
from vision_encoder.layout import keys
from vision_encoder.layout.keys import DIGEST_BYTES
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["CallRecord", "FakeEncoder", "FakeScript", "Fault", "fake_model", "fake_rows"]

MAX_CONCURRENT_CALLS = 128
MAX_CALL_RECORDS = 10_000
DEFAULT_MAX_MESSAGE_BYTES = 4 << 20
_MODALITY_NUMBERS = {modality: number for number, modality in convert.MODALITY_OF.items()}
_INVALID_ARGUMENT, _NOT_FOUND, _RESOURCE_EXHAUSTED, _INTERNAL = 3, 5, 8, 13
Context = grpc.ServicerContext
RowsRequest = pb.EncodeRequest | pb.FetchRequest


class Fault(enum.Enum):
    """An error that the fake makes with one item. Faults marked "ends the call" end the whole call."""

    WRONG_WIDTH = "width"
    WRONG_DTYPE = "dtype"
    WRONG_LEVELS = "num_deepstack_levels"
    WRONG_NUM_ROWS = "num_rows"
    WRONG_GRID = "grid_thw"
    OTHER_DELIVERY = "delivery"  # a place in shared memory instead of the requested inline rows
    SHORT_CHUNK = "short chunk"
    NON_FINITE = "not finite"  # accepted unless the caller checks the elements
    UNKNOWN_EVENT = "unknown event"  # an event of a newer protocol, which clients must ignore
    MISSING_ITEM = "missing item"  # the stream ends OK without this item: ends the call
    MISSING_CHUNK = "missing chunk"  # the stream ends OK without this item's last chunk: ends the call
    GARBAGE = "garbage"  # bytes that are not a message: ends the call
    HANG = "hang"  # the stream stops before this item until ``resume`` is called or the server stops
    ABORT = "abort"  # the call ends with INTERNAL before this item


class CallRecord(NamedTuple):
    """One call as the fake received it. metadata: the textual headers."""

    method: str
    request: Any
    metadata: dict[str, str]


def fake_rows(digest: bytes, num_rows: int, width: int) -> npt.NDArray[np.float32]:
    """float32 [num_rows, width]: the fake's rows for a digest. They are multiples of 1/128 in [-1, 1) from
    SHAKE-128 of the digest, so float16 and bfloat16 represent them exactly."""
    noise = np.frombuffer(hashlib.shake_128(digest).digest(num_rows * width), dtype=np.uint8)
    return ((noise.astype(np.float32) - 128.0) / 128.0).reshape(num_rows, width)


def fake_model(family: str = "qwen3_vl", **changes: Any) -> ModelInfo:
    """A small model with the geometry of a family: ``qwen3_vl`` (with deepstack), ``qwen3_5`` (without) or
    ``kimi_k25`` (merges time). changes: fields of ModelInfo, except ``width``, which is computed."""
    levels = 3 if family == "qwen3_vl" else 0
    is_kimi = family == "kimi_k25"
    patch_size, temporal_patch_size = (14, 1) if is_kimi else (16, 2)
    model = ModelInfo(
        name=f"fake-{family}",
        family=family,
        model_fingerprint=hashlib.sha256(f"weights of {family}".encode()).digest(),
        preprocess_fingerprint=hashlib.sha256(f"settings of {family}".encode()).digest(),
        dtype="float32",
        out_width=32,
        num_deepstack_levels=levels,
        width=0,
        patch_size=patch_size,
        spatial_merge_size=2,
        temporal_patch_size=temporal_patch_size,
        patch_dim=3 * temporal_patch_size * patch_size**2,
        merges_time=is_kimi,
        modalities=(Modality.IMAGE, Modality.VIDEO),
    )
    model = replace(model, **changes)
    return replace(model, width=model.out_width * (1 + model.num_deepstack_levels))


@dataclass
class FakeScript:
    """Controls what the fake does. May be changed between calls.

    grids: digest to grid; other digests get a grid of up to 4x4 merged patches, derived from the digest.
    latency_s: delay before each item.
    order: of the items' events: ``forward``, ``reverse`` or ``interleaved``.
    failures: digest to failure.
    faults: digest to fault.
    call_failures: method name to the status and failure with which every call of it ends.
    num_cuts: this many of the next streams end with UNAVAILABLE after their first item.
    num_refusals: this many of the next items are refused with QUEUE_FULL, as by an overloaded service.
    transports, place: for rows in shared memory: the announcements, and a function that stores an item's rows
    and sets the place in its result, or leaves the result unchanged for inline rows."""

    model: ModelInfo = field(default_factory=fake_model)
    limits: Limits = field(
        default_factory=lambda: Limits(
            max_items_per_request=256, max_message_bytes=64 << 20, chunk_bytes=1 << 20
        )
    )
    protocol_version: int = 1
    min_protocol_version: int = 1
    serving: bool = True
    grids: dict[bytes, Grid] = field(default_factory=dict)
    latency_s: float = 0.0
    order: str = "forward"
    failures: dict[bytes, ItemFailed] = field(default_factory=dict)
    faults: dict[bytes, Fault] = field(default_factory=dict)
    call_failures: dict[str, tuple[grpc.StatusCode, ItemFailed]] = field(default_factory=dict)
    num_cuts: int = 0
    num_refusals: int = 0
    transports: Sequence[pb.TransportInfo] = ()
    place: Callable[[RowsRequest, pb.ItemResult, bytes], None] | None = None


class _Held(NamedTuple):
    """An item that the fake holds. Its rows are computed from the digest when they are needed."""

    namespace: str
    digest: bytes
    grid: Grid


_Found: TypeAlias = tuple[pb.CacheTier.ValueType, bytes, _Held]
"""Tier, key and record of an item."""


class FakeEncoder:
    """An in-process gRPC server. A context manager; ``script`` may be changed while it runs.

    target: the address, with the real port. num_calls: calls received, by method name. num_cancelled: Encode
    and Fetch calls that ended before their stream did. num_hanging: streams that stopped with Fault.HANG, of
    which ``num_hanging_now`` have not ended.
    ``restart`` resets these counters.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, script: FakeScript | None = None) -> None:
        """listen: ``host:port`` (port 0 picks one) or ``unix:/path``."""
        self.script = script or FakeScript()
        self.target = listen
        self._server: grpc.Server | None = None
        self._lock = threading.Lock()
        self._begin_run()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Binds the address and starts serving, with the script's current message limit. Raises RuntimeError
        if the address is in use or the fake is already running."""
        if self._server is not None:
            raise RuntimeError(f"the fake runs already at {self.target}")
        if self._stopping.is_set():
            self._begin_run()
        limit_bytes = self.script.limits.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES
        server = grpc.server(
            ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="fake-encoder"),
            handlers=self._handlers(),
            options=[("grpc.max_receive_message_length", limit_bytes), ("grpc.so_reuseport", 0)],
        )
        port = server.add_insecure_port(self.target)
        if not self.target.startswith("unix:"):
            self.target = f"{self.target.rpartition(':')[0]}:{port}"
        server.start()
        self._server = server

    def stop(self) -> None:
        """Stops the server, and cuts calls in progress. Can be repeated."""
        if self._server is not None:
            self._stopping.set()
            self._server.stop(None).wait()
            self._server = None

    def restart(self) -> None:
        """Stops and starts at the same address, as a new instance without rows."""
        self.stop()
        self.start()

    def resume(self) -> None:
        """Continues streams that stopped with Fault.HANG."""
        self._resumed.set()

    @property
    def calls(self) -> list[CallRecord]:
        """The latest calls, oldest first."""
        return list(self._calls)

    @property
    def num_hanging_now(self) -> int:
        return len(self._hanging)

    def _begin_run(self) -> None:
        self.instance_id = secrets.token_hex(8)
        self.num_calls: Counter[str] = Counter()
        self.num_cancelled: Counter[str] = Counter()
        self.num_hanging = 0
        self._hanging: set[Context] = set()
        self._calls: deque[CallRecord] = deque(maxlen=MAX_CALL_RECORDS)
        self._held: dict[bytes, _Held] = {}
        self._stopping = threading.Event()
        """When set, all waits in handlers end."""
        self._resumed = threading.Event()

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        unary: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_unary_rpc_method_handler
        stream: Callable[..., grpc.RpcMethodHandler[Any, Any]] = grpc.unary_stream_rpc_method_handler
        service = pb.DESCRIPTOR.services_by_name["VisionEncoder"].full_name
        # Handlers return bytes, so that a fault can send bytes that are not a message.
        methods = {
            "GetServerInfo": unary(self._get_server_info, pb.GetServerInfoRequest.FromString),
            "Lookup": unary(self._lookup, pb.LookupRequest.FromString),
            "Encode": stream(self._encode, pb.EncodeRequest.FromString),
            "Prefetch": unary(self._prefetch, pb.PrefetchRequest.FromString),
            "Fetch": stream(self._fetch, pb.FetchRequest.FromString),
            "Touch": unary(self._touch, pb.TouchRequest.FromString),
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

    def _get_server_info(self, request: pb.GetServerInfoRequest, context: Context) -> bytes:
        self._begin("GetServerInfo", request, context, 1)
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
            transports=[pb.TransportInfo(delivery=pb.DELIVERY_INLINE), *script.transports],
        ).SerializeToString()

    def _lookup(self, request: pb.LookupRequest, context: Context) -> bytes:
        self._begin("Lookup", request, context, len(request.keys))
        statuses = [self._key_status(key, request.namespace) for key in request.keys]
        return pb.LookupResponse(statuses=statuses).SerializeToString()

    def _touch(self, request: pb.TouchRequest, context: Context) -> bytes:
        self._begin("Touch", request, context, 1)
        return pb.TouchResponse().SerializeToString()

    def _encode(self, request: pb.EncodeRequest, context: Context) -> Iterator[bytes]:
        finished = self._begin("Encode", request, context, len(request.items))
        self._check_model(request.model, context)

        def find(index: int) -> _Found:
            return self._admit(request.items[index], request.namespace)

        yield from self._stream(request, len(request.items), find, context)
        finished.set()

    def _fetch(self, request: pb.FetchRequest, context: Context) -> Iterator[bytes]:
        finished = self._begin("Fetch", request, context, len(request.keys))

        def find(index: int) -> _Found:
            key = request.keys[index]
            held = self._find(key, request.namespace)
            if held is None:
                raise _unknown(key)
            return pb.CACHE_TIER_HOST, key, held

        yield from self._stream(request, len(request.keys), find, context)
        finished.set()

    def _prefetch(self, request: pb.PrefetchRequest, context: Context) -> bytes:
        self._begin("Prefetch", request, context, len(request.items))
        self._check_model(request.model, context)
        response = pb.PrefetchResponse()
        for item in request.items:
            try:
                _, key, held = self._admit(item, request.namespace)
            except EncoderError as error:
                response.statuses.append(pb.PrefetchStatus(failure=_failure(error)))
                continue
            response.statuses.append(
                pb.PrefetchStatus(key=key, content_digest=held.digest, **self._resident(held))
            )
        return response.SerializeToString()

    # Items ------------------------------------------------------------------------------------------------

    def _admit(self, item: pb.Item, namespace: str) -> _Found:
        """Tier, key and record of an item. The fake holds the item afterwards. Raises EncoderError."""
        modality = convert.MODALITY_OF.get(item.modality)
        if modality is None:
            raise _refusal("INVALID_REQUEST", f"modality {item.modality} is unknown")
        content = item.WhichOneof("content")
        if content not in ("encoded", "pixels", "digest_only"):
            raise _refusal("UNSUPPORTED_CONTENT", f"the fake takes no {content}")
        grid = convert.grid(item.pixels.grid_thw) if content == "pixels" else None
        digest = _digest_of(item, grid)
        with self._lock:
            is_refused = self.script.num_refusals > 0
            self.script.num_refusals -= is_refused
        if is_refused:
            raise ItemFailed(
                f"queue holds {len(self._held)} items of {len(self._held)}",
                reason="QUEUE_FULL",
                status=_RESOURCE_EXHAUSTED,
                retryable=True,
                retry_after_ms=1,
            )
        if digest in self.script.failures:
            raise self.script.failures[digest]
        model = self.script.model
        key = keys.embedding_key(
            digest,
            namespace=namespace,
            modality=modality.value,
            model_fingerprint=model.model_fingerprint,
            preprocess_fingerprint=model.preprocess_fingerprint,
            options={descriptor.name: value for descriptor, value in item.options.ListFields()},
            source=keys.ENCODED_SOURCE if grid is None else keys.pixels_source(grid),
            dtype=model.dtype,
        )
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                return pb.CACHE_TIER_HOST, key, held
            if content == "digest_only":
                raise _unknown(key)
            held = self._held[key] = _Held(namespace, digest, grid or self._grid_of(digest))
        return pb.CACHE_TIER_MISS, key, held

    def _grid_of(self, digest: bytes) -> Grid:
        merge = self.script.model.spatial_merge_size
        default = Grid(1, merge * (1 + digest[0] % 4), merge * (1 + digest[1] % 4))
        return self.script.grids.get(digest, default)

    def _item_events(
        self, request: RowsRequest, index: int, tier: pb.CacheTier.ValueType, key: bytes, held: _Held
    ) -> list[pb.ItemEvent]:
        """The result and the chunks of an item, without faults."""
        model = self.script.model
        num_rows = model.num_rows(held.grid)
        payload = _in_dtype(fake_rows(held.digest, num_rows, model.width), model.dtype)
        latency_ms = self.script.latency_s * 1000
        result = pb.ItemResult(
            key=key,
            content_digest=held.digest,
            grid_thw=_grid_message(held.grid),
            num_rows=num_rows,
            width=model.width,
            dtype=convert.dtype_number(model.dtype),
            num_deepstack_levels=model.num_deepstack_levels,
            tier=tier,
            timings=pb.StageTimings(tower_ms=latency_ms, total_ms=latency_ms),
            rows_bytes=len(payload),
        )
        if self.script.place is not None and request.delivery > pb.DELIVERY_INLINE:
            self.script.place(request, result, payload)
        if result.WhichOneof("rows") is not None:
            return [pb.ItemEvent(item_index=index, result=result)]
        chunk_bytes = self.script.limits.chunk_bytes or len(payload)
        offsets = range(0, len(payload), chunk_bytes)
        result.inline.num_chunks = len(offsets)
        events = [pb.ItemEvent(item_index=index, result=result)]
        for offset in offsets:
            chunk = pb.RowsChunk(offset_bytes=offset, data=payload[offset : offset + chunk_bytes])
            events.append(pb.ItemEvent(item_index=index, chunk=chunk))
        return events

    def _stream(
        self, request: RowsRequest, num_items: int, find: Callable[[int], _Found], context: Context
    ) -> Iterator[bytes]:
        script = self.script
        with self._lock:
            is_cut = script.num_cuts > 0
            script.num_cuts -= is_cut
        waiting: list[list[bytes]] = []
        order = range(num_items) if script.order != "reverse" else range(num_items - 1, -1, -1)
        for number, index in enumerate(order):
            if script.latency_s:
                self._stopping.wait(script.latency_s)
            if self._stopping.is_set() or not context.is_active():
                return
            if is_cut and number == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the script cuts this stream")
            messages: list[pb.ItemEvent | bytes]
            try:
                tier, key, held = find(index)
            except EncoderError as error:
                messages = [pb.ItemEvent(item_index=index, failure=_failure(error))]
            else:
                fault = script.faults.get(held.digest)
                self._act(fault, context)
                messages = _faulty(fault, self._item_events(request, index, tier, key, held))
            wire = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
            if script.order == "interleaved":
                waiting.append(wire)
            else:
                yield from wire
        for step in range(max(map(len, waiting), default=0)):
            for wire in waiting:
                yield from wire[step : step + 1]

    def _act(self, fault: Fault | None, context: Context) -> None:
        if fault is Fault.ABORT:
            context.abort(grpc.StatusCode.INTERNAL, "the script aborts this call")
        if fault is Fault.HANG:
            with self._lock:
                self.num_hanging += 1
                hanging = self._hanging
                hanging.add(context)
            while context.is_active() and not self._stopping.is_set() and not self._resumed.wait(0.01):
                pass
            hanging.discard(context)

    def _begin(self, method: str, request: Any, context: Context, num_items: int) -> threading.Event:
        """Records a call, and aborts it if the script says so. The caller must set the returned event when
        the call has finished; otherwise the call counts as cancelled."""
        context.set_trailing_metadata((("x-instance-id", self.instance_id),))
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        finished = threading.Event()

        def on_end() -> None:
            if not finished.is_set():
                with self._lock:
                    self.num_cancelled[method] += 1

        # A call that has ended already takes no callback.
        if method in ("Encode", "Fetch") and not context.add_callback(on_end):
            on_end()
        with self._lock:
            self.num_calls[method] += 1
            self._calls.append(CallRecord(method, request, metadata))
        limit = self.script.limits.max_items_per_request
        if method in self.script.call_failures:
            finished.set()
            _abort(context, *self.script.call_failures[method])
        if not 1 <= num_items <= (limit or num_items):
            finished.set()
            message = f"the call has {num_items} items, 1 to {limit} are taken"
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, _refusal("INVALID_REQUEST", message))
        return finished

    def _check_model(self, name: str, context: Context) -> None:
        if name not in ("", self.script.model.name):
            error = _refusal("UNKNOWN_MODEL", f"model {name!r} is not served here", _NOT_FOUND)
            _abort(context, grpc.StatusCode.NOT_FOUND, error)

    def _find(self, key: bytes, namespace: str) -> _Held | None:
        with self._lock:
            held = self._held.get(key)
        return held if held is not None and held.namespace == namespace else None

    def _key_status(self, key: bytes, namespace: str) -> pb.KeyStatus:
        held = self._find(key, namespace)
        if held is None:
            return pb.KeyStatus(key=key, state=pb.KEY_STATE_ABSENT)
        return pb.KeyStatus(key=key, tier=pb.CACHE_TIER_HOST, **self._resident(held))

    def _resident(self, held: _Held) -> dict[str, Any]:
        return {
            "state": pb.KEY_STATE_RESIDENT,
            "grid_thw": _grid_message(held.grid),
            "num_rows": self.script.model.num_rows(held.grid),
        }


_RESULT_EDITS: dict[Fault | None, pb.ItemResult] = {
    Fault.WRONG_DTYPE: pb.ItemResult(dtype=pb.DTYPE_UINT8),
    Fault.OTHER_DELIVERY: pb.ItemResult(place=pb.RowsPlace(generation=1)),
}


def _faulty(fault: Fault | None, events: Sequence[pb.ItemEvent]) -> list[pb.ItemEvent | bytes]:
    """One item's events (its result, then its chunks) with the fault applied. HANG and ABORT change nothing
    here."""
    result, chunks = events[0], list(events[1:])
    if fault is None or fault in _RESULT_EDITS:
        result.result.MergeFrom(_RESULT_EDITS.get(fault, pb.ItemResult()))
        return [result, *chunks]
    last = chunks[-1].chunk
    rows = result.result
    match fault:
        case Fault.WRONG_WIDTH:
            rows.width += rows.num_deepstack_levels + 1
            rows.rows_bytes += rows.rows_bytes // (rows.width - rows.num_deepstack_levels - 1)
        case Fault.WRONG_LEVELS:
            rows.num_deepstack_levels += 1
        case Fault.WRONG_NUM_ROWS:
            rows.num_rows += 1
        case Fault.WRONG_GRID:
            rows.grid_thw.h += 1
        case Fault.SHORT_CHUNK:
            last.data = last.data[:-1]
        case Fault.NON_FINITE:
            last.data = last.data[:-8] + b"\xff" * 8  # NaN in every floating dtype
        case Fault.UNKNOWN_EVENT:
            return [b"\x7a\x03new", result, *chunks]  # field 15 of ItemEvent, length-delimited
        case Fault.MISSING_ITEM:
            return []
        case Fault.MISSING_CHUNK:
            return [result, *chunks[:-1]]
        case Fault.GARBAGE:
            return [b"\xff\xff\xff not a message"]
    return [result, *chunks]


def _digest_of(item: pb.Item, pixels_grid: Grid | None) -> bytes:
    """The caller's digest, validated, or BLAKE3 of the content. Raises ItemFailed."""
    digest = item.content_digest
    if digest or item.WhichOneof("content") == "digest_only":
        if len(digest) != DIGEST_BYTES:
            raise _refusal("INVALID_DIGEST", f"content_digest has {len(digest)} bytes, needs {DIGEST_BYTES}")
        return digest
    if pixels_grid is None:
        return content_digest(item.encoded)
    tensor = item.pixels.inline
    return pixels_digest(convert.dtype_name(tensor.dtype), list(tensor.shape), tensor.data, pixels_grid)


def _in_dtype(rows: npt.NDArray[np.float32], dtype: str) -> bytes:
    """The rows as little-endian bytes in a dtype that represents them exactly."""
    if dtype == "bfloat16":
        return (rows.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return rows.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def _grid_message(grid: Grid) -> pb.GridTHW:
    return pb.GridTHW(t=grid.t, h=grid.h, w=grid.w)


def _refusal(reason: str, message: str, status: int = _INVALID_ARGUMENT) -> ItemFailed:
    return ItemFailed(message, reason=reason, status=status)


def _unknown(key: bytes) -> ItemFailed:
    return _refusal("UNKNOWN_KEY", f"key {key.hex()} is neither held nor in flight", _NOT_FOUND)


def _abort(context: Context, code: grpc.StatusCode, error: EncoderError) -> None:
    context.set_trailing_metadata(((FAILURE_METADATA_KEY, _failure(error).SerializeToString()),))
    context.abort(code, f"{error.reason}: {error.message}")


def _failure(error: EncoderError) -> pb.ItemFailure:
    return pb.ItemFailure(
        reason=error.reason,
        status=error.status if isinstance(error, ItemFailed) else _INTERNAL,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
        details=error.details,
    )
