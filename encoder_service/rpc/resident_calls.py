"""What a client may say over the broker's socket beside arenas: leases on resident rows, their release and
renewal, and which rows it has read by a directory.

Owns what such a request means, which is what the same one over gRPC means, but that it waits for nothing:
what is not in the memory asked for, is being encoded, cannot be leased now, or has more to say of itself than
the reply has room for, is answered as absent, and its caller asks over gRPC. Rows that were read without a
lease count as used and as delivered, by their reader's word. How requests come and replies go is
``transport.broker_fetch``'s. Used on the event loop.
"""

from __future__ import annotations

from encoder_service.errors import InvalidRequest, UnknownLease, VisionEncoderError
from encoder_service.pipeline import Pipeline
from encoder_service.rpc import convert
from encoder_service.rpc.status import failure_of
from encoder_service.store.embedding_store import Tier
from encoder_service.transport.broker_fetch import FOUND_BYTES
from encoder_service.transport.shared_memory import LeaseTerms, SharedMemory
from encoder_service.types import CacheTier, EncodedItem
from vision_encoder.v1 import broker_pb2, encoder_pb2

MAX_READS = 1 << 16
"""Of one key, that one message may tell of."""
HEAD_BYTES, PLACE_BYTES = 32, 12
"""Of a reply without items, and of a place in it without its result, at most."""
TIMESTAMP_BYTES, GRID_BYTES = 8, 20
"""Of a clip's result, at most; tags and lengths of both lists are among an image's bytes."""
TIERS: dict[int, Tier] = {broker_pb2.ARENA_KIND_HOST: "host", broker_pb2.ARENA_KIND_DEVICE: "device"}


class ResidentCalls:
    """``answer`` is what the broker's ``FetchDesk`` calls."""

    def __init__(self, pipeline: Pipeline, shared: SharedMemory) -> None:
        self._pipeline = pipeline
        self._shared = shared

    def answer(
        self,
        owner_id: str,
        namespace: str,
        request: broker_pb2.BrokerRequest,
        reply: broker_pb2.BrokerReply,
        max_bytes: int,
    ) -> bool:
        """See ``broker_fetch.Answer``."""
        try:
            match request.WhichOneof("request"):
                case "release":
                    release_all(self._shared, request.release)
                    return False
                case "used":
                    self._note_used(namespace, request.used)
                    return False
                case "renew":
                    reply.renewed.CopyFrom(renew_all(self._shared, request.renew))
                case _:
                    self._fetch(owner_id, namespace, request.fetch, reply.fetched, max_bytes - HEAD_BYTES)
        except VisionEncoderError as error:
            failure = broker_pb2.BrokerFailure(
                reason=error.reason, message=error.message, retryable=error.retryable
            )
            reply.failure.CopyFrom(failure)
        return True

    def _fetch(
        self,
        owner_id: str,
        namespace: str,
        fetch: broker_pb2.BrokerFetch,
        fetched: broker_pb2.BrokerFetched,
        max_bytes: int,
    ) -> None:
        """Raises InvalidRequest, TransportUnavailable."""
        tier = _tier(fetch.kind)
        options = encoder_pb2.LeaseOptions(
            owner_id=owner_id.encode(), num_readers=fetch.num_readers, lease_ms=fetch.lease_ms
        )
        terms = convert.lease_terms(options, tier)
        self._shared.check_owner(owner_id, namespace)
        left_bytes = max_bytes - len(fetch.keys) * PLACE_BYTES
        for key in fetch.keys:
            result = self._lease(key, namespace, tier, terms, left_bytes)
            fetched.items.append(broker_pb2.BrokerFound(result=result))
            if result is not None:
                left_bytes -= result.ByteSize()

    def _lease(
        self, key: bytes, namespace: str, tier: Tier, terms: LeaseTerms, max_bytes: int
    ) -> encoder_pb2.ItemResult | None:
        """None for what is not to be had here: no lease was granted then."""
        started_s = self._pipeline.clock()
        held = self._shared.store.hold_in(tier, namespace, key)
        if held is None:
            return None
        try:
            if found_bytes(held.item) > max_bytes:
                return None
            leased = self._shared.lease(held, namespace, terms)
            if leased is None:
                return None
            try:
                delivered = self._pipeline.found(held, started_s)
                result = convert.result_event(0, delivered, 1, leased).result
            except BaseException:
                self._shared.leases.take_back(leased.lease_id)
                raise
            self._pipeline.metrics.deliveries.labels(tier).inc()
            return result
        except VisionEncoderError:  # the connection has ended, for one, and its leases with it
            return None
        finally:
            held.drop()

    def _note_used(self, namespace: str, used: broker_pb2.BrokerUsed) -> None:
        """Raises InvalidRequest. Rows that have gone meanwhile were delivered all the same; how many bytes
        they had nobody knows any more."""
        tier, metrics, counters = _tier(used.kind), self._pipeline.metrics, self._shared.broker.counters
        cache_tier = CacheTier.DEVICE if tier == "device" else CacheTier.HOST
        for use in used.uses:
            num_reads = min(max(1, use.num_reads), MAX_READS)
            counters.read_unasked += num_reads
            metrics.items.labels(cache_tier.value).inc(num_reads)
            metrics.deliveries.labels(tier).inc(num_reads)
            held = self._shared.store.hold_in(tier, namespace, use.key)
            if held is not None:
                metrics.rows_bytes.inc(num_reads * held.item.spec.num_bytes)
                held.drop()
        counters.read_stale += min(used.num_stale, MAX_READS)


def found_bytes(item: EncodedItem) -> int:
    """What an item's result has, at most."""
    if item.clip is None:
        return FOUND_BYTES
    num_times, num_grids = len(item.clip.timestamps_s), len(item.clip.chunk_grids)
    return FOUND_BYTES + TIMESTAMP_BYTES * num_times + GRID_BYTES * num_grids


def _tier(kind: int) -> Tier:
    """Raises InvalidRequest."""
    tier = TIERS.get(kind)
    if tier is None:
        raise InvalidRequest(f"arena kind {kind} is unknown, the largest known is {max(TIERS)}")
    return tier


def renew_all(shared: SharedMemory | None, request: encoder_pb2.RenewRequest) -> encoder_pb2.RenewResponse:
    """Extends leases; one that cannot be has a failure in its place. shared: None on a server that gives
    none."""
    ttl_s, owner_id = convert.lease_s(request.extend_ms), convert.owner_id(request.owner_id) or None
    response = encoder_pb2.RenewResponse()
    for lease_id in request.lease_ids:
        try:
            if shared is None:
                raise UnknownLease(f"lease {lease_id.hex()} is not held here", lease_id=lease_id.hex())
            expires_at_unix_ms = shared.renew(lease_id, ttl_s, owner_id)
        except VisionEncoderError as error:
            status = encoder_pb2.LeaseStatus(lease_id=lease_id, failure=failure_of(error))
        else:
            status = encoder_pb2.LeaseStatus(lease_id=lease_id, expires_at_unix_ms=expires_at_unix_ms)
        response.statuses.append(status)
    return response


def release_all(shared: SharedMemory, request: encoder_pb2.ReleaseRequest) -> encoder_pb2.ReleaseResponse:
    """Gives leases back; says which are not known. Raises InvalidRequest for a reader that a lease does not
    have."""
    reader = request.reader if request.HasField("reader") else None
    owner_id = convert.owner_id(request.owner_id) or None
    response = encoder_pb2.ReleaseResponse()
    for lease_id in request.lease_ids:
        try:
            response.num_released += shared.release(lease_id, reader, owner_id)
        except UnknownLease:
            response.unknown_lease_ids.append(lease_id)
    return response
