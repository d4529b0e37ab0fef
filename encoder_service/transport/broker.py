"""The broker: hands descriptors of arenas to clients that share nothing with us but a socket's folder.

Owns the socket's thread. A thread of its own, so that neither it nor gRPC's loop waits for the other:
nothing here blocks but ``select``, and a request costs tens of microseconds. What requests mean is in
``broker_requests``, the limits of one client in ``connection``, who may connect in ``access``, what there is
to hand out in ``offers``. Leases are the store's: it learns through ``on_disconnect`` that an owner is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from encoder_service.errors import ConfigurationError
from encoder_service.transport.acceptor import Acceptor
from encoder_service.transport.access import peer_credentials
from encoder_service.transport.broker_fetch import FetchDesk
from encoder_service.transport.broker_options import BrokerCounters, BrokerOptions
from encoder_service.transport.broker_requests import OWNER_LOG_CHARS, RequestDesk
from encoder_service.transport.connection import ClientFailed, Connection
from encoder_service.transport.framing import FrameError
from encoder_service.transport.offers import ArenaOffer, OfferBook
from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.socket_file import ListeningSocket
from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

TICK_S = 0.1
"""How often times are looked at while anybody is connected."""
CHECK_TOKENS_S = 1.0
"""Between two looks at whether every client's token still opens its namespace."""
STOP_NOTICE_S = 0.5
"""For the kernel to take the last notices."""


class Broker:
    """``start``, any number of ``offer`` and ``withdraw``, ``stop``. Thread-safe."""

    def __init__(
        self,
        options: BrokerOptions,
        offers: OfferBook,
        *,
        on_disconnect: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_disconnect(owner_id) is called on the broker's thread, once for each owner that was welcomed,
        when ``is_connected`` already says no; it must not wait for anything: what belongs to an event loop
        goes there with ``call_soon_threadsafe``. The broker closes ``offers`` at its end."""
        self.options = options
        self.counters = BrokerCounters()
        self.failure: Exception | None = None
        self._offers = offers
        self._on_disconnect = on_disconnect
        self._clock = clock
        self._desk = RequestDesk(options, offers, self.counters, clock)
        self._connections: dict[Connection, None] = {}
        self._pending: dict[Connection, None] = {}
        self._to_see_to: deque[Connection] = deque()
        self._notices: deque[tuple[Callable[[str], bool], pb.BrokerArenaClosed]] = deque()
        self._check_tokens_at_s = clock()
        self._stopping = threading.Event()
        self._wake_lock = threading.Lock()
        self._wake_in = self._wake_out = -1
        self._listener: ListeningSocket | None = None
        self._thread: threading.Thread | None = None

    # -- what other threads ask ------------------------------------------------------------------------

    def start(self) -> None:
        """Binds and serves. Raises ConfigurationError."""
        if self._thread is not None or self._stopping.is_set():
            raise RuntimeError("a broker starts once")
        options = self.options
        listener = ListeningSocket(options.path, mode=options.mode, gid=options.gid, backlog=options.backlog)
        try:
            self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wake_in, selectors.EVENT_READ)
            self._acceptor = Acceptor(listener, self._selector, self.counters)
        except OSError as error:
            listener.close()
            self._close_wake()
            raise ConfigurationError(f"broker socket {options.path}: {error.strerror}") from error
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)
        self._thread.start()
        log.info("broker listens", path=options.path, mode=oct(options.mode))

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Tells the clients, closes, unlinks. False when the thread did not end in time."""
        self._stopping.set()
        self._wake()
        if self._thread is None:
            self._offers.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_serving(self) -> bool:
        """Whether the thread runs and the path still leads to its socket."""
        thread, listener = self._thread, self._listener
        return thread is not None and thread.is_alive() and listener is not None and listener.is_in_place()

    def is_connected(self, owner_id: str, namespace: str) -> bool:
        """Whether this owner may hold leases. Where ``on_disconnect`` posts to the loop that asks, a lease
        granted in the same turn is released by it; elsewhere, ask again after granting: an owner that went
        in between has had its ``on_disconnect`` already."""
        owner = self._desk.owners.get(owner_id)
        return owner is not None and owner.namespace == namespace

    @property
    def num_connections(self) -> int:
        """Welcomed ones."""
        return len(self._desk.owners)

    def offer(
        self,
        offer: ArenaOffer,
        data_fd: int,
        page_fd: int,
        namespace: str | None = None,
        *,
        directory_fd: int | None = None,
    ) -> None:
        """From now on clients may attach it; see ``OfferBook.add``."""
        self._offers.add(offer, data_fd, page_fd, namespace, directory_fd=directory_fd)

    def take_segments(self, book: SegmentBook) -> None:
        """Before ``start``: clients may publish pixels. What a connection published goes with it."""
        self._desk.segments = book

    def take_fetches(self, desk: FetchDesk) -> None:
        """Before ``start``: clients may ask for rows, and give leases back, over their connection."""
        desk.on_rest = self._see_to_later
        self._desk.fetches = desk

    def _see_to_later(self, connection: Connection) -> None:
        """From any thread: a reply could not be sent in full, or it is held back no more."""
        self._to_see_to.append(connection)
        self._wake()

    def withdraw(self, arena_id: bytes, replaced_by: bytes = b"") -> bool:
        """No client attaches it any more, and those that could are told. False when it was not offered."""
        could_see = self._offers.remove(arena_id)
        if could_see is None:
            return False
        self._notices.append((could_see, pb.BrokerArenaClosed(arena_id=arena_id, replaced_by=replaced_by)))
        self._wake()
        return True

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_out >= 0:
                # A full pipe is enough to wake up for.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_out, b"\0")

    def _close_wake(self) -> None:
        with self._wake_lock:
            for descriptor in (self._wake_in, self._wake_out):
                if descriptor >= 0:
                    os.close(descriptor)
            self._wake_in = self._wake_out = -1

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_tick_s = self._clock()
            while not self._stopping.is_set():
                # Times are judged by what had come when this turn asked: a process that stood still for
                # want of a core or by a signal, has words of its clients to hear yet.
                asked_s = self._clock()
                self._turn(TICK_S if self._connections or self._acceptor.is_paused else None)
                if self._clock() >= next_tick_s:
                    self._tick(asked_s)
                    next_tick_s = self._clock() + TICK_S
            self._say_goodbye()
        except Exception as error:
            self.failure = error
            log.exception("the broker failed", path=self.options.path)
        finally:
            self._acceptor.close()
            for connection in list(self._connections):
                self._end(connection, "stopping" if self.failure is None else "broker_failed")
            self._selector.close()
            self._close_wake()
            self._offers.close()

    def _turn(self, timeout_s: float | None) -> None:
        for key, mask in self._selector.select(timeout_s):
            if isinstance(key.data, Connection):
                self._serve(key.data, mask)
            elif key.fd == self._wake_in:
                os.read(self._wake_in, 4096)
            else:
                for accepted in self._acceptor.waiting(self._clock()):
                    self._admit(accepted)
        while self._to_see_to:
            self._guarded(self._to_see_to.popleft(), self._see_to)
        while self._notices:
            could_see, notice = self._notices.popleft()
            for owner in list(self._desk.owners.values()):
                if could_see(owner.namespace):
                    self._notify(owner.connection, pb.BrokerReply(arena_closed=notice))

    def _tick(self, now_s: float) -> None:
        self._acceptor.resume(now_s)
        checks_tokens = now_s >= self._check_tokens_at_s
        if checks_tokens:
            self._check_tokens_at_s = now_s + CHECK_TOKENS_S
        for connection in list(self._connections):
            if connection.paused:
                self._guarded(connection, self._answer_waiting)
            self._guarded(connection, lambda each: each.check_time(now_s))
            if checks_tokens:
                self._guarded(connection, self._desk.check_token)

    def _say_goodbye(self) -> None:
        """The file goes first, so that nobody connects to a broker that leaves."""
        self._acceptor.close()
        for owner in list(self._desk.owners.values()):
            self._notify(owner.connection, pb.BrokerReply(stopping=pb.BrokerStopping()))
        ends_s = self._clock() + STOP_NOTICE_S
        while any(each.wants_to_send for each in self._connections) and self._clock() < ends_s:
            self._turn(TICK_S)

    # -- one connection --------------------------------------------------------------------------------

    def _admit(self, accepted: socket.socket) -> None:
        self.counters.accepted += 1
        try:
            peer = peer_credentials(accepted)
            connection = Connection(accepted, peer, self.options.limits, self.counters, since_s=self._clock())
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except OSError as error:
            log.warning("a client cannot be served", cause=error.strerror)
            accepted.close()
            return
        self._connections[connection] = None
        if len(self._pending) >= self.options.max_pending:
            self._end(next(iter(self._pending)), "crowded_out")
        self._pending[connection] = None
        refusal = self.options.access.refuse_peer(peer)
        if refusal is not None:
            self._guarded(connection, self._desk.refuse, refusal, pb.BrokerHello())
        else:
            # What has arrived already is looked at now, before others can crowd it out.
            self._serve(connection, selectors.EVENT_READ)

    def _serve(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._guarded(connection, lambda each: each.flush(self._clock()))
        if mask & selectors.EVENT_READ:
            self._guarded(connection, self._read)

    def _guarded(self, connection: Connection, action: Callable[..., None], *arguments: object) -> None:
        """Whatever goes wrong with one client ends that client's connection and no other."""
        if connection not in self._connections:
            return  # ended earlier in this turn
        try:
            action(connection, *arguments)
            self._watch(connection)
        except ClientFailed as error:
            self._end(connection, error.cause, str(error))
        except (FrameError, DecodeError) as error:
            self._end(connection, "protocol_error", str(error))
        except Exception as error:
            log.exception("a client's request broke", client=connection.name)
            self._end(connection, "internal", type(error).__name__)

    def _watch(self, connection: Connection) -> None:
        """Registers for what this connection waits for."""
        wanted = 0 if connection.paused else selectors.EVENT_READ
        if connection.wants_to_send:
            wanted |= selectors.EVENT_WRITE
        registered = self._selector.get_map().get(connection.socket)
        if registered is None:
            if wanted:
                self._selector.register(connection.socket, wanted, connection)
        elif not wanted:
            self._selector.unregister(connection.socket)
        elif registered.events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _read(self, connection: Connection) -> None:
        if not connection.receive(self._clock()):
            raise ClientFailed("left", "the client closed the connection")
        self._answer_waiting(connection)

    def _see_to(self, connection: Connection) -> None:
        connection.see_to(self._clock())
        if connection.paused:
            self._answer_waiting(connection)

    def _answer_waiting(self, connection: Connection) -> None:
        while (payload := connection.take(self._clock())) is not None:
            self._desk.answer(connection, pb.BrokerRequest.FromString(payload))
            if connection.owner_id:
                self._pending.pop(connection, None)

    def _notify(self, connection: Connection, notice: pb.BrokerReply) -> None:
        self._guarded(connection, lambda each: each.send(notice, self._clock()))

    def _end(self, connection: Connection, cause: str, message: str = "") -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._pending.pop(connection, None)
        self.counters.closed[cause] += 1
        if self._selector.get_map().get(connection.socket) is not None:
            self._selector.unregister(connection.socket)
        connection.close()
        owner_id = connection.owner_id
        if not owner_id:
            log.debug("a client left before Hello", pid=connection.peer.pid, cause=cause, message=message)
            return
        self._desk.forget(connection)
        log.info(
            "client left",
            owner=owner_id[:OWNER_LOG_CHARS],
            client=connection.name,
            pid=connection.peer.pid,
            cause=cause,
            message=message,
        )
        try:
            self._on_disconnect(owner_id)
        except Exception:
            log.exception("an owner's leases were not released", owner=owner_id[:OWNER_LOG_CHARS])
