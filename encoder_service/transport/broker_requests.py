"""What a client's requests mean: the handshake, arenas, descriptors, the probe.

Owns who is connected as which owner. Runs on the broker's thread; reads and writes sockets through
``Connection`` only.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import structlog

from encoder_service.transport import access as access_rules
from encoder_service.transport.access import Refusal
from encoder_service.transport.broker_fetch import (
    MAX_FETCH_KEYS,
    MAX_RENEWED,
    MAX_USES,
    FetchDesk,
    FetchRefused,
)
from encoder_service.transport.broker_options import BrokerCounters, BrokerOptions
from encoder_service.transport.connection import ClientFailed, Connection
from encoder_service.transport.descriptor_inbox import LOST
from encoder_service.transport.offers import ArenaOffer, OfferBook
from encoder_service.transport.pixel_book import PublishRefused, SegmentBook
from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

OWNER_ID_BYTES = 16
OWNER_LOG_CHARS = 8
"""Of an owner id, in logs: enough to tell owners apart, not enough to act as one."""
KINDS = {"host": pb.ARENA_KIND_HOST, "device": pb.ARENA_KIND_DEVICE}
LOG_REFUSALS_EVERY_S = 1.0


class Owner(NamedTuple):
    """A connection that was welcomed."""

    namespace: str
    connection: Connection


class RequestDesk:
    """Answers requests. ``owners`` may be read by any thread."""

    def __init__(
        self,
        options: BrokerOptions,
        offers: OfferBook,
        counters: BrokerCounters,
        clock: Callable[[], float],
    ) -> None:
        self.owners: dict[str, Owner] = {}
        self.segments: SegmentBook | None = None
        """Where published segments go; None: none are taken."""
        self.fetches: FetchDesk | None = None
        """Where rows and leases are dealt with; None: over gRPC alone."""
        self._options = options
        self._offers = offers
        self._counters = counters
        self._clock = clock
        self._in_namespace: Counter[str] = Counter()
        self._refusal_logged_s = float("-inf")

    def answer(self, connection: Connection, request: pb.BrokerRequest) -> None:
        """Sends the reply. Raises ClientFailed when the connection has to end."""
        if request.request_id == 0:
            raise ClientFailed("protocol_error", "a request without an id")
        kind = request.WhichOneof("request")
        if (kind == "hello") != (not connection.owner_id):
            when = "after" if connection.owner_id else "before"
            raise ClientFailed("protocol_error", f"the request {kind} {when} Hello")
        reply = pb.BrokerReply(request_id=request.request_id)
        match kind:
            case "hello":
                self._greet(connection, reply, request.hello)
                return
            case "attach":
                self._attach(connection, reply, request.attach)
                return
            case "list":
                reply.arenas.arenas.extend(self._geometries(connection.namespace))
            case "probe":
                self._describe_probe(connection, reply, request.probe.arena_id)
            case "publish":
                self._publish(connection, reply, request.publish.size_bytes)
            case "unpublish":
                segments, segment_id = self.segments, request.unpublish.segment_id
                was_held = segments is not None and segments.remove(connection.owner_id, segment_id)
                reply.unpublished.was_held = was_held
            case "fetch" | "release" | "renew" | "used" if self.fetches is not None:
                try:
                    self.fetches.take(connection, request)
                except FetchRefused as error:
                    self._fail(reply, error.reason, str(error), error.retryable)
                else:
                    return
            case "ping":
                reply.pong.SetInParent()
            case _:
                self._fail(reply, "UNKNOWN_REQUEST", "the broker does not know this request")
        connection.send(reply, self._clock())

    def refuse(
        self, connection: Connection, refusal: Refusal, hello: pb.BrokerHello, request_id: int = 0
    ) -> None:
        """Says why, with the versions of both sides. Always raises ClientFailed."""
        self._counters.refused[refusal.reason] += 1
        now_s = self._clock()
        if now_s - self._refusal_logged_s >= LOG_REFUSALS_EVERY_S:
            self._refusal_logged_s = now_s
            peer = connection.peer
            log.warning(
                "client refused",
                reason=refusal.reason,
                message=refusal.message,
                client=hello.client_name[: access_rules.MAX_NAME_CHARS],
                pid=peer.pid,
                uid=peer.uid,
                gid=peer.gid,
                refused_in_all=self._counters.refused.total(),
            )
        refused = pb.BrokerRefused(
            reason=refusal.reason,
            message=refusal.message,
            retryable=refusal.retryable,
            protocol_version=access_rules.PROTOCOL_VERSION,
            min_protocol_version=access_rules.MIN_PROTOCOL_VERSION,
            client_protocol_version=hello.protocol_version,
            client_min_protocol_version=hello.min_protocol_version,
        )
        connection.send(pb.BrokerReply(request_id=request_id, refused=refused), now_s)
        raise ClientFailed("refused", refusal.message)

    def check_token(self, connection: Connection) -> None:
        """Raises ClientFailed where the namespace has been closed to what the client was welcomed with."""
        if connection.owner_id and not self._options.access.lets_in(connection.namespace, connection.token):
            raise ClientFailed("token_withdrawn", "its token opens the namespace no more")

    def forget(self, connection: Connection) -> None:
        """The owner of this connection is nobody any more."""
        if self.segments is not None:
            self.segments.drop_owner(connection.owner_id)
        del self.owners[connection.owner_id]
        self._in_namespace[connection.namespace] -= 1
        if not self._in_namespace[connection.namespace]:
            del self._in_namespace[connection.namespace]

    def _greet(self, connection: Connection, reply: pb.BrokerReply, hello: pb.BrokerHello) -> None:
        options = self._options
        refusal = options.access.refuse_hello(hello) or self._refuse_for_room(hello.namespace)
        if refusal is not None:
            self.refuse(connection, refusal, hello, reply.request_id)
        connection.owner_id = secrets.token_hex(OWNER_ID_BYTES)
        connection.namespace, connection.token = hello.namespace, hello.token
        connection.name = hello.client_name
        connection.takes_descriptors = self.segments is not None
        self.owners[connection.owner_id] = Owner(hello.namespace, connection)
        self._in_namespace[hello.namespace] += 1
        self._counters.welcomed += 1
        peer = connection.peer
        log.info(
            "client connected",
            owner=connection.owner_id[:OWNER_LOG_CHARS],
            client=hello.client_name,
            namespace=hello.namespace,
            pid=peer.pid,
            uid=peer.uid,
            gid=peer.gid,
            pid_as_said=hello.pid,
        )
        welcome = pb.BrokerWelcome(
            protocol_version=access_rules.common_version(hello),
            instance_id=options.instance_id,
            host_id=options.host_id,
            owner_id=connection.owner_id,
            heartbeat_ms=round(options.heartbeat_s * 1000),
            idle_timeout_ms=round(options.limits.idle_s * 1000),
            arenas=self._geometries(hello.namespace),
            calls_name=options.calls_name,
        )
        if self.fetches is not None:
            welcome.max_fetch_keys = MAX_FETCH_KEYS
            welcome.max_renewals, welcome.max_uses = MAX_RENEWED, MAX_USES
        reply.welcome.CopyFrom(welcome)
        connection.send(reply, self._clock())

    def _refuse_for_room(self, namespace: str) -> Refusal | None:
        options = self._options
        found_here = self._in_namespace.get(namespace, 0)
        for where, found, allowed in (
            ("the broker", len(self.owners), options.max_connections),
            (f"namespace {namespace!r}", found_here, options.max_connections_per_namespace),
        ):
            if found >= allowed:
                return Refusal(
                    "TOO_MANY_CONNECTIONS",
                    f"{where} has {found} connections, at most {allowed} are allowed",
                    retryable=True,
                )
        return None

    def _attach(self, connection: Connection, reply: pb.BrokerReply, attach: pb.BrokerAttach) -> None:
        arena_id, with_directory = attach.arena_id, attach.with_directory
        failure = pb.BrokerReply(request_id=reply.request_id)
        if not connection.may_send_descriptors(3 if with_directory else 2):
            self._fail(failure, "DESCRIPTORS_UNREAD", "read those sent before asking for more", True)
            connection.send(failure, self._clock())
            return
        try:
            found = self._offers.descriptors(connection.namespace, arena_id, with_directory=with_directory)
        except OSError as error:
            self._fail(failure, "DESCRIPTORS_EXHAUSTED", f"the encoder has none left: {error.strerror}", True)
            connection.send(failure, self._clock())
            return
        if found is None:
            self._fail(failure, "UNKNOWN_ARENA", f"no arena {arena_id.hex()} here")
            connection.send(failure, self._clock())
            return
        offer, descriptors = found
        reply.num_descriptors = len(descriptors)
        reply.attached.geometry.CopyFrom(geometry_of(offer))
        failure.failure.CopyFrom(
            pb.BrokerFailure(
                reason="DESCRIPTORS_IN_FLIGHT",
                message="too many descriptors wait in sockets whose clients do not read",
                retryable=True,
            )
        )
        self._counters.attaches += 1
        connection.send(reply, self._clock(), descriptors, instead=failure)

    def _publish(self, connection: Connection, reply: pb.BrokerReply, size_bytes: int) -> None:
        if self.segments is None:
            self._fail(reply, "NOT_OFFERED", "this server takes no pixels in shared memory")
            return
        descriptor = connection.inbox.take()
        if descriptor is None:
            self._fail(reply, "DESCRIPTOR_MISSING", "no descriptor came with it")
        elif descriptor == LOST:
            self._fail(reply, "DESCRIPTORS_EXHAUSTED", "the encoder has none left to take it with", True)
        else:
            owner_id, namespace = connection.owner_id, connection.namespace
            try:
                segment_id = self.segments.add(owner_id, namespace, descriptor, size_bytes)
            except PublishRefused as error:
                self._fail(reply, error.reason, str(error), error.retryable)
            else:
                reply.published.segment_id = segment_id

    def _describe_probe(self, connection: Connection, reply: pb.BrokerReply, arena_id: bytes) -> None:
        offer = self._offers.find(connection.namespace, arena_id)
        if offer is None:
            self._fail(reply, "UNKNOWN_ARENA", f"no arena {arena_id.hex()} here")
        elif offer.probe is None:
            self._fail(reply, "NO_PROBE_SLOT", f"arena {arena_id.hex()} has no probe slot")
        else:
            probe = offer.probe
            slot = pb.BrokerProbeSlot(
                arena_id=arena_id,
                offset_bytes=probe.offset_bytes,
                num_bytes=probe.num_bytes,
                sha256=probe.sha256,
            )
            reply.probe_slot.CopyFrom(slot)

    def _fail(self, reply: pb.BrokerReply, reason: str, message: str, retryable: bool = False) -> None:
        self._counters.failed[reason] += 1
        reply.failure.CopyFrom(pb.BrokerFailure(reason=reason, message=message, retryable=retryable))

    def _geometries(self, namespace: str) -> list[pb.ArenaGeometry]:
        return [geometry_of(offer) for offer in self._offers.visible_to(namespace)]


def geometry_of(offer: ArenaOffer) -> pb.ArenaGeometry:
    """What a client is told before it attaches."""
    return pb.ArenaGeometry(
        arena_id=offer.arena_id,
        kind=KINDS[offer.kind],
        size_bytes=offer.size_bytes,
        page_bytes=offer.page_bytes,
        device_uuid=offer.device_uuid,
        directory_bytes=offer.directory_bytes,
    )
