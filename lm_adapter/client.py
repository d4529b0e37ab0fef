"""The asyncio client, the one implementation of the public methods; ``sync`` has a blocking facade over it.

Owns the order in which rows are looked for: the directory in shared memory first, then Encode or Fetch.
``calls`` makes the calls, ``routing`` divides items among them, ``resident`` reads shared memory.
``local_first`` has two targets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast, overload

from lm_adapter import convert
from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES, prepare_items
from lm_adapter.calls import MIN_INFO_AGE_S, Deadline, RowsCall, Server
from lm_adapter.channel import Channel, ClientTls, FilePath
from lm_adapter.checks import check_items, check_keys
from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderOverloaded,
    EncoderUnavailable,
    ItemFailed,
    StreamViolation,
    TransportUnavailable,
)
from lm_adapter.items import Item
from lm_adapter.keys import known_keys, lacks_digest, with_digests
from lm_adapter.read_reports import ReadReports
from lm_adapter.routing import Direct
from lm_adapter.shm.attachment import TRANSPORTS, SharedMemory, Transport, check_transports
from lm_adapter.shm.mapping import current_stream
from lm_adapter.types import EncodedRows, KeyStatus, ModelInfo, Outcome, PrefetchStatus, ServerInfo
from lm_adapter.window import DEFAULT_MAX_IN_FLIGHT, Permits, Window, is_overload
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

    from lm_adapter.resident import ResidentRows
    from lm_adapter.types import CheckServer

DEFAULT_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
MAX_HASHED_BYTES = 8 << 20
"""Larger files are hashed by the service, on its decode threads."""


class AsyncVisionEncoderClient:
    """A client of one service address, on one event loop. An async context manager.

    Every call has a deadline (``timeout_s`` of the call, or of the client) and raises errors of
    ``lm_adapter.errors`` only. An item that fails is returned as ItemFailed in its place; the call itself
    raises CallFailed. Any number of calls can be made at once: items wait in the client for ``max_in_flight``
    and while the service is overloaded, until the call's deadline. Rows come in the best of ``transports``
    that works between this process and the encoder, which is found in the background; ``transport`` says
    which, and why."""

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
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        waits: bool = True,
        check_server: CheckServer | None = None,
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
        gRPC channel arguments, in addition to the defaults in ``channel``. max_in_flight: items at the
        service at a time. waits: an overloaded service is asked again until the deadline; otherwise the call
        raises EncoderOverloaded at once. check_server: is called with each information of a server, before it
        is used; what it raises ends the call. fleet: the target is a gateway before many encoders, or a name
        with the addresses of several gateways; rows come inline. repeats: a stream that broke is requested
        once more."""
        self._routing = Direct(repeats=repeats)
        if fleet:
            from lm_adapter.fleet import FLEET_OPTIONS, Fleet

            self._routing = Fleet(repeats=repeats)
            transports, options = ("inline",), FLEET_OPTIONS | dict(options or {})
        transports = check_transports(transports, broker_path)
        self.target = target
        self._namespace = namespace
        self._model = model
        self._timeout_s = timeout_s
        self._max_rows_bytes = max_rows_bytes
        channel = Channel(target, tls=tls, token=token, token_file=token_file, options=options)
        self._shared = SharedMemory(
            transports,
            namespace=namespace,
            token=lambda: channel.token,
            broker_path=broker_path,
            device=device,
        )

        def on_info(info: ServerInfo) -> None:
            if check_server is not None:
                check_server(target, info)
            self._shared.offer(info)

        window = Window(max_in_flight, waits=waits)
        self._server = Server(target, channel, self._routing, window, on_info)
        self._reports = ReadReports(asyncio.get_running_loop(), self._send_report)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def transport(self) -> Transport:
        """How rows come now, and why."""
        return self._shared.transport

    async def close(self) -> None:
        """Ends calls in progress with CallCancelled, and unmaps shared memory. Can be repeated."""
        self._reports.close()
        await self._server.close()
        await asyncio.to_thread(self._shared.close)

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The server's models, limits and transports, requested now. Raises ProtocolMismatch."""
        return await self._server.request_info(self._deadline(timeout_s))

    async def is_serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether the health check of the server at ``target`` says SERVING now. Raises CallFailed."""
        return await self._server.is_serving(self._deadline(timeout_s))

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
                    info = await self._server.request_info(deadline)
                    if await self._server.is_serving(deadline):
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
        await self._server.known_info(deadline)
        while not self._shared.has_tried and deadline.left_s > 0:
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
            self._server.check_open("wait_transport")
        return self._shared.transport

    @overload
    async def encode(
        self, items: Item, *, timeout_s: float | None = None, stream: Any = None
    ) -> EncodedRows: ...
    @overload
    async def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, stream: Any = None
    ) -> list[Outcome]: ...
    async def encode(
        self, items: Item | Sequence[Item], *, timeout_s: float | None = None, stream: Any = None
    ) -> EncodedRows | list[Outcome]:
        """Rows or failure of each item, in input order. Of a single item that is in no list: its rows; raises
        ItemFailed. Items beyond the server's limits of one call are sent in several, one after another.

        stream: the torch.cuda.Stream on which rows on a GPU are used; by default the calling thread's current
        one. Raises CallFailed when the call failed before every item had its outcome, EncoderOverloaded if
        the service had no room for some until the deadline; ``completed`` of the error maps the indices of
        the others to their outcome."""
        if isinstance(items, Item):
            return await self.encode_one(items, timeout_s=timeout_s, stream=stream)
        return await self._encode(check_items(items), timeout_s=timeout_s, stream=stream)

    async def _encode(
        self, items: Sequence[Item], *, timeout_s: float | None, stream: Any = None
    ) -> list[Outcome]:
        request = functools.partial(pb.EncodeRequest, namespace=self._namespace, model=self._model)
        call = await self._rows_call(request, len(items), timeout_s, stream)
        call.models = self._candidates(call.info)
        items, call.routes = await self._routing.routed(items)
        if call.resident is not None:
            if any(lacks_digest(item, MAX_HASHED_BYTES) for item in items):
                items = await asyncio.to_thread(self.hashed, items)
            await call.read_listed(known_keys(items, call.models, self._namespace))
        unread = {index: item for index, item in enumerate(items) if index not in call.outcomes}
        batches, refused = prepare_items(unread, self._routing.limits(call.info.limits))
        call.outcomes.update(refused)
        return await call.run(batches)

    async def encode_one(
        self, item: Item, *, timeout_s: float | None = None, stream: Any = None
    ) -> EncodedRows:
        """The same as ``encode`` of one item. Raises ItemFailed, CallFailed."""
        (outcome,) = await self._encode(check_items([item]), timeout_s=timeout_s, stream=stream)
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
        needs them for keys that another client announced. Other arguments and errors as in ``encode``."""
        keys, routes = check_keys(keys), self._routing.routes_of(keys, routing_digests)
        if not keys:
            return []
        request = functools.partial(pb.FetchRequest, namespace=self._namespace)
        call = await self._rows_call(request, len(keys), timeout_s, stream)
        call.routes = routes
        await call.read_listed(dict(enumerate(keys)))
        unread = [index for index in range(len(keys)) if index not in call.outcomes]
        portions = self._portions(call.info, unread)
        return await call.run([{index: keys[index] for index in portion} for portion in portions])

    async def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None, until_encoded: bool = False
    ) -> list[PrefetchStatus | ItemFailed]:
        """Starts to encode and keeps the rows in the service. Answers once every item is admitted, with its
        key, and with its grid and a clip's timestamps if the file's header was read. The encode goes on
        without this client. until_encoded: answers once every item is encoded or has failed; then the encode
        ends with this call. No rows come.

        Raises CallFailed; ``completed`` of the error has the statuses that had come, by index."""
        items = check_items(items)
        deadline, window = self._deadline(timeout_s), self._server.window
        info = await self._server.known_info(deadline)
        items, routes = await self._routing.routed(items)
        batches, refused = prepare_items(dict(enumerate(items)), self._routing.limits(info.limits))
        statuses: dict[int, PrefetchStatus | ItemFailed] = dict(refused)

        async def announce(batch: Mapping[int, pb.Item], permits: Permits) -> None:
            message = pb.PrefetchRequest(
                items=batch.values(),
                namespace=self._namespace,
                model=self._model,
                until_encoded=until_encoded,
            )
            route = routes.get(next(iter(batch)))
            try:
                response = await self._server.unary("Prefetch", message, pb.PrefetchResponse, deadline, route)
            except CallFailed as error:
                failure = self._routing.item_failure(error)
                if failure is None:
                    raise
                statuses.update(dict.fromkeys(batch, failure))
                return
            if len(response.statuses) != len(batch):
                raise StreamViolation(
                    f"Prefetch answered for {len(response.statuses)} items, {len(batch)} were sent"
                )
            for index, answer in zip(batch, response.statuses, strict=True):
                status = convert.prefetch_status(answer, routes.get(index, b""))
                if is_overload(status):
                    permits.refuse(status)
                    continue
                if isinstance(status, PrefetchStatus):
                    self._routing.note_key(status.key, routes.get(index))
                statuses[index] = status
                permits.end()

        async def announce_all(batch: Mapping[int, pb.Item]) -> None:
            ticket = window.ticket()
            while left := [index for index in batch if index not in statuses]:
                async with window.permits(ticket, len(left), deadline) as permits:
                    await announce({index: batch[index] for index in left[: permits.num_left]}, permits)

        try:
            await self._routing.run_each(announce_all, batches)
        except CallFailed as error:
            error.completed = statuses
            raise
        return [statuses[index] for index in range(len(items))]

    async def known_key(self, item: Item, *, timeout_s: float | None = None) -> bytes | None:
        """The item's key, derived here; None if it has no digest or the server has several models and none is
        named. Raises CallFailed if the server's information is unknown and not available."""
        info = await self._server.known_info(self._deadline(timeout_s))
        return known_keys([item], self._candidates(info), self._namespace).get(0)

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[KeyStatus]:
        """Whether each key's rows are resident, being encoded, or absent; in the order of ``keys``.
        routing_digests: as in ``fetch``."""
        keys, routes = check_keys(keys), self._routing.routes_of(keys, routing_digests)
        if not keys:
            return []
        deadline = self._deadline(timeout_s)
        statuses: dict[int, KeyStatus] = {}

        async def request(portion: Sequence[int]) -> None:
            requested = [keys[index] for index in portion]
            message = pb.LookupRequest(keys=requested, namespace=self._namespace)
            route = routes.get(portion[0])
            response = await self._server.unary(
                "Lookup", message, pb.LookupResponse, deadline, route, waits=self._server.window.waits
            )
            answered = [convert.key_status(status) for status in response.statuses]
            if [status.key for status in answered] != requested:
                raise StreamViolation(
                    f"Lookup answered for {len(answered)} keys, {len(portion)} were requested, or for others"
                )
            statuses.update(zip(portion, answered, strict=True))

        info = await self._server.known_info(deadline)
        await self._routing.run_each(request, self._portions(info, range(len(keys))))
        return [statuses[index] for index in range(len(keys))]

    # For ``sync``, on the caller's thread -----------------------------------------------------------------

    def note_device(self) -> None:
        """See ``SharedMemory.note_device``."""
        self._shared.note_device()

    def hashed(self, items: Sequence[Item]) -> Sequence[Item]:
        """Adds digests to files while memory is attached, whose directory can then be searched. Otherwise it
        does nothing: the service hashes. Raises InvalidRequest."""
        items = check_items(items)
        return items if self._shared.current is None else with_digests(items, MAX_HASHED_BYTES)

    def read_resident(self, entries: Sequence[Item | bytes], stream: Any) -> list[Outcome] | None:
        """The rows of all items or keys, read from shared memory; None if any is not listed or was lost."""
        info = self._server.info
        resident = None if info is None else self._resident(info.models, stream)
        if info is None or resident is None or not entries:
            return None
        items = [entry for entry in entries if not isinstance(entry, bytes)]
        keys = dict(enumerate(cast("list[bytes]", entries)))
        if items:
            keys = known_keys(items, self._candidates(info), self._namespace)
        return resident.read_all(keys) if len(keys) == len(entries) else None

    # Parts of calls ---------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _rows_call(
        self,
        request: Callable[[], pb.EncodeRequest | pb.FetchRequest],
        num_items: int,
        timeout_s: float | None,
        stream: Any,
    ) -> RowsCall:
        """Raises CallFailed; TransportUnavailable if inline is excluded and nothing is attached in time."""
        deadline = self._deadline(timeout_s)
        self._shared.note_device()
        stream = stream or current_stream()
        info = await self._server.known_info(deadline)
        while self._shared.needs_wait:
            if self._shared.is_refused or not deadline.left_s:
                reason = self._shared.transport.reason
                raise TransportUnavailable(f"rows cannot come by shared memory: {reason}")
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
            # Only a call shows that the encoder was replaced, or is away. The loop's end has the reason.
            with contextlib.suppress(DeadlineExceeded):
                info = await self._server.known_info(deadline, MIN_INFO_AGE_S)
            self._server.check_open("attaching to shared memory")
        resident = self._resident(info.models, stream)
        return RowsCall(
            self._server, request, info, info.models, self._max_rows_bytes, resident, deadline, num_items
        )

    def _resident(self, models: Sequence[ModelInfo], stream: Any) -> ResidentRows | None:
        """The rows in shared memory; None while none is attached."""
        memory = self._shared.current
        if memory is None:
            return None
        from lm_adapter.resident import ResidentRows  # a client without shared memory does not need it

        return ResidentRows(memory, models, self._max_rows_bytes, self._reports, stream)

    def _candidates(self, info: ServerInfo) -> Sequence[ModelInfo]:
        """The models that may encode: the one of the client's name, or all if none has it."""
        return [model for model in info.models if model.name == self._model] or info.models

    def _portions(self, info: ServerInfo, indices: Sequence[int]) -> list[Sequence[int]]:
        """Indices of keys in as many calls as the limit of items needs."""
        size = self._routing.limits(info.limits).max_items_per_request or len(indices) or 1
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    async def _send_report(self, rows: Sequence[tuple[bytes, int]], num_lost: int) -> None:
        touched = [pb.TouchedRows(key=key, generation=generation) for key, generation in rows]
        request = pb.TouchRequest(rows=touched, namespace=self._namespace, num_lost=num_lost)
        await self._server.unary("Touch", request, pb.TouchResponse, Deadline(self._timeout_s))


def rows_or_raise(outcome: Outcome) -> EncodedRows:
    """The rows. Raises ItemFailed."""
    if isinstance(outcome, ItemFailed):
        raise outcome
    return outcome
