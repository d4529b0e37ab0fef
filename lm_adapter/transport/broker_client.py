"""The broker's client: sessions over restarts, descriptors of arenas, proofs that the broker lives.

Owns one background thread that reads, sends heartbeats and, when the connection is lost, connects again with
growing pauses. Mapping what a descriptor leads to is ``mapping``'s. After a loss the leases of the old
session are gone; when the new session has another ``instance_id``, so are the arenas, and whatever was mapped
is to be dropped and attached again: ``on_session`` says so.

Thread-safe. A forked child has no part in its parent's session: its copy of the socket is closed, and it
connects anew when it is told to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

from lm_adapter.errors import InvalidRequest
from lm_adapter.transport.broker_errors import BrokerError, BrokerUnavailable, BrokerViolation
from lm_adapter.transport.broker_frames import MAX_PAYLOAD_BYTES, ReceivedReply, close_descriptors
from lm_adapter.transport.broker_handshake import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from lm_adapter.transport.broker_link import BrokerLink
from lm_adapter.transport.broker_records import (
    ArenaGeometry,
    Attachment,
    BrokerSession,
    ProbeSlot,
    geometry_of,
    known_arenas,
    path_beside,
)
from lm_adapter.transport.followed import Token, token_source
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2

__all__ = ["BrokerClient"]

P = ParamSpec("P")

_log = logging.getLogger(__name__)
_NUM_DESCRIPTORS = 2
"""Of an arena; with its directory one more."""


class BrokerClient:
    """``connect`` or ``start``, then requests, then ``close``."""

    def __init__(
        self,
        path: str,
        *,
        namespace: str = "",
        token: Token = "",
        name: str = "",
        request_timeout_s: float = 5.0,
        min_pause_s: float = 0.05,
        max_pause_s: float = 2.0,
        on_session: Callable[[BrokerSession], None] | None = None,
        on_lost: Callable[[BrokerSession, BrokerError], None] | None = None,
        on_arena_closed: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        """min_pause_s, max_pause_s: between attempts to connect again. The callbacks run on the client's
        thread and must not wait long or make requests: on_session after every connect but one made
        by ``connect``, which returns the session; on_lost after every loss but ``close``;
        on_arena_closed(arena_id, replaced_by), replaced_by empty when nothing takes its place. Raises
        InvalidRequest for a path that is not absolute and for texts that no frame holds."""
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest(f"the broker's socket is an absolute path, found {path!r}")
        self.path, self._token = path, token_source(token)
        self._hello = pb.BrokerHello(
            protocol_version=PROTOCOL_VERSION,
            min_protocol_version=MIN_PROTOCOL_VERSION,
            namespace=namespace,
            token=self._token(),
            client_name=name,
        )
        if self._hello.ByteSize() > MAX_PAYLOAD_BYTES // 2:
            raise InvalidRequest(
                f"namespace, token and name have {self._hello.ByteSize()} bytes, at most "
                f"{MAX_PAYLOAD_BYTES // 2} are allowed"
            )
        self._request_timeout_s = request_timeout_s
        self._pauses_s = (min_pause_s, max_pause_s)
        self._on_session = on_session
        self._on_lost = on_lost
        self._on_arena_closed = on_arena_closed
        self._forgotten: deque[bytes] = deque()
        self._num_sessions = 0
        self._instance_id = ""
        self._become_unconnected(BrokerUnavailable("never connected", reason="NOT_CONNECTED"))
        _clients[id(self)] = weakref.ref(self)

    def _become_unconnected(self, error: BrokerError) -> None:
        """The state of a client that has no thread."""
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._link: BrokerLink | None = None
        self._session: BrokerSession | None = None
        self._error: BrokerError = error
        self._thread: threading.Thread | None = None

    def __del__(self) -> None:
        _clients.pop(id(self), None)

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- life ------------------------------------------------------------------------------------------

    @property
    def session(self) -> BrokerSession | None:
        """The live session, or None."""
        return self._session

    @property
    def last_error(self) -> BrokerError:
        """Why there is no session, or why there was none before this one."""
        return self._error

    def connect(self, timeout_s: float = 2.0) -> BrokerSession:
        """The session, made now when there is none; from then on the client connects again by itself. Raises
        BrokerError when it cannot be made in this time; nothing goes on in the background then, unless it
        did before."""
        with self._changed:
            self._raise_if_closed()
            if self._session is not None:
                return self._session
            if self._thread is None:
                link = self._open(timeout_s)
                session = self._adopt(link)
                self._start_thread(link)
                return session
        return self.wait_for_session(timeout_s)

    def start(self) -> None:
        """Connects in the background, and goes on trying."""
        with self._changed:
            self._raise_if_closed()
            if self._thread is None:
                self._start_thread(None)

    def wait_for_session(self, timeout_s: float) -> BrokerSession:
        """Raises the last error when there is none in this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._session is not None or self._closed.is_set(), timeout_s)
            self._raise_if_closed()
            if self._session is None:
                raise self._error
            return self._session

    def close(self) -> None:
        """Ends the session and with it its leases. Twice is once."""
        error = BrokerUnavailable("the client was closed", reason="CLOSED")
        with self._changed:
            self._closed.set()
            self._error = error
            link, thread = self._link, self._thread
            self._changed.notify_all()
        if link is not None:
            link.tell_uses()
            link.lose(error)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- requests --------------------------------------------------------------------------------------

    def list_arenas(self) -> tuple[ArenaGeometry, ...]:
        """What this namespace may attach now. Raises BrokerError, as all requests do."""
        reply = self._request(pb.BrokerRequest(list=pb.BrokerListArenas()), "arenas")
        return known_arenas(reply.message.arenas.arenas)

    def attach(self, arena_id: bytes) -> Attachment:
        """Descriptors of an arena, the caller's to close, that of its directory where there is one."""
        attach = pb.BrokerAttach(arena_id=arena_id, with_directory=True)
        reply = self._request(pb.BrokerRequest(attach=attach), "attached")
        try:
            geometry = geometry_of(reply.message.attached.geometry)
            expected = _NUM_DESCRIPTORS + bool(geometry.directory_bytes)
            if geometry.arena_id != arena_id or len(reply.descriptors) != expected:
                raise BrokerViolation(
                    f"asked for arena {arena_id.hex()} and {expected} descriptors, got "
                    f"{geometry.arena_id.hex()} and {len(reply.descriptors)}"
                )
        except BaseException:
            close_descriptors(reply.descriptors)
            raise
        return Attachment(geometry, *reply.descriptors)

    def probe(self, arena_id: bytes) -> ProbeSlot:
        """Where the arena holds bytes that are known, and their SHA-256."""
        reply = self._request(pb.BrokerRequest(probe=pb.BrokerProbe(arena_id=arena_id)), "probe_slot")
        slot = reply.message.probe_slot
        return ProbeSlot(slot.arena_id, slot.offset_bytes, slot.num_bytes, slot.sha256)

    def publish(self, descriptor: int, size_bytes: int) -> tuple[bytes, bytes]:
        """Gives the broker a sealed memfd; the caller keeps its own descriptor. The segment's id, and the
        owner id of the session that it belongs to."""
        while self._forgotten:
            self.unpublish(self._forgotten.popleft())
        link = self._live_link()
        request = pb.BrokerRequest(publish=pb.BrokerPublish(size_bytes=size_bytes))
        reply = self._request(request, "published", link, descriptor)
        if self._link is not link:
            raise BrokerUnavailable("the connection was lost, and the segment with it")
        return reply.message.published.segment_id, link.welcome.owner_id.encode()

    def unpublish(self, segment_id: bytes) -> None:
        """Tells the broker, if it is there, that a segment is not needed any more; waits for no answer."""
        link = self._link
        if link is not None:
            with contextlib.suppress(BrokerError):  # the segment goes with the connection
                request = pb.BrokerRequest(unpublish=pb.BrokerUnpublish(segment_id=segment_id))
                link.post(request, self._request_timeout_s)

    def unpublish_later(self, segment_id: bytes) -> None:
        """The same with the next publish, for finalizers, which must not wait for a lock."""
        self._forgotten.append(segment_id)

    def fetch_link(self, owner_id: bytes | None = None) -> BrokerLink | None:
        """The live connection where it takes ``BrokerFetch`` and ``ReleaseRequest``, and is this owner's."""
        link = self._link
        if link is None or not link.welcome.max_fetch_keys:
            return None
        return link if owner_id is None or owner_id == link.welcome.owner_id.encode() else None

    def release(self, request: encoder_pb2.ReleaseRequest) -> bool:
        """Gives leases back without waiting for a word; False where that is not possible."""
        link = self.fetch_link()
        if link is None:
            return False
        try:
            link.give_back(request, self._request_timeout_s)
        except BrokerError:
            return False
        return True

    def renew(self, request: encoder_pb2.RenewRequest) -> encoder_pb2.RenewResponse | None:
        """Extends leases; None where the broker does not do that now, or for so many."""
        link = self._link
        if link is None or len(request.lease_ids) > link.welcome.max_renewals:
            return None
        try:
            return self._request(pb.BrokerRequest(renew=request), "renewed").message.renewed
        except BrokerError:
            return None

    def ping(self) -> None:
        """Returns when the broker has answered."""
        self._request(pb.BrokerRequest(ping=pb.BrokerPing()), "pong")

    def _live_link(self) -> BrokerLink:
        """Raises BrokerUnavailable."""
        with self._changed:
            self._raise_if_closed()
            if self._link is None:
                raise BrokerUnavailable(
                    f"not connected to {self.path}: {self._error}",
                    reason="FORKED" if self._error.reason == "FORKED" else "NOT_CONNECTED",
                )
            return self._link

    def _request(
        self, request: pb.BrokerRequest, expected: str, link: BrokerLink | None = None, *descriptors: int
    ) -> ReceivedReply:
        reply = (link or self._live_link()).request(request, self._request_timeout_s, descriptors)
        if reply.message.WhichOneof("reply") != expected:
            close_descriptors(reply.descriptors)
            found = reply.message.WhichOneof("reply")
            raise BrokerViolation(f"the reply is {found}, expected {expected}")
        return reply

    # -- the thread ------------------------------------------------------------------------------------

    def _start_thread(self, link: BrokerLink | None) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(link, self._closed), name="broker-client", daemon=True
        )
        self._thread.start()

    def _run(self, link: BrokerLink | None, closed: threading.Event) -> None:
        """Reads until the link is lost, then tries again. A session that lived for less than the longest
        pause counts as a failed attempt: a broker that takes clients and drops them is not hammered."""
        min_pause_s, max_pause_s = self._pauses_s
        pause_s = min_pause_s
        while not closed.is_set():
            if link is None:
                link = self._try_again()
            if link is not None:
                since_s = time.monotonic()
                self._lost(link.pump(self._notice))
                link = None
                if time.monotonic() - since_s > max_pause_s:
                    pause_s = min_pause_s
            # Spread out, so that a restarted broker is not met by all its clients at once.
            closed.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(2 * pause_s, max_pause_s)

    def _open(self, timeout_s: float) -> BrokerLink:
        self._hello.pid, self._hello.token = os.getpid(), self._token()
        return BrokerLink.open(self.path, self._hello, timeout_s)

    def _adopt(self, link: BrokerLink) -> BrokerSession:
        """With ``_changed`` held."""
        welcome = link.welcome
        self._num_sessions += 1
        session = BrokerSession(
            instance_id=welcome.instance_id,
            host_id=welcome.host_id,
            owner_id=welcome.owner_id,
            protocol_version=welcome.protocol_version,
            arenas=known_arenas(welcome.arenas),
            number=self._num_sessions,
            restarted=self._instance_id not in ("", welcome.instance_id),
            calls_path=path_beside(self.path, welcome.calls_name),
        )
        self._instance_id = welcome.instance_id
        self._link, self._session = link, session
        self._changed.notify_all()
        return session

    def _lost(self, error: BrokerError) -> None:
        with self._changed:
            session, self._session, self._link = self._session, None, None
            if not self._closed.is_set():
                self._error = error
            self._changed.notify_all()
        if session is not None and self._on_lost is not None and not self._closed.is_set():
            self._call(self._on_lost, session, error)

    def _try_again(self) -> BrokerLink | None:
        """One attempt; None when it failed or the client was closed."""
        try:
            link = self._open(self._request_timeout_s)
        except BrokerError as error:
            with self._changed:
                if not self._closed.is_set():
                    self._error = error
            return None
        with self._changed:
            if self._closed.is_set():
                link.lose(self._error)
                link.pump(lambda _: None)
                return None
            session = self._adopt(link)
        if self._on_session is not None:
            self._call(self._on_session, session)
        return link

    def _notice(self, message: pb.BrokerReply) -> None:
        if message.HasField("arena_closed") and self._on_arena_closed is not None:
            closed = message.arena_closed
            self._call(self._on_arena_closed, closed.arena_id, closed.replaced_by)

    def _call(self, callback: Callable[P, None], *arguments: P.args, **named: P.kwargs) -> None:
        try:
            callback(*arguments, **named)
        except Exception:
            _log.exception("a callback of the broker's client failed")

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise BrokerUnavailable("the client was closed", reason="CLOSED")

    def _forget_in_child(self) -> None:
        """Right after a fork, in the child, where no other thread is and any lock may be held for ever."""
        link, closed = self._link, self._closed.is_set()
        self._become_unconnected(
            BrokerUnavailable("the session is the parent process's; connect anew", reason="FORKED")
        )
        if closed:
            self._closed.set()
        if link is not None:
            link.abandon_in_child()


# By id, because a forked child walks it: a WeakSet may be in the middle of a change then.
_clients: dict[int, weakref.ref[BrokerClient]] = {}


def _forget_all_in_child() -> None:
    for reference in list(_clients.values()):
        client = reference()
        if client is not None:
            client._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
