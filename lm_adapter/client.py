"""The asyncio client, the one implementation of a call; ``sync`` has a blocking facade over it.

Owns an item's way to its rows: the directory in shared memory, else Encode or Fetch, whose rows come from a
place in shared memory or inline. Also owns what is repeated: an item whose rows were lost, once, inline; a
stream that broke, once, for the items that had not come whole. Nothing else is repeated here. In a fleet each
item is a call of its own, with its routing digest. ``local_first`` has two targets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from lm_adapter import convert
from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES, Assembler, PlacedRows, out_of_memory, prepare_items
from lm_adapter.channel import FLEET_OPTIONS, Channel, ClientTls, FilePath, Metadata
from lm_adapter.checks import RowsHeader, check_header, check_keys, check_models
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
    MappingFailed,
    ProtocolMismatch,
    StreamViolation,
    TransportUnavailable,
    TruncatedStream,
    from_rpc_error,
)
from lm_adapter.items import ClipItem, Grid, ImageItem, Item
from lm_adapter.keys import can_hash, content_digest, item_key, routing_digest
from lm_adapter.read_reports import ReadReports
from lm_adapter.shm.attachment import TRANSPORTS, AttachedMemory, SharedMemory, Transport, check_transports
from lm_adapter.shm.mapping import current_stream
from lm_adapter.shm.reader import MappedArena
from lm_adapter.types import (
    CacheTier,
    EncodedRows,
    KeyStatus,
    Limits,
    ModelInfo,
    Outcome,
    PrefetchStatus,
    ServerInfo,
)
from vision_encoder.layout.directory import Record
from vision_encoder.layout.keys import DIGEST_BYTES, ROUTING_KEY
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 365 * 86_400.0
"""Longer timeouts, infinite ones too, are cut to this: gRPC takes a time beyond its range for a past one."""
READY_POLL_S = 0.05
MIN_INFO_AGE_S = 1.0
MAX_HASHED_BYTES = 8 << 20
"""Larger files are hashed by the service, on its decode threads."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.3
"""Bounds of the random pause before a repeat in a fleet. By its end the gateway has left out a replica that
ended. The calls that a crash interrupted are spread, so that an item that crashes each encoder does not
interrupt them again."""
GATEWAY_BUFFER_BYTES = 16 << 20
"""Of a body that a gateway can send to a second replica by itself."""
LARGE_PAUSE_S = 1.5
"""Added to the pause before a larger one is repeated: another gateway, which had no call at the replica that
ended, leaves it out after two health checks."""
FLEET_INFO_S = 60.0
"""Age at which a fleet's information is asked for again: replicas are replaced without notice."""
MAX_LOOP_COPY_S = 150e-6
"""Copies out of shared memory that are estimated to take longer are made on a worker thread."""
INSTANCE_KEY = "x-instance-id"
"""Trailing metadata: the ``instance_id`` of the server that answered."""
_UNAVAILABLE, _RESOURCE_EXHAUSTED = 14, 8
_SERVICE = pb.DESCRIPTOR.services_by_name["VisionEncoder"].full_name

_log = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")
_Listed: TypeAlias = dict[int, tuple[MappedArena, Record]]


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


@dataclass
class RowsCall:
    """One ``encode`` or ``fetch``, which may take several RPCs, and what became of its items.

    models: whose geometry the rows may have. shared: the memory that rows may be placed in, and stream: the
    one that uses them. routes: routing digests, and outcomes: of all num_items, by the caller's index."""

    info: ServerInfo
    models: Sequence[ModelInfo]
    shared: AttachedMemory | None
    stream: Any
    deadline: Deadline
    num_items: int
    routes: Mapping[int, bytes] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def in_order(self) -> list[Outcome]:
        return [self.outcomes[index] for index in range(self.num_items)]


class AsyncVisionEncoderClient:
    """A client of one service address, on one event loop. An async context manager.

    Every call has a deadline (``timeout_s`` of the call, or of the client) and raises errors of
    ``lm_adapter.errors`` only. An item that fails is returned as ItemFailed in its place; the call itself
    raises CallFailed. Rows come in the best of ``transports`` that works between this process and the
    encoder, which is found in the background; ``transport`` says which, and why."""

    def __init__(
        self,
        target: str,
        *,
        namespace: str = "",
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transports: Sequence[str] = TRANSPORTS,
        broker_path: str = "",
        token: str = "",
        token_file: FilePath = "",
        tls: ClientTls | None = None,
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        device: str | int | torch.device | None = None,
        options: Mapping[str, int | str] | None = None,
        fleet: bool = False,
        repeats: bool = True,
    ) -> None:
        """Connects with the first call. Raises InvalidRequest.

        target: ``host:port``, ``unix:/path`` or any gRPC target. namespace: whose cache to use. model: empty
        for the server's only one. transports: of ``device``, ``host`` and ``inline``, the preferred one
        first; without ``inline``, calls raise TransportUnavailable while no memory is attached, and only lost
        rows come inline. broker_path: of the broker's socket, where this process sees it under another path
        than the announced one. token, token_file: authorise the namespace; a file that changes is read again.
        tls: from files that are read again as well. max_rows_bytes: limit of one item. device: the GPU that
        rows are copied to; by default the current one of the first calling thread that uses CUDA. options:
        gRPC channel arguments, in addition to the defaults in ``channel``. fleet: the target is a gateway
        before many encoders, or a name with the addresses of several gateways; rows come inline. repeats:
        a stream that broke is asked for once more."""
        transports = ("inline",) if fleet else check_transports(transports, broker_path)
        self.target = target
        self._namespace = namespace
        self._model = model
        self._timeout_s = timeout_s
        self._max_rows_bytes = max_rows_bytes
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._is_fleet = self._needs_routes = fleet
        self._repeats = repeats
        if fleet:
            options = FLEET_OPTIONS | dict(options or {})
        self._channel = Channel(target, tls=tls, token=token, token_file=token_file, options=options)
        self._shared = SharedMemory(
            transports,
            namespace=namespace,
            token=lambda: self._channel.token,
            broker_path=broker_path,
            device=device,
        )
        self._hashes = can_hash()
        self._reports = ReadReports(self._loop, self._send_report)
        self._info: ServerInfo | None = None
        self._info_lock = asyncio.Lock()
        self._info_time_s = 0.0
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def transport(self) -> Transport:
        """How rows come now, and why."""
        return self._shared.transport

    async def close(self) -> None:
        """Ends calls in progress with CallCancelled, and unmaps shared memory. Harmless when repeated."""
        self._is_closed = True
        self._reports.close()
        await self._channel.close()
        await asyncio.to_thread(self._shared.close)

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The server's models, limits and transports, asked for now. Raises ProtocolMismatch."""
        return await self._ask_info(self._deadline(timeout_s))

    async def wait_ready(self, timeout_s: float) -> ServerInfo:
        """Waits until the server answers and its health check says SERVING.

        Raises DeadlineExceeded after ``timeout_s``, with the last failure that has another cause, and
        ProtocolMismatch at once.
        """
        deadline = Deadline(timeout_s)
        last = "no answer"
        while deadline.left_s > 0:
            with contextlib.suppress(DeadlineExceeded):
                try:
                    info = await self._ask_info(deadline)
                    if await self._is_serving(deadline):
                        return info
                    last = "its health check says NOT_SERVING"
                except (EncoderUnavailable, EncoderOverloaded) as error:
                    last = error.message
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
        raise DeadlineExceeded(f"the server at {self.target} was not ready within {timeout_s} s: {last}")

    async def wait_transport(self, timeout_s: float | None = None) -> Transport:
        """Waits until the client has tried to attach to shared memory, for callers that do not want their
        first rows inline."""
        self._shared.note_device()
        deadline = self._deadline(timeout_s)
        await self._known_info(deadline)
        while not self._shared.has_tried and deadline.left_s > 0:
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
            self._check_open("wait_transport")
        return self._shared.transport

    async def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, stream: Any = None
    ) -> list[Outcome]:
        """Rows or failure of each item, in input order. Items beyond the server's limits of one call are sent
        in several, one after another.

        stream: the torch.cuda.Stream on which rows on a GPU are used; by default the calling thread's current
        one. Raises CallFailed when the call failed before every item had its outcome; ``completed`` of the
        error maps the indices of the others to their outcome."""
        call = await self._begin(len(items), self._deadline(timeout_s), stream)
        call.models = self._expected_models(call.info)
        if self._is_fleet:
            items, call.routes = await self._routed(items)
        elif call.shared is not None:
            if any(self._is_to_hash(item) for item in items):
                items = await asyncio.to_thread(self.hashed, items)
            await self._read_resident(call, self._keys(call.info, items))
        unread = {index: item for index, item in enumerate(items) if index not in call.outcomes}
        batches, refused = prepare_items(unread, self._limits(call.info))
        call.outcomes.update(refused)
        await self._run_all("Encode", call, batches)
        return call.in_order()

    async def encode_one(
        self, item: Item, *, timeout_s: float | None = None, stream: Any = None
    ) -> EncodedRows:
        """The rows of one item. Raises ItemFailed, CallFailed."""
        (outcome,) = await self.encode([item], timeout_s=timeout_s, stream=stream)
        return rows_or_raise(outcome)

    async def fetch(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> list[Outcome]:
        """Rows by key, in the order of ``keys``; waits for those in flight. An absent key is an ItemFailed
        with reason UNKNOWN_KEY. routing_digests: of each key, from ``PrefetchStatus`` or ``keys``; a fleet
        needs them. Other arguments and errors as in ``encode``."""
        keys, routes = check_keys(keys), self._routes_of(keys, routing_digests)
        if not keys:
            return []
        call = await self._begin(len(keys), self._deadline(timeout_s), stream)
        call.routes = routes
        await self._read_resident(call, dict(enumerate(keys)))
        unread = [index for index in range(len(keys)) if index not in call.outcomes]
        portions = self._portions(call.info, unread)
        await self._run_all("Fetch", call, [{index: keys[index] for index in each} for each in portions])
        return call.in_order()

    async def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None, until_encoded: bool = False
    ) -> list[PrefetchStatus | ItemFailed]:
        """Starts to encode and keeps the rows in the service. Answers once every item is admitted, with its
        key, and with its grid and a clip's timestamps if the file's header was read. The encode goes on
        without this client. until_encoded: answers once every item is encoded or has failed; then the encode
        ends with this call. No rows come.

        Raises CallFailed; ``completed`` of the error has the statuses that had come, by index."""
        deadline = self._deadline(timeout_s)
        info = await self._known_info(deadline)
        items, routes = await self._routed(items)
        batches, refused = prepare_items(dict(enumerate(items)), self._limits(info))
        statuses: dict[int, PrefetchStatus | ItemFailed] = dict(refused)

        async def ask(batch: Mapping[int, pb.Item]) -> None:
            request = pb.PrefetchRequest(
                items=batch.values(),
                namespace=self._namespace,
                model=self._model,
                until_encoded=until_encoded,
            )
            try:
                response = await self._unary(
                    "Prefetch", request, pb.PrefetchResponse, deadline, self._route(routes, batch)
                )
            except CallFailed as error:
                failure = self._item_failure(error)
                if failure is None:
                    raise
                statuses.update(dict.fromkeys(batch, failure))
                return
            if len(response.statuses) != len(batch):
                raise StreamViolation(
                    f"Prefetch answered for {len(response.statuses)} items, {len(batch)} were sent"
                )
            for index, status in zip(batch, response.statuses, strict=True):
                statuses[index] = convert.prefetch_status(status, routes.get(index, b""))

        try:
            await self._call_each(ask, batches)
        except CallFailed as error:
            error.completed = statuses
            raise
        return [statuses[index] for index in range(len(items))]

    async def known_key(self, item: Item, *, timeout_s: float | None = None) -> bytes | None:
        """The item's key, derived here; None if it has no digest or the server has several models and none is
        named. Raises CallFailed when the server's information is not known and cannot be had."""
        return self._keys(await self._known_info(self._deadline(timeout_s)), [item]).get(0)

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[KeyStatus]:
        """Whether each key's rows are held, being encoded, or absent; in the order of ``keys``.
        routing_digests: as in ``fetch``."""
        keys, routes = check_keys(keys), self._routes_of(keys, routing_digests)
        if not keys:
            return []
        deadline = self._deadline(timeout_s)
        statuses: dict[int, KeyStatus] = {}

        async def ask(portion: Sequence[int]) -> None:
            asked = [keys[index] for index in portion]
            request = pb.LookupRequest(keys=asked, namespace=self._namespace)
            response = await self._unary(
                "Lookup", request, pb.LookupResponse, deadline, self._route(routes, portion)
            )
            found = [convert.key_status(status) for status in response.statuses]
            if [status.key for status in found] != asked:
                raise StreamViolation(
                    f"Lookup answered for {len(found)} keys, {len(portion)} were asked, or for others"
                )
            statuses.update(zip(portion, found, strict=True))

        await self._call_each(ask, self._portions(await self._known_info(deadline), range(len(keys))))
        return [statuses[index] for index in range(len(keys))]

    # Fleets -----------------------------------------------------------------------------------------------

    async def _routed(self, items: Sequence[Item]) -> tuple[Sequence[Item], dict[int, bytes]]:
        """The items, with digests where they are to be hashed, and their routing digests by index; without a
        fleet as they are, and none."""
        if not self._is_fleet:
            return items, {}
        items = await asyncio.to_thread(self.hashed, items)
        return items, dict(enumerate(await asyncio.to_thread(list, map(routing_digest, items))))

    def _routes_of(self, keys: Sequence[bytes], routing_digests: Sequence[bytes]) -> dict[int, bytes]:
        """Raises InvalidRequest."""
        if self._needs_routes and len(routing_digests) != len(keys):
            raise InvalidRequest(
                f"{len(keys)} keys have {len(routing_digests)} routing digests; with a gateway each needs one"
            )
        for route in routing_digests:
            if len(route) != DIGEST_BYTES:
                raise InvalidRequest(f"a routing digest has {len(route)} bytes, needs {DIGEST_BYTES}")
        return dict(enumerate(routing_digests))

    def _route(self, routes: Mapping[int, bytes], indices: Iterable[int]) -> Metadata:
        """The header of a call for these items; in a fleet there is one."""
        return ((ROUTING_KEY, routes[next(iter(indices))].hex()),) if self._is_fleet else ()

    def _limits(self, info: ServerInfo) -> Limits:
        """Of one call. In a fleet each item may belong to another replica and is a call of its own."""
        return dataclasses.replace(info.limits, max_items_per_request=1) if self._is_fleet else info.limits

    def _portions(self, info: ServerInfo, indices: Sequence[int]) -> list[Sequence[int]]:
        """Indices in as many calls as the limit of items needs."""
        size = self._limits(info).max_items_per_request or len(indices) or 1
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    async def _call_each(
        self, ask: Callable[[ResultT], Awaitable[None]], portions: Sequence[ResultT]
    ) -> None:
        """Asks for every portion: one after another, in a fleet all at once. Raises the first failure, in a
        fleet once all have ended."""
        if not self._is_fleet:
            for portion in portions:
                await ask(portion)
            return
        for error in await asyncio.gather(*map(ask, portions), return_exceptions=True):
            if error is not None:
                raise error

    def _item_failure(self, error: CallFailed) -> ItemFailed | None:
        """In a fleet, where a call has one item: why its replica takes no work, as the item's failure. None
        for a call that no replica has answered."""
        if (
            not self._is_fleet
            or not isinstance(error, EncoderUnavailable | EncoderOverloaded)
            or error.reason == type(error).default_reason
        ):
            return None
        return ItemFailed(
            error.message,
            reason=error.reason,
            status=_UNAVAILABLE if isinstance(error, EncoderUnavailable) else _RESOURCE_EXHAUSTED,
            retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
            details=error.details,
        )

    def _may_repeat(self, deadline: Deadline) -> bool:
        return self._repeats and not (self._is_fleet and deadline.left_s < MAX_PAUSE_S)

    # Resident rows ----------------------------------------------------------------------------------------

    def read_resident(self, wanted: Sequence[Item | bytes], stream: Any) -> list[Outcome] | None:
        """The rows of all items or keys, read from shared memory on the calling thread; None if any is not
        listed or was lost. For ``sync``, which needs no hop for them."""
        info, shared = self._info, self._shared.current
        if info is None or shared is None or not wanted:
            return None
        items = [one for one in wanted if not isinstance(one, bytes)]
        keys = self._keys(info, items) if items else dict(enumerate(cast("list[bytes]", wanted)))
        listed = _listed(shared, keys)
        rows = self._read_listed(info, listed, stream) if len(listed) == len(wanted) else {}
        return [rows[index] for index in range(len(wanted))] if len(rows) == len(wanted) else None

    def note_device(self) -> None:
        """See ``SharedMemory.note_device``; for ``sync``, on the caller's thread."""
        self._shared.note_device()

    def _is_to_hash(self, item: Item) -> bool:
        """Whether a digest is computed here: for files alone, whose bytes cannot change before they are
        sent."""
        return (
            isinstance(item, ImageItem | ClipItem)
            and not item.digest
            and self._hashes
            and isinstance(item.data, bytes)
            and (len(item.data) <= MAX_HASHED_BYTES or self._is_fleet)
        )

    def hashed(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items, with digests for those of ``_is_to_hash`` while memory is attached, and in a fleet. The
        service hashes the others. For ``sync``, on the caller's thread."""
        if self._shared.current is None and not self._is_fleet:
            return items
        return [
            dataclasses.replace(item, digest=content_digest(item.data))
            if isinstance(item, ImageItem | ClipItem) and self._is_to_hash(item)
            else item
            for item in items
        ]

    def _keys(self, info: ServerInfo, items: Sequence[Item]) -> dict[int, bytes]:
        """Keys of the items that have a digest, by index."""
        models = self._expected_models(info)
        keys: dict[int, bytes] = {}
        for index, item in enumerate(items if len(models) == 1 else ()):
            if item.digest:
                # The service's failure says what is wrong with an item that has no key.
                with contextlib.suppress(EncoderError):
                    keys[index] = item_key(item, models[0], namespace=self._namespace)
        return keys

    async def _read_resident(self, call: RowsCall, keys: Mapping[int, bytes]) -> None:
        """Adds rows that the directory lists to the outcomes. Lost ones are left to the request."""
        if call.shared is not None and (listed := _listed(call.shared, keys)):
            num_bytes = sum(record.rows_bytes for _, record in listed.values())
            read = functools.partial(self._read_listed, call.info, listed, call.stream)
            call.outcomes.update(await _copied(call.shared, num_bytes, read))

    def _read_listed(self, info: ServerInfo, listed: _Listed, stream: Any) -> dict[int, EncodedRows]:
        """On any thread: the rows that are whole and fit the models."""
        read = {
            index: self._read_record(info, arena, record, stream) for index, (arena, record) in listed.items()
        }
        return {index: rows for index, rows in read.items() if rows is not None}

    def _read_record(
        self, info: ServerInfo, arena: MappedArena, record: Record, stream: Any
    ) -> EncodedRows | None:
        """Rows of a directory record, checked as those of an answer; None if they were lost or do not fit."""
        shape = record.num_rows, record.width, record.dtype, record.num_deepstack_levels
        header = RowsHeader(Grid(*record.grid), *shape, record.rows_bytes)
        try:
            check_models(header, info.models)
            check_header(header)
        except InvalidRows:
            return None
        if record.rows_bytes > self._max_rows_bytes:
            return None
        try:
            payload = arena.read(
                record.slot_index, record.generation, record.offset_bytes, record.rows_bytes, stream=stream
            )
        except (MemoryError, MappingFailed):
            return None  # the request that follows says so
        self._reports.note(record.key, record.generation, is_lost=payload is None)
        if payload is None:
            return None
        return header.rows(
            payload,
            key=record.key,
            content_digest=record.content_digest,
            tier=CacheTier.DEVICE if arena.is_device else CacheTier.HOST,
        )

    # Streams of rows --------------------------------------------------------------------------------------

    async def _begin(self, num_items: int, deadline: Deadline, stream: Any) -> RowsCall:
        """Raises TransportUnavailable if inline is excluded and nothing is attached in time."""
        self._shared.note_device()
        stream = stream or current_stream()
        info = await self._known_info(deadline)
        while self._shared.needs_wait:
            if self._shared.is_refused or not deadline.left_s:
                reason = self._shared.transport.reason
                raise TransportUnavailable(f"rows cannot come by shared memory: {reason}")
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
            # Only this tells that the encoder was replaced, or is away.
            info = await self._known_info(deadline, MIN_INFO_AGE_S)
            self._check_open("attaching to shared memory")
        return RowsCall(info, info.models, self._shared.current, stream, deadline, num_items)

    async def _run(self, method: str, call: RowsCall, entries: Mapping[int, pb.Item | bytes]) -> None:
        """Asks until every one of these items or keys, by the caller's index, has its outcome. Raises
        CallFailed."""
        lost: set[int] = set()
        has_broken = False
        while missing := [index for index in entries if index not in call.outcomes]:
            first = [index for index in missing if index not in lost]
            asked = {index: entries[index] for index in first or missing}
            try:
                await self._stream(method, call, asked, call.shared if first else None, lost)
            except CallFailed as error:
                # A failure that the server states itself (DRAINING, ...) has its own reason. Only another
                # replica may answer otherwise.
                is_break = isinstance(error, EncoderUnavailable | TruncatedStream) and (
                    self._is_fleet or error.reason == type(error).default_reason
                )
                if not is_break or has_broken or not self._may_repeat(call.deadline):
                    failure = self._item_failure(error)
                    if failure is None:
                        error.completed = dict(call.outcomes)
                        raise
                    call.outcomes.update(dict.fromkeys(asked, failure))
                    return
                has_broken = True
                items = [entry for entry in asked.values() if not isinstance(entry, bytes)]
                await self._pause(call.deadline, sum(item.ByteSize() for item in items))

    async def _run_all(
        self, method: str, call: RowsCall, batches: Sequence[Mapping[int, pb.Item | bytes]]
    ) -> None:
        try:
            await self._call_each(functools.partial(self._run, method, call), batches)
        except CallFailed as error:
            error.completed = dict(call.outcomes)
            raise

    async def _stream(
        self,
        method: str,
        call: RowsCall,
        entries: Mapping[int, Any],
        shared: AttachedMemory | None,
        lost: set[int],
    ) -> None:
        """One RPC for these items or keys. Adds to the outcomes, and to ``lost`` those whose rows were
        overwritten before they were copied. shared: the memory that rows may be placed in, None for inline.
        Raises CallFailed."""
        request: pb.EncodeRequest | pb.FetchRequest
        keys: Sequence[bytes] = ()
        digests: Sequence[bytes | None] = [None] * len(entries)
        if method == "Encode":
            request = pb.EncodeRequest(items=entries.values(), namespace=self._namespace, model=self._model)
            digests = [item.content_digest or None for item in request.items]
        else:
            request = pb.FetchRequest(keys=entries.values(), namespace=self._namespace)
            keys = request.keys
        request.delivery = pb.DELIVERY_INLINE if shared is None else shared.delivery
        request.after_lost_read = not lost.isdisjoint(entries)
        indices = list(entries)
        assembler = Assembler(
            digests,
            keys=keys,
            models=call.models,
            max_rows_bytes=self._max_rows_bytes,
            allows_places=shared is not None,
        )
        self._check_open(method)
        # Without a deserialiser, messages arrive as bytes.
        start: Any = self._channel.current().unary_stream(f"/{_SERVICE}/{method}")
        metadata = self._channel.metadata() + self._route(call.routes, indices)
        rpc = start(request.SerializeToString(), timeout=call.deadline.left_s, metadata=metadata)
        try:
            async for message in rpc:
                found = assembler.feed(message)
                if isinstance(found, PlacedRows):
                    assert shared is not None
                    index = indices[found.position]
                    rows = await self._read_placed(shared, found, call.stream)
                    if rows is None:
                        lost.add(index)
                    else:
                        call.outcomes[index] = rows
                elif found is not None:
                    position, outcome = found
                    call.outcomes[indices[position]] = outcome
                    if isinstance(outcome, InvalidRows):
                        self._info = None  # the server may have been replaced by one with another model
            self._note_instance(await rpc.trailing_metadata())
            assembler.finish()
        except grpc.RpcError as error:
            raise self._failed(error, method, call.num_items, len(call.outcomes)) from error
        except asyncio.CancelledError as error:
            self._raise_if_closed(method, error)
            raise
        finally:
            rpc.cancel()

    async def _read_placed(self, shared: AttachedMemory, placed: PlacedRows, stream: Any) -> Outcome | None:
        """None for rows that were lost or that the driver does not copy: they come inline."""
        place, num_bytes = placed.place, placed.header.rows_bytes
        read = functools.partial(shared.read_place, place, num_bytes, stream=stream)
        try:
            payload = await _copied(shared, num_bytes, read)
        except MemoryError:
            return out_of_memory(num_bytes)
        except MappingFailed as error:
            _log.warning("rows were not copied: %s", error.message)
            return None
        if payload is None:
            return None  # the request that follows reports the loss
        self._reports.note(placed.result.key, place.generation, is_lost=False)
        return placed.rows(payload)

    async def _send_report(self, rows: Sequence[tuple[bytes, int]], num_lost: int) -> None:
        touched = [pb.TouchedRows(key=key, generation=generation) for key, generation in rows]
        request = pb.TouchRequest(rows=touched, namespace=self._namespace, num_lost=num_lost)
        await self._unary("Touch", request, pb.TouchResponse, Deadline(self._timeout_s))

    # The server and its calls -----------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _known_info(self, deadline: Deadline, max_age_s: float = math.inf) -> ServerInfo:
        """The server's information, asked for if it is not known or too old. Raises CallFailed."""
        self._check_open("GetServerInfo")
        known = self._info
        oldest_s = time.monotonic() - (FLEET_INFO_S if self._is_fleet else max_age_s)
        if known is not None and self._info_time_s >= oldest_s:
            return known
        try:
            async with asyncio.timeout(deadline.left_s), self._info_lock:
                if self._info is not None and self._info is not known:
                    return self._info
                return await self._ask_info(deadline)
        except EncoderUnavailable:
            if known is None or not self._is_fleet:
                raise
            return known
        except TimeoutError as error:
            raise DeadlineExceeded(f"the server at {self.target} did not describe itself in time") from error

    async def _ask_info(self, deadline: Deadline) -> ServerInfo:
        request = pb.GetServerInfoRequest(protocol_version=PROTOCOL_VERSION)
        response = await self._unary("GetServerInfo", request, pb.GetServerInfoResponse, deadline)
        info = convert.server_info(response)
        if info.min_protocol_version > PROTOCOL_VERSION or info.protocol_version < MIN_PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the server at {self.target} speaks protocol versions {info.min_protocol_version} to "
                f"{info.protocol_version}, this adapter {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            )
        self._info_time_s = time.monotonic()
        self._info = info
        self._shared.offer(info)
        return info

    def _expected_models(self, info: ServerInfo) -> Sequence[ModelInfo]:
        """The models whose geometry rows may have: the named one, or all where the name does not settle
        it."""
        return [model for model in info.models if model.name == self._model] or info.models

    async def _is_serving(self, deadline: Deadline) -> bool:
        """The answer of grpc.health.v1."""
        response = await self._unary_once("Check", b"", deadline, service="grpc.health.v1.Health")
        # HealthCheckResponse: field 1 (status) has the value 1 (SERVING).
        return response.startswith(b"\x08\x01")

    async def _unary(
        self,
        method: str,
        request: Message,
        response_type: type[ResponseT],
        deadline: Deadline,
        route: Metadata = (),
    ) -> ResponseT:
        """One RPC; in a fleet repeated once when the replica or the gateway went away."""
        message = request.SerializeToString()
        try:
            response = await self._unary_once(method, message, deadline, route)
        except EncoderUnavailable:
            if not self._is_fleet or not self._may_repeat(deadline):
                raise
            await self._pause(deadline)
            response = await self._unary_once(method, message, deadline, route)
        try:
            return response_type.FromString(response)
        except DecodeError as error:
            raise StreamViolation(f"{method} answered {len(response)} bytes that are no message") from error

    async def _pause(self, deadline: Deadline, num_bytes: int = 0) -> None:
        """Before a repeat in a fleet. num_bytes: of the items that are sent again."""
        if self._is_fleet:
            pause_s = random.uniform(MIN_PAUSE_S, MAX_PAUSE_S)  # noqa: S311 - only spreads repeats
            if num_bytes > GATEWAY_BUFFER_BYTES:
                pause_s += LARGE_PAUSE_S
            await asyncio.sleep(min(pause_s, deadline.left_s))

    async def _unary_once(
        self,
        method: str,
        request: bytes,
        deadline: Deadline,
        route: Metadata = (),
        *,
        service: str = _SERVICE,
    ) -> bytes:
        self._check_open(method)
        # Without serialisers, messages are bytes.
        call: Any = self._channel.current().unary_unary(f"/{service}/{method}")
        try:
            rpc = call(request, timeout=deadline.left_s, metadata=self._channel.metadata() + route)
            response: bytes = await rpc
            self._note_instance(await rpc.trailing_metadata())
            return response
        except grpc.RpcError as error:
            raise self._failed(error, method) from error
        except asyncio.CancelledError as error:
            self._raise_if_closed(method, error)
            raise

    def _note_instance(self, trailers: Any) -> None:
        """Forgets the server's information when another instance has answered. At most once in
        MIN_INFO_AGE_S: several servers may share the address. In a fleet they always do."""
        info = self._info
        if info is None or self._is_fleet or time.monotonic() - self._info_time_s < MIN_INFO_AGE_S:
            return
        found = dict(trailers or ()).get(INSTANCE_KEY, info.instance_id)
        if found != info.instance_id:
            self._info = None

    def _failed(
        self, error: grpc.RpcError, method: str, num_items: int = 0, num_arrived: int = 0
    ) -> CallFailed:
        """The adapter's error for gRPC's. Raises CancelledError for a task that was cancelled: gRPC sometimes
        tells it so by the status CANCELLED."""
        task = asyncio.current_task()
        if error.code() is grpc.StatusCode.CANCELLED and task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        if self._is_closed:
            return self._closed_during(method)
        failure = from_rpc_error(
            error, target=self.target, method=method, num_items=num_items, num_arrived=num_arrived
        )
        if isinstance(failure, EncoderUnavailable) and not self._is_fleet:
            self._info = None
        return failure

    def _check_open(self, method: str) -> None:
        if os.getpid() != self._pid:
            raise CallCancelled(f"{method} at {self.target}: the client belongs to the parent process")
        if self._is_closed:
            raise self._closed_during(method)

    def _raise_if_closed(self, method: str, error: asyncio.CancelledError) -> None:
        """gRPC cancels the tasks that wait for a channel that is being closed."""
        task = asyncio.current_task()
        if self._is_closed and not (task is not None and task.cancelling()):
            raise self._closed_during(method) from error

    def _closed_during(self, method: str) -> CallCancelled:
        return CallCancelled(f"{method} at {self.target} was cancelled: the client is closed")


def _listed(shared: AttachedMemory, keys: Mapping[int, bytes]) -> _Listed:
    """Where the directory lists keys, by the caller's index."""
    return {index: found for index, key in keys.items() if (found := shared.find(key)) is not None}


async def _copied(shared: AttachedMemory, num_bytes: int, read: Callable[[], ResultT]) -> ResultT:
    """The result of a read: made on the loop if it is short, as a change of threads would take longer."""
    is_short = shared.copy_s(num_bytes) <= MAX_LOOP_COPY_S
    return read() if is_short else await asyncio.to_thread(read)


def rows_or_raise(outcome: Outcome) -> EncodedRows:
    """The rows. Raises ItemFailed."""
    if isinstance(outcome, ItemFailed):
        raise outcome
    return outcome
