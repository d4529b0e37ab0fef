"""One client's connection: bytes in, frames out with descriptors, and when to give up on it.

Owns what a client can make the broker hold or do: unread bytes, unsent frames, descriptors in flight,
requests a second, and how long anything may stay half done. What a request means belongs to the broker.
The socket never blocks. Only the broker's thread calls in here, but for ``post``: what another thread found
out goes straight into the socket from there, since a hop between threads costs more than all the rest of an
answer.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import termios
import threading
from collections import deque
from dataclasses import dataclass, field

from encoder_service.transport.access import PeerCredentials
from encoder_service.transport.broker_options import BrokerCounters, ConnectionLimits
from encoder_service.transport.descriptor_inbox import DescriptorInbox, UnaskedDescriptors
from encoder_service.transport.framing import FrameReader, encode_frame
from encoder_service.transport.offers import close_all
from vision_encoder.v1 import broker_pb2 as pb

RECEIVE_BYTES = 16 * 1024


class ClientFailed(Exception):
    """The connection ends; ``cause`` is a stable word for metrics and logs."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(slots=True)
class _Unsent:
    data: memoryview
    descriptors: tuple[int, ...] = ()
    instead: memoryview | None = None
    """What to send when the kernel refuses to carry the descriptors."""


@dataclass(eq=False)
class Connection:
    """State of one client. owner_id is empty until it is welcomed."""

    socket: socket.socket
    peer: PeerCredentials
    limits: ConnectionLimits
    counters: BrokerCounters
    since_s: float
    owner_id: str = ""
    namespace: str = ""
    token: str = field(default="", repr=False)
    """What it was welcomed with, which may open its namespace no more one day."""
    name: str = ""
    paused: bool = False
    """Over its rate, or held back: nothing is read until ``take`` finds it within again."""
    is_held_back: bool = False
    """No request is to be taken: what it sent already waits elsewhere, as much as may. Written by others."""
    takes_descriptors: bool = False
    """Where requests may come with one; elsewhere the kernel closes them, since no room is given for them."""
    inbox: DescriptorInbox = field(default_factory=DescriptorInbox)
    _reader: FrameReader = field(default_factory=FrameReader)
    _outbox: deque[_Unsent] = field(default_factory=deque)
    _unsent_bytes: int = 0
    _unread_descriptors: int = 0
    _heard_s: float = 0.0
    _frame_since_s: float | None = None
    _stuck_since_s: float | None = None
    _allowance: float = 0.0
    _allowance_at_s: float = 0.0
    _failure: ClientFailed | None = None
    _is_closed: bool = False
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever touches the outbox, or the socket otherwise than to read."""

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self._heard_s = self._allowance_at_s = self.since_s
        self._allowance = float(self.limits.request_burst)

    @property
    def wants_to_send(self) -> bool:
        return bool(self._outbox)

    @property
    def room_bytes(self) -> int:
        """What may still wait for this client."""
        return self.limits.unsent_bytes - self._unsent_bytes

    # -- in --------------------------------------------------------------------------------------------

    def receive(self, now_s: float) -> bool:
        """Reads once. False when the client has closed its end. Raises ClientFailed."""
        try:
            if self.takes_descriptors:
                data = self.inbox.receive(self.socket, RECEIVE_BYTES)
            else:
                data = self.socket.recv(RECEIVE_BYTES)
        except UnaskedDescriptors as error:
            raise ClientFailed("protocol_error", str(error)) from error
        except (BlockingIOError, InterruptedError):
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        self._heard_s = now_s
        if not len(self._reader):
            self._frame_since_s = now_s
        self._reader.feed(data)
        return True

    def take(self, now_s: float) -> bytes | None:
        """The next request's bytes; None when there is none, or none is allowed yet (``paused`` then).
        Raises FrameError, and ClientFailed for descriptors that came with no request for them."""
        limits = self.limits
        self._allowance = min(
            float(limits.request_burst),
            self._allowance + (now_s - self._allowance_at_s) * limits.requests_per_s,
        )
        self._allowance_at_s = now_s
        was_paused, self.paused = self.paused, self.is_held_back or self._allowance < 1.0
        if self.paused:
            return None
        if was_paused:
            self._frame_since_s = now_s
        payload = self._reader.next_payload()
        if payload is not None:
            self._allowance -= 1.0
            self._frame_since_s = now_s
        if not len(self._reader):
            self._frame_since_s = None
            if payload is None and len(self.inbox):
                raise ClientFailed("protocol_error", f"{len(self.inbox)} descriptors came unasked")
        return payload

    def refund(self) -> None:
        """A request that its own bounds hold counts no longer among those of a second."""
        self._allowance += 1.0

    # -- out -------------------------------------------------------------------------------------------

    def may_send_descriptors(self, num_descriptors: int) -> bool:
        """Whether so many more may be in flight. What the client has read is not in flight any more."""
        with self._sending:
            if self._unread_descriptors + num_descriptors <= self.limits.unread_descriptors:
                return True
            if not self._outbox and _unread_bytes(self.socket) == 0:
                self._unread_descriptors = 0
            return self._unread_descriptors + num_descriptors <= self.limits.unread_descriptors

    def send(
        self,
        reply: pb.BrokerReply,
        now_s: float,
        descriptors: tuple[int, ...] = (),
        instead: pb.BrokerReply | None = None,
    ) -> None:
        """Sends, or keeps for later what the kernel does not take now. The descriptors are this connection's
        from here on; ``instead`` is the reply when the kernel refuses to carry them. Raises ClientFailed."""
        with self._sending:
            self._send(reply, now_s, descriptors, instead)

    def post(self, reply: pb.BrokerReply, now_s: float) -> bool:
        """``send`` from another thread. True when the broker's thread is to call ``see_to``. A reply to a
        connection that has ended is nobody's."""
        with self._sending:
            if self._is_closed or self._failure is not None:
                return False
            try:
                self._send(reply, now_s, (), None)
            except ClientFailed as error:
                self._failure = error
            return self._failure is not None or bool(self._outbox)

    def see_to(self, now_s: float) -> None:
        """What ``post`` left. Raises ClientFailed."""
        if self._failure is not None:
            raise self._failure
        self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Hands the kernel what it takes. Raises ClientFailed when the client is gone."""
        with self._sending:
            self._flush(now_s)

    def _send(
        self,
        reply: pb.BrokerReply,
        now_s: float,
        descriptors: tuple[int, ...],
        instead: pb.BrokerReply | None,
    ) -> None:
        try:
            frame = _frame(reply)
            if self._unsent_bytes + len(frame) > self.limits.unsent_bytes:
                raise ClientFailed(
                    "not_reading",
                    f"{self._unsent_bytes} bytes wait for it and {len(frame)} more are to, at most "
                    f"{self.limits.unsent_bytes} are allowed",
                )
            self._outbox.append(_Unsent(frame, descriptors, None if instead is None else _frame(instead)))
        except BaseException:
            close_all(descriptors)
            raise
        self._unsent_bytes += len(frame)
        self._unread_descriptors += len(descriptors)
        self._flush(now_s)

    def _flush(self, now_s: float) -> None:
        while self._outbox:
            unsent = self._outbox[0]
            try:
                num_sent = self._send_some(unsent)
            except (BlockingIOError, InterruptedError):
                if self._stuck_since_s is None:
                    self._stuck_since_s = now_s
                return
            except ConnectionError as error:
                raise ClientFailed("left", f"gone while a reply was sent: {error.strerror}") from error
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS and unsent.instead is not None:
                    self._give_up_descriptors(unsent, unsent.instead)
                    continue
                raise ClientFailed("kernel_refused", f"nothing can be sent: {error.strerror}") from error
            self._stuck_since_s = None
            self._unsent_bytes -= num_sent
            # The descriptors went with the first byte.
            self.counters.descriptors_sent += len(unsent.descriptors)
            close_all(unsent.descriptors)
            unsent.descriptors = ()
            unsent.data = unsent.data[num_sent:]
            if not unsent.data:
                self._outbox.popleft()

    def _give_up_descriptors(self, unsent: _Unsent, instead: memoryview) -> None:
        """Too many are in flight to clients that do not read theirs."""
        close_all(unsent.descriptors)
        self._unread_descriptors -= len(unsent.descriptors)
        self._unsent_bytes += len(instead) - len(unsent.data)
        self._outbox[0] = _Unsent(instead)

    def _send_some(self, unsent: _Unsent) -> int:
        rights = array.array("i", unsent.descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        return self.socket.sendmsg([unsent.data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # -- time and end ----------------------------------------------------------------------------------

    def check_time(self, now_s: float) -> None:
        """Raises ClientFailed when something has taken longer than it may."""
        limits = self.limits
        if not self.owner_id and now_s - self.since_s > limits.handshake_s:
            raise ClientFailed("handshake_timeout", f"no Hello within {limits.handshake_s:g} s")
        stuck_since_s = self._stuck_since_s
        if stuck_since_s is not None and now_s - stuck_since_s > limits.send_s:
            raise ClientFailed("not_reading", f"it has taken nothing for {limits.send_s:g} s")
        if self.paused:
            return
        if self._frame_since_s is not None and now_s - self._frame_since_s > limits.frame_s:
            raise ClientFailed(
                "frame_timeout", f"{len(self._reader)} bytes of a frame, unfinished for {limits.frame_s:g} s"
            )
        if now_s - self._heard_s > limits.idle_s:
            raise ClientFailed("idle", f"silent for {limits.idle_s:g} s")

    def close(self) -> None:
        """Closes the socket and every descriptor that was not sent, or that no request has taken."""
        with self._sending:
            self._is_closed = True
            for unsent in self._outbox:
                close_all(unsent.descriptors)
            self._outbox.clear()
            self.inbox.close()
            self.socket.close()


def _frame(reply: pb.BrokerReply) -> memoryview:
    return memoryview(encode_frame(reply.SerializeToString()))


def _unread_bytes(connection: socket.socket) -> int:
    """Memory of what was sent and the peer has not read (SIOCOUTQ, which is TIOCOUTQ by another name)."""
    found: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return found
