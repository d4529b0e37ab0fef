"""What the two clients share: everything of a call but its I/O.

Owns the protocol check, the building of requests and their metadata, and the reading of answers. Holds what
a channel has learnt of its server; forgets it when the server may have been replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from lm_adapter import convert
from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES, Assembler, Expected, prepare_items
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
    ProtocolMismatch,
    StreamViolation,
    from_rpc_error,
)
from lm_adapter.types import (
    DIGEST_BYTES,
    EncodedRows,
    Item,
    KeyStatus,
    LeaseStatus,
    ModelInfo,
    Outcome,
    PrefetchStatus,
    ServerInfo,
)
from vision_encoder.v1 import encoder_pb2 as pb

PROTOCOL_VERSION = 1
"""The newest protocol version that this adapter speaks."""
MIN_PROTOCOL_VERSION = 1
DIGEST_HEADER = "x-content-digest"
"""Hex digest of a call's only item, for ring-hash load balancing."""

Metadata = tuple[tuple[str, str], ...]


class Deadline:
    """Time left of one call that may take several RPCs."""

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}, needs to be above 0")
        self._expires_at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative: gRPC answers 0 with DEADLINE_EXCEEDED."""
        return max(0.0, self._expires_at_s - time.monotonic())


class Session:
    """One client's settings and what it knows of its server. Safe to share between threads: the only state
    is ``info``, replaced as a whole."""

    def __init__(
        self,
        target: str,
        *,
        namespace: str = "",
        model: str = "",
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
    ) -> None:
        self.target = target
        self.namespace = namespace
        self.model = model
        self.max_rows_bytes = max_rows_bytes
        self.info: ServerInfo | None = None

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
        self.info = info
        return info

    def forget_info(self) -> None:
        """The server may be another one by now: the next call asks again."""
        self.info = None

    def encode_call(self, info: ServerInfo, items: Sequence[Item]) -> RowsCall:
        """Raises InvalidRequest when the items together are over the server's limits."""
        prepared = prepare_items(
            items,
            max_message_bytes=info.limits.max_message_bytes,
            max_items=info.limits.max_items_per_request,
        )
        request = pb.EncodeRequest(
            items=prepared.messages,
            namespace=self.namespace,
            model=self.model,
            delivery=pb.DELIVERY_INLINE,
        )
        expected = [Expected(content_digest=items[index].digest or None) for index in prepared.indices]
        return RowsCall(
            session=self,
            method="Encode",
            request=request,
            metadata=digest_metadata(items),
            indices=prepared.indices,
            refused=prepared.refused,
            assembler=Assembler(expected, models=self._models(info), max_rows_bytes=self.max_rows_bytes),
        )

    def fetch_call(self, info: ServerInfo, keys: Sequence[bytes]) -> RowsCall:
        """Raises InvalidRequest for a key that has not 32 bytes."""
        request = pb.FetchRequest(
            keys=check_keys(keys), namespace=self.namespace, delivery=pb.DELIVERY_INLINE
        )
        return RowsCall(
            session=self,
            method="Fetch",
            request=request,
            metadata=(),
            indices=list(range(len(keys))),
            refused={},
            # A key may be of any of the server's models.
            assembler=Assembler(
                [Expected(key=key) for key in keys], models=info.models, max_rows_bytes=self.max_rows_bytes
            ),
        )

    def prefetch_call(self, info: ServerInfo, items: Sequence[Item]) -> PrefetchCall:
        """Raises InvalidRequest when the items together are over the server's limits."""
        prepared = prepare_items(
            items,
            max_message_bytes=info.limits.max_message_bytes,
            max_items=info.limits.max_items_per_request,
        )
        request = pb.PrefetchRequest(items=prepared.messages, namespace=self.namespace, model=self.model)
        return PrefetchCall(request, digest_metadata(items), prepared.indices, prepared.refused)

    def lookup_request(self, keys: Sequence[bytes]) -> pb.LookupRequest:
        return pb.LookupRequest(keys=check_keys(keys), namespace=self.namespace)

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

    def _models(self, info: ServerInfo) -> Sequence[ModelInfo]:
        """The geometry that rows must have; all of the server's when the model's name does not settle it,
        in which case the server refuses the call or knows a default."""
        named = [model for model in info.models if model.name == self.model]
        return named or info.models


@dataclass
class RowsCall:
    """One Encode or Fetch. ``indices`` maps the wire's item index to the caller's."""

    session: Session
    method: str
    request: pb.EncodeRequest | pb.FetchRequest
    metadata: Metadata
    indices: list[int]
    refused: dict[int, ItemFailed]
    assembler: Assembler

    @property
    def is_empty(self) -> bool:
        """Nothing is left to send."""
        return not self.indices

    def early(self) -> Iterator[tuple[int, Outcome]]:
        """The items that were never sent."""
        yield from self.refused.items()

    def feed(self, message: bytes) -> tuple[int, Outcome] | None:
        """The caller's index and outcome of the item that this raw event finished. Raises StreamViolation."""
        finished = self.assembler.feed(message)
        if finished is None:
            return None
        index, outcome = finished
        if isinstance(outcome, InvalidRows):
            # The geometry may be that of a server since replaced.
            self.session.forget_info()
        return self.indices[index], outcome

    def finish(self) -> None:
        """The stream ended OK. Raises TruncatedStream."""
        self.assembler.finish()

    def failed(self, error: grpc.RpcError, *, closed: bool) -> CallFailed:
        return self.session.failed(
            error,
            self.method,
            closed=closed,
            num_items=self.assembler.num_items,
            num_arrived=self.assembler.num_finished,
        )


@dataclass
class PrefetchCall:
    request: pb.PrefetchRequest
    metadata: Metadata
    indices: list[int]
    refused: dict[int, ItemFailed]

    def read(self, response: pb.PrefetchResponse | None) -> list[PrefetchStatus | ItemFailed]:
        """One status per item, in the caller's order; None when nothing was sent. Raises StreamViolation."""
        statuses = response.statuses if response is not None else []
        if len(statuses) != len(self.indices):
            raise StreamViolation(
                f"Prefetch answered for {len(statuses)} items, {len(self.indices)} were sent"
            )
        outcomes: dict[int, PrefetchStatus | ItemFailed] = dict(self.refused)
        for index, status in zip(self.indices, statuses, strict=True):
            outcomes[index] = convert.prefetch_status(status)
        return [outcomes[index] for index in range(len(outcomes))]


def digest_metadata(items: Sequence[Item]) -> Metadata:
    """The routing header of a call with one item whose digest is known; none for any other call."""
    if len(items) == 1 and items[0].digest:
        return ((DIGEST_HEADER, items[0].digest.hex()),)
    return ()


def check_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Raises InvalidRequest for a key that has not 32 bytes."""
    for position, key in enumerate(keys):
        if len(key) != DIGEST_BYTES:
            raise InvalidRequest(f"key {position} has {len(key)} bytes, needs {DIGEST_BYTES}")
    return list(keys)


def in_order(outcomes: dict[int, Outcome]) -> list[Outcome]:
    """Outcomes of every item, by index."""
    return [outcomes[index] for index in range(len(outcomes))]


def rows_or_raise(outcome: Outcome) -> EncodedRows:
    """The rows. Raises ItemFailed."""
    if isinstance(outcome, ItemFailed):
        raise outcome
    return outcome
