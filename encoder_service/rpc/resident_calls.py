"""What a client may ask over the broker's socket beside arenas: leases on resident rows, and their release.

Owns what such a request means, which is what the same one over gRPC means, but that it waits for nothing:
what is not in the memory asked for, is being encoded, or cannot be leased now, is answered as absent, and its
caller asks over gRPC. How requests come and replies go is ``transport.broker_fetch``'s. Used on the event
loop.
"""

from __future__ import annotations

from encoder_service.errors import InvalidRequest, UnknownLease, VisionEncoderError
from encoder_service.pipeline import Pipeline
from encoder_service.rpc import convert
from encoder_service.store.embedding_store import Tier
from encoder_service.transport.shared_memory import LeaseTerms, SharedMemory
from vision_encoder.v1 import broker_pb2, encoder_pb2

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
    ) -> bool:
        """See ``broker_fetch.Answer``."""
        is_fetch = request.WhichOneof("request") == "fetch"
        try:
            if not is_fetch:
                release_all(self._shared, request.release)
                return False
            self._fetch(owner_id, namespace, request.fetch, reply.fetched)
        except VisionEncoderError as error:
            failure = broker_pb2.BrokerFailure(
                reason=error.reason, message=error.message, retryable=error.retryable
            )
            reply.failure.CopyFrom(failure)
        return True

    def _fetch(
        self, owner_id: str, namespace: str, fetch: broker_pb2.BrokerFetch, fetched: broker_pb2.BrokerFetched
    ) -> None:
        """Raises InvalidRequest, TransportUnavailable."""
        tier = TIERS.get(fetch.kind)
        if tier is None:
            raise InvalidRequest(f"arena kind {fetch.kind} is unknown, the largest known is {max(TIERS)}")
        options = encoder_pb2.LeaseOptions(
            owner_id=owner_id.encode(), num_readers=fetch.num_readers, lease_ms=fetch.lease_ms
        )
        terms = convert.lease_terms(options, tier)
        self._shared.check_owner(owner_id, namespace)
        for key in fetch.keys:
            result = self._lease(key, namespace, tier, terms)
            fetched.items.append(broker_pb2.BrokerFound(result=result))

    def _lease(
        self, key: bytes, namespace: str, tier: Tier, terms: LeaseTerms
    ) -> encoder_pb2.ItemResult | None:
        started_s = self._pipeline.clock()
        held = self._shared.store.hold_in(tier, namespace, key)
        if held is None:
            return None
        try:
            leased = self._shared.lease(held, namespace, terms)
            if leased is None:
                return None
            delivered = self._pipeline.found(held, started_s)
            return convert.result_event(0, delivered, 1, leased).result
        except VisionEncoderError:  # the connection has ended, for one, and its leases with it
            return None
        finally:
            held.drop()


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
