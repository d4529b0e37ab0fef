"""What the two clients share: everything of a call but its I/O.

Owns the protocol check, the building of requests and their metadata, and the reading of answers. Holds what
a channel has learnt of its server; forgets it when the server may have been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import grpc

from lm_adapter import convert
from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES, Expected, PreparedItems, prepare_items
from lm_adapter.calls import (
    EncodePlan,
    PrefetchCall,
    PrefetchPlan,
    RowsCall,
    digest_metadata,
    rows_call,
)
from lm_adapter.checks import RowsHeader, check_header, check_keys, check_models
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    EncoderUnavailable,
    InvalidRequest,
    ItemFailed,
    ProtocolMismatch,
    StreamViolation,
    from_rpc_error,
)
from lm_adapter.leases import LeaseRecord, LeaseReturns
from lm_adapter.resident import ResidentRows
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.transport.channel import bearer
from lm_adapter.transport.chooser import TransportChooser
from lm_adapter.transport.local_calls import LocalCalls
from lm_adapter.transport.pixel_choice import NO_PIXELS, CallPixels, PixelChoice
from lm_adapter.transport.reading import Receiver, Unreadable
from lm_adapter.transport.settings import TransportSettings
from lm_adapter.types import (
    CacheTier,
    EncodedRows,
    Grid,
    Item,
    KeyStatus,
    LeaseStatus,
    ModelInfo,
    Outcome,
    ServerInfo,
)
from vision_encoder.v1 import encoder_pb2 as pb

PROTOCOL_VERSION = 1
"""The newest protocol version that this adapter speaks."""
MIN_PROTOCOL_VERSION = 1
RELEASE_TIMEOUT_S = 5.0
"""Of one call that gives leases back; what fails expires."""
INSTANCE_KEY = "x-instance-id"
"""Of trailing metadata: the ``instance_id`` of the server that answered."""
MIN_INFO_AGE_S = 1.0

SendRelease: TypeAlias = Callable[[pb.ReleaseRequest, Callable[[], None]], None]


class Deadline:
    """Time left of one call that may take several RPCs."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}, needs to be above 0")
        self._expires_at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative: gRPC answers 0 with DEADLINE_EXCEEDED."""
        left_s = self._expires_at_s - time.monotonic()
        return max(0.0, left_s)


class Session:
    """One client's settings and what it knows of its server. Safe to share between threads: ``info`` is
    replaced as a whole, ``transports`` guards itself."""

    def __init__(
        self,
        target: str,
        *,
        namespace: str = "",
        model: str = "",
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        settings: TransportSettings,
        send_release: SendRelease,
    ) -> None:
        """send_release: see ``LeaseReturns``."""
        self.returns = LeaseReturns(send_release)
        self.transports = TransportChooser(
            settings, self.returns, namespace=namespace, on_replaced=self.forget_info
        )
        self.local = LocalCalls()
        self._pixel_choice = PixelChoice(settings)
        self.resident = ResidentRows(self)
        self._token = settings.token_now
        bearer(self._token())  # what no header can carry is refused now
        self.target = target
        self.namespace = namespace
        self.model = model
        self.max_rows_bytes = max_rows_bytes
        self.info: ServerInfo | None = None
        self._told_at_s = 0.0

    @property
    def bearer(self) -> tuple[tuple[str, str], ...]:
        """Metadata that opens the namespace, with the token of now."""
        return bearer(self._token())

    def close(self) -> None:
        """Ends calls over sockets and the shared memory's session. Twice is once."""
        self.local.close()
        self.transports.close()

    def info_request(self) -> pb.GetServerInfoRequest:
        return pb.GetServerInfoRequest(protocol_version=PROTOCOL_VERSION)

    def accept_info(self, response: pb.GetServerInfoResponse) -> ServerInfo:
        """Takes the server's word for later calls. Raises ProtocolMismatch without a common version."""
        info = convert.server_info(response)
        if not (
            info.min_protocol_version <= PROTOCOL_VERSION and info.protocol_version >= MIN_PROTOCOL_VERSION
        ):
            raise ProtocolMismatch(
                f"the server at {self.target} speaks protocol versions {info.min_protocol_version} to "
                f"{info.protocol_version}, this adapter {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            )
        self._told_at_s = time.monotonic()
        self.info = info
        self.transports.offer(info)
        return info

    def forget_info(self) -> None:
        """The server may be another one by now: the next call asks again."""
        self.info = None

    def note_server(self, trailers: Iterable[tuple[str, str | bytes]] | None) -> None:
        """A call's trailing metadata. What is known of a server is forgotten once another start of it, or
        another one at its address, answers; not more than once in ``MIN_INFO_AGE_S``, for addresses with
        several behind them."""
        info = self.info
        if info is None or trailers is None or time.monotonic() - self._told_at_s < MIN_INFO_AGE_S:
            return
        for name, value in trailers:
            if name == INSTANCE_KEY:
                if value != info.instance_id:
                    self.forget_info()
                return

    def pixels(self, info: ServerInfo, items: Sequence[Item]) -> CallPixels:
        """What of these items is to go by shared memory: to be published, and closed after the call."""
        return self._pixel_choice.call(info, items, self.transports.current)

    def encode_plan(
        self,
        info: ServerInfo,
        items: Sequence[Item],
        handling: RowsHandling,
        pixels: CallPixels = NO_PIXELS,
    ) -> EncodePlan:
        """The calls that these items need: one, or several where the server's limits say so. Raises
        InvalidRequest for buffers that are not one per item."""
        handling.check_items(len(items))
        prepared = self._prepare(info, items, pixels)
        transport, inline_allowed = self.transports.current(), self.transports.settings.inline_allowed
        calls: list[RowsCall] = []
        num_before = len(prepared.refused)
        for batch in prepared.batches:
            calls.append(
                rows_call(
                    self,
                    "Encode",
                    pb.EncodeRequest(items=batch.messages, namespace=self.namespace, model=self.model),
                    metadata=digest_metadata([items[index] for index in batch.indices]),
                    expected=[
                        Expected(content_digest=items[index].digest or None) for index in batch.indices
                    ],
                    models=self.models(info),
                    receiver=Receiver(handling, batch.indices, transport, inline_allowed),
                    num_before=num_before,
                    num_items=len(items),
                    pixels=pixels,
                )
            )
            num_before += len(batch.indices)
        return EncodePlan(prepared.refused, calls)

    def fetch_calls(self, info: ServerInfo, keys: Sequence[bytes], handling: RowsHandling) -> list[RowsCall]:
        """As ``encode_plan``. Raises InvalidRequest for a key that has not 32 bytes."""
        handling.check_items(len(keys))
        transport, inline_allowed = self.transports.current(), self.transports.settings.inline_allowed
        calls: list[RowsCall] = []
        start = 0
        for portion in portions(info, check_keys(keys)):
            calls.append(
                rows_call(
                    self,
                    "Fetch",
                    pb.FetchRequest(keys=portion, namespace=self.namespace),
                    metadata=(),
                    expected=[Expected(key=key) for key in portion],
                    models=info.models,  # a key may be of any of the server's models
                    receiver=Receiver(
                        handling, range(start, start + len(portion)), transport, inline_allowed
                    ),
                    num_before=start,
                    num_items=len(keys),
                )
            )
            start += len(portion)
        return calls

    def read_shared(
        self, info: ServerInfo, record: LeaseRecord, handling: RowsHandling
    ) -> EncodedRows | None:
        """Rows that another reader's call asked for, out of shared memory; None when they are to be fetched
        by key. Raises InvalidRows, ItemFailed, and TransportUnavailable where only this way is allowed."""
        header = RowsHeader(
            Grid(*record.grid_thw),
            record.num_rows,
            record.width,
            record.dtype,
            record.num_deepstack_levels,
            record.rows_bytes,
            record.chunk_grids,
        )
        check_models(header, info.models)
        check_header(header)
        transport = self.transports.current()
        if transport is None or record.transport == "inline":
            return None
        try:
            payload, reading = Receiver(handling, (0,), transport).read(0, record)
        except Unreadable:
            return None
        return EncodedRows(
            key=record.key,
            content_digest=record.content_digest,
            grid_thw=header.grid_thw,
            num_rows=record.num_rows,
            width=record.width,
            dtype=record.dtype,
            num_deepstack_levels=record.num_deepstack_levels,
            payload=payload,
            tier=CacheTier.DEVICE if record.transport == "device" else CacheTier.HOST,
            timestamps_s=record.timestamps_s,
            chunk_grids=record.chunk_grids,
            reading=reading,
        )

    def prefetch_plan(
        self, info: ServerInfo, items: Sequence[Item], pixels: CallPixels = NO_PIXELS
    ) -> PrefetchPlan:
        """As ``encode_plan``."""
        prepared = self._prepare(info, items, pixels)
        calls = [
            PrefetchCall(
                pb.PrefetchRequest(items=batch.messages, namespace=self.namespace, model=self.model),
                digest_metadata([items[index] for index in batch.indices]),
                batch.indices,
                pixels,
            )
            for batch in prepared.batches
        ]
        return PrefetchPlan(prepared.refused, calls)

    def lookup_requests(self, info: ServerInfo, keys: Sequence[bytes]) -> list[pb.LookupRequest]:
        """As ``fetch_calls``."""
        return [
            pb.LookupRequest(keys=portion, namespace=self.namespace)
            for portion in portions(info, check_keys(keys))
        ]

    def read_lookup(self, keys: Sequence[bytes], response: pb.LookupResponse) -> list[KeyStatus]:
        """One status per key, in order. Raises StreamViolation when they are not the keys asked for."""
        statuses = [convert.key_status(status) for status in response.statuses]
        if [status.key for status in statuses] != list(keys):
            raise StreamViolation(
                f"Lookup answered for {len(statuses)} keys, {len(keys)} were asked, or for others"
            )
        return statuses

    def read_renew(
        self, lease_ids: Sequence[bytes], response: pb.RenewResponse
    ) -> list[LeaseStatus | ItemFailed]:
        if len(response.statuses) != len(lease_ids):
            raise StreamViolation(
                f"Renew answered for {len(response.statuses)} leases, {len(lease_ids)} were asked"
            )
        return [convert.lease_status(status) for status in response.statuses]

    def failed(
        self, error: grpc.RpcError, method: str, *, closed: bool, num_items: int = 0, num_arrived: int = 0
    ) -> CallFailed:
        """The adapter's error for a failed RPC. closed: whether this client was closed under the call."""
        if closed:
            return self.closed_under(method)
        failure = from_rpc_error(
            error, target=self.target, method=method, num_items=num_items, num_arrived=num_arrived
        )
        if isinstance(failure, EncoderUnavailable):
            self.forget_info()
        return failure

    def closed_under(self, method: str) -> CallCancelled:
        return CallCancelled(f"{method} at {self.target} was cancelled: the client is closed")

    def _prepare(self, info: ServerInfo, items: Sequence[Item], pixels: CallPixels) -> PreparedItems:
        return prepare_items(
            items,
            max_message_bytes=info.limits.max_message_bytes,
            max_items=info.limits.max_items_per_request,
            shared=pixels.messages,
        )

    def models(self, info: ServerInfo) -> Sequence[ModelInfo]:
        """The geometry that rows must have; all of the server's when the model's name does not settle it,
        in which case the server refuses the call or knows a default."""
        named = [model for model in info.models if model.name == self.model]
        return named or info.models


def portions(info: ServerInfo, entries: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Keys or lease ids in as many calls as the server's limit of one needs; no call for none."""
    size = info.limits.max_items_per_request or len(entries) or 1
    return [entries[start : start + size] for start in range(0, len(entries), size)]


def rows_or_raise(outcome: Outcome) -> EncodedRows:
    """The rows. Raises ItemFailed."""
    if isinstance(outcome, ItemFailed):
        raise outcome
    return outcome
