"""One connection to the broker: connect, handshake, requests from any thread, one thread that reads.

Owns the socket. Whoever created the link runs ``pump`` on a thread of its choice until the link is lost;
what comes after that is ``broker_client``'s. The socket is closed by ``pump``'s end alone, so that no other
thread is ever left with the number of a descriptor that is someone else's by now.

A thread that waits for its reply may read the socket for itself (``read_until``), which saves the hop from
one thread to another. While callers do so, the pump stands back and looks in after every STAND_BACK_S; it
takes over at once where somebody waits who does not read.

What nobody waits for (``broker_unasked``) goes out with the next request, or is told by the pump,
TELL_EVERY_S after the first of it and as long as there is more. A lease that goes back after a pause goes at
once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lm_adapter.transport.broker_errors import BrokerError, BrokerUnavailable, BrokerViolation
from lm_adapter.transport.broker_frames import (
    ReceivedReply,
    ReplyReader,
    close_descriptors,
)
from lm_adapter.transport.broker_handshake import HELLO_ID, shake_hands
from lm_adapter.transport.broker_sending import Sending
from lm_adapter.transport.broker_unasked import Unasked
from lm_adapter.transport.broker_waiting import Waiting, fresh
from lm_adapter.transport.uses import Uses
from lm_adapter.transport.wakeup import WakeUp
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2

__all__ = ["BrokerLink"]

STAND_BACK_S = 0.02
"""How long after a caller has read for itself the pump leaves that to callers."""
TELL_EVERY_S = 0.02


class BrokerLink:
    """A connection that was welcomed; ``welcome`` is what the broker said."""

    def __init__(self, connection: socket.socket, reader: ReplyReader, welcome: pb.BrokerWelcome) -> None:
        self.welcome = welcome
        self._socket = connection
        self._reader = reader
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._next_id = HELLO_ID + 1
        self._heard_s = self._pinged_s = time.monotonic()
        self._lost: BrokerError | None = None
        self._reading = threading.Lock()
        """Held by whoever reads the socket."""
        self._take_over = threading.Event()
        self._stands_back = False
        self._read_s = float("-inf")
        """When a caller last read, or wanted to."""
        self._notices: deque[pb.BrokerReply] = deque()
        self._wake_up = WakeUp()
        self._unasked = Unasked(self._wake_up.wake, welcome.max_uses or 1)
        self._sending = Sending(connection, self._unasked, self.lose)
        self._gave_back_s = float("-inf")
        self._tell_at_s: float | None = None
        """When the pump looks for what is unasked next; None: when it is woken."""

    @classmethod
    def open(cls, path: str, hello: pb.BrokerHello, timeout_s: float) -> BrokerLink:
        """Connects and shakes hands. Raises BrokerUnavailable, BrokerRefused, BrokerViolation."""
        return cls(*shake_hands(path, hello, timeout_s))

    # -- any thread ------------------------------------------------------------------------------------

    def post(self, request: pb.BrokerRequest, timeout_s: float) -> None:
        """Sends; nobody waits for the reply. Raises BrokerError."""
        with self._lock:
            request.request_id = self._next_id
            self._next_id += 1
        self._sending.send(request, time.monotonic() + timeout_s)

    def request(
        self, request: pb.BrokerRequest, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> ReceivedReply:
        """Sends, descriptors along with it, and waits for the reply, whose descriptors are the caller's.
        Raises BrokerError."""
        ends_s = time.monotonic() + timeout_s
        waiting = Waiting()
        with self._lock:
            if self._lost is not None:
                raise fresh(self._lost)
            request.request_id = self._next_id
            self._next_id += 1
            self._waiting[request.request_id] = waiting
        self._take_over.set()
        try:
            self._sending.send(request, ends_s, descriptors)
            waiting.done.wait(max(0.0, ends_s - time.monotonic()))
            with self._lock:
                given_up = self._waiting.pop(request.request_id, None) is not None
            if not given_up:
                waiting.done.wait()  # the reading thread has it in hand
        except BaseException:
            self._discard(request.request_id, waiting)
            raise
        if given_up:
            raise BrokerUnavailable(f"no reply of the broker within {timeout_s:g} s", reason="TIMEOUT")
        return waiting.result()

    def ask(
        self,
        request: pb.BrokerRequest,
        timeout_s: float,
        on_done: Callable[[Waiting], None],
        *,
        reads: bool = False,
    ) -> None:
        """Sends and returns. on_done is called once, on any thread, when there is what ``Waiting.result``
        gives; it must not wait. timeout_s: of sending. reads: the caller goes on to ``read_until``."""
        waiting = Waiting()
        waiting.on_done = lambda: on_done(waiting)
        with self._lock:
            waiting.error = self._lost
            if self._lost is None:
                request.request_id = self._next_id
                self._next_id += 1
                self._waiting[request.request_id] = waiting
        if waiting.error is not None:
            waiting.finish()
            return
        if not reads:
            self._take_over.set()
        with contextlib.suppress(BrokerError):  # the link is lost, and on_done was told
            self._sending.send(request, time.monotonic() + timeout_s)

    def read_until(self, done: threading.Event, timeout_s: float) -> bool:
        """Whether ``done`` was set in this time, by the reply to an ``ask`` of the calling thread. It reads
        itself, for all who wait, where no other thread does."""
        ends_s = time.monotonic() + timeout_s
        self._read_s = ends_s - timeout_s
        if not self._reading.acquire(blocking=False):
            return done.wait(timeout_s)
        try:
            self._read_for(done, ends_s)
        except BrokerError as error:
            self.lose(error)
        except OSError as error:
            self.lose(BrokerUnavailable(f"the connection to the broker broke: {error.strerror}"))
        except Exception as error:
            self.lose(BrokerViolation(f"the connection was given up: {type(error).__name__}: {error}"))
        finally:
            self._read_s = time.monotonic()
            self._reading.release()
            if self._waiting or self._notices:
                self._take_over.set()
        return done.is_set()

    def give_back(self, request: encoder_pb2.ReleaseRequest, timeout_s: float) -> None:
        """Sends a release: at once after a pause, else with others of the next moment, or the next request.
        timeout_s: of sending. Raises BrokerError."""
        message = pb.BrokerRequest(release=request)
        if request.owner_id != self.welcome.owner_id.encode():
            self.post(message, timeout_s)  # it would not end with this connection
            return
        if self._lost is not None:
            raise fresh(self._lost)
        now_s = time.monotonic()
        if not self._stands_back and now_s - self._gave_back_s >= TELL_EVERY_S and self._sending.takes_more():
            self._gave_back_s = now_s
            self._unasked.add(message, wakes=False)
            self._sending.send_given_back(now_s + timeout_s)
        else:
            self._unasked.add(message)

    def uses_of(self, kind: str) -> Uses:
        """Where reads of this kind of memory are noted, for the encoder to be told."""
        return self._unasked.uses_of(kind)

    def tell_uses(self) -> None:
        """And whatever else nobody waits for: at once, before the link is given up."""
        with contextlib.suppress(BrokerError):
            while self._lost is None and self._tell():
                pass

    def lose(self, error: BrokerError) -> None:
        """Ends the link: ``pump`` returns, requests fail with this error. The first call counts."""
        with self._lock:
            if self._lost is None:
                self._lost = error
            waiting, self._waiting = self._waiting, {}
        self._take_over.set()
        for each in waiting.values():
            each.error = self._lost
            each.finish()
        self._sending.shut_down()

    def abandon_in_child(self) -> None:
        """After a fork, in the child: gives up its copies of the socket and of descriptors on their way,
        without a word to the broker, whose client is the parent."""
        self._socket.close()
        self._reader.close()
        self._wake_up.abandon_in_child()

    # -- the reading thread ----------------------------------------------------------------------------

    def pump(self, on_notice: Callable[[pb.BrokerReply], None]) -> BrokerError:
        """Reads until the link is lost, and says why; keeps the broker sure that this client lives. Notices
        are handed over on this thread."""
        try:
            self._read_on(on_notice)
            error: BrokerError = BrokerUnavailable("the broker closed the connection")
        except BrokerError as found:
            error = found
        except OSError as found:
            error = BrokerUnavailable(f"the connection to the broker broke: {found.strerror}")
        except Exception as found:
            error = BrokerViolation(f"the connection was given up: {type(found).__name__}: {found}")
        self.lose(error)
        self._wake_up.close()
        with self._reading:
            self._sending.close()
            self._reader.close()
        assert self._lost is not None
        return self._lost

    def _read_on(self, on_notice: Callable[[pb.BrokerReply], None]) -> None:
        heartbeat_s = max(self.welcome.heartbeat_ms, 1) / 1000
        silence_s = max(self.welcome.idle_timeout_ms / 1000, 2 * heartbeat_s)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._wake_up.register(poll)
        self._tell_at_s = time.monotonic()
        while True:
            self._stand_back()
            while self._notices:
                on_notice(self._notices.popleft())
            with self._reading:
                if not self._read_once(poll, on_notice, heartbeat_s, silence_s):
                    return

    def _stand_back(self) -> None:
        """Returns when no caller has read for a while, or somebody waits who does not."""
        self._take_over.clear()
        if self._waiting or self._notices or self._lost is not None:
            return
        self._stands_back = True
        while (left_s := self._read_s + STAND_BACK_S - time.monotonic()) > 0:
            if self._take_over.wait(left_s):
                break
            self._tell_soon()
        self._stands_back = False
        self._tell_soon()

    def _read_for(self, done: threading.Event, ends_s: float) -> None:
        """With ``_reading`` held. Raises BrokerError, OSError."""
        while not done.is_set():
            reply = self._reader.next_reply()
            if reply is not None:
                self._deliver(reply, self._notices.append)
                continue
            if self._socket.fileno() < 0:
                return  # lost, and everybody told
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(max(0.0, ends_s - time.monotonic()) * 1000):
                return
            with contextlib.suppress(BlockingIOError):
                if not self._reader.receive(self._socket):
                    raise BrokerUnavailable("the broker closed the connection")
                self._heard_s = time.monotonic()

    def _read_once(
        self,
        poll: select.poll,
        on_notice: Callable[[pb.BrokerReply], None],
        heartbeat_s: float,
        silence_s: float,
    ) -> bool:
        """With ``_reading`` held: delivers what there is, and waits for more until the next heartbeat is due.
        False at the end of the stream."""
        while True:
            while (reply := self._reader.next_reply()) is not None:
                self._deliver(reply, on_notice)
            now_s = time.monotonic()
            if now_s - self._heard_s > silence_s:
                raise BrokerUnavailable(
                    f"the broker has said nothing for {silence_s:g} s", reason="BROKER_SILENT"
                )
            if now_s >= self._ping_due_s(heartbeat_s):
                with self._lock:
                    ping = pb.BrokerRequest(request_id=self._next_id, ping=pb.BrokerPing())
                    self._next_id += 1
                self._pinged_s = now_s
                self._sending.send(ping, now_s + silence_s)
            ends_s = self._ping_due_s(heartbeat_s)
            if self._tell_at_s is not None:
                if now_s >= self._tell_at_s:
                    self._tell_soon()
                ends_s = min(ends_s, self._tell_at_s or ends_s)
            happened = dict(poll.poll(max(0.0, ends_s - time.monotonic()) * 1000))
            if self._wake_up.was_woken(happened):
                self._tell_at_s = self._tell_at_s or time.monotonic() + TELL_EVERY_S
            if self._socket.fileno() not in happened:
                continue
            try:
                if not self._reader.receive(self._socket):
                    return False
            except BlockingIOError:
                continue
            self._heard_s = time.monotonic()
            while (reply := self._reader.next_reply()) is not None:
                self._deliver(reply, on_notice)
            return True

    def _ping_due_s(self, heartbeat_s: float) -> float:
        """Whoever says nothing is taken for dead; so is a broker that has nothing to answer, unless asked."""
        return min(self._sending.sent_s, max(self._heard_s, self._pinged_s)) + heartbeat_s

    def _deliver(self, reply: ReceivedReply, on_notice: Callable[[pb.BrokerReply], None]) -> None:
        message = reply.message
        if message.request_id == 0:
            close_descriptors(reply.descriptors)
            if message.HasField("stopping"):
                raise BrokerUnavailable("the broker is stopping", reason="BROKER_STOPPING")
            on_notice(message)
            return
        with self._lock:
            waiting = self._waiting.pop(message.request_id, None)
            if waiting is not None:
                waiting.reply = reply
        if waiting is None:
            self._undo(reply)  # a pong, or too late for whoever asked
        else:
            waiting.finish()

    def _tell_soon(self) -> None:
        """On the pump's thread, which does not wait for a broker that takes nothing now: it is told the next
        time. Raises BrokerUnavailable."""
        if self._sending.takes_more():
            self._tell()
        else:
            self._tell_at_s = time.monotonic() + TELL_EVERY_S

    def _tell(self) -> bool:
        """Tells what was not yet, and says when to look again; whether there was anything. Raises
        BrokerUnavailable."""
        told, look_again = self._sending.tell()
        self._tell_at_s = time.monotonic() + TELL_EVERY_S if look_again else None
        return told

    def _discard(self, request_id: int, waiting: Waiting) -> None:
        """Nobody takes this reply any more."""
        with self._lock:
            self._waiting.pop(request_id, None)
            reply = waiting.reply
        if reply is not None:
            self._undo(reply)

    def _undo(self, reply: ReceivedReply) -> None:
        """Gives up what came with a reply that nobody takes. Does not wait: the caller may be reading."""
        close_descriptors(reply.descriptors)
        if reply.message.HasField("published"):
            unpublish = pb.BrokerUnpublish(segment_id=reply.message.published.segment_id)
            self._unasked.add(pb.BrokerRequest(unpublish=unpublish))
