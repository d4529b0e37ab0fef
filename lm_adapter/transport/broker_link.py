"""One connection to the broker: connect, handshake, requests from any thread, one thread that reads.

Owns the socket. Whoever created the link runs ``pump`` on a thread of its choice until the link is lost;
what comes after that is ``broker_client``'s. The socket is closed by ``pump``'s end alone, so that no other
thread is ever left with the number of a descriptor that is someone else's by now.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lm_adapter.transport.broker_errors import (
    BrokerError,
    BrokerRefused,
    BrokerRequestFailed,
    BrokerUnavailable,
    BrokerViolation,
)
from lm_adapter.transport.broker_frames import (
    ReceivedReply,
    ReplyReader,
    close_descriptors,
    encode_frame,
)
from lm_adapter.transport.broker_socket import close, connect, receive_reply, send_all
from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["MIN_PROTOCOL_VERSION", "PROTOCOL_VERSION", "BrokerLink"]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
_HELLO_ID = 1


@dataclass(eq=False)
class _Waiting:
    done: threading.Event = field(default_factory=threading.Event)
    reply: ReceivedReply | None = None
    error: BrokerError | None = None


class BrokerLink:
    """A connection that was welcomed; ``welcome`` is what the broker said."""

    def __init__(self, connection: socket.socket, reader: ReplyReader, welcome: pb.BrokerWelcome) -> None:
        self.welcome = welcome
        self._socket = connection
        self._reader = reader
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = _HELLO_ID + 1
        self._sent_s = self._heard_s = time.monotonic()
        self._lost: BrokerError | None = None

    @classmethod
    def open(cls, path: str, hello: pb.BrokerHello, timeout_s: float) -> BrokerLink:
        """Connects and shakes hands. Raises BrokerUnavailable, BrokerRefused, BrokerViolation."""
        ends_s = time.monotonic() + timeout_s
        connection = connect(path, ends_s)
        reader = ReplyReader()
        try:
            frame = encode_frame(pb.BrokerRequest(request_id=_HELLO_ID, hello=hello).SerializeToString())
            refused_first = False
            try:
                send_all(connection, frame, ends_s)
            except (BrokenPipeError, ConnectionResetError):
                refused_first = True  # what it said before it closed can still be read
            reply = receive_reply(connection, reader, ends_s)
            if reply is None:
                when = "before" if refused_first else "after"
                raise BrokerUnavailable(f"{path}: the broker closed the connection {when} the handshake")
            close_descriptors(reply.descriptors)
            message = reply.message
            if message.HasField("refused"):
                refused = message.refused
                raise BrokerRefused(
                    f"{path}: {refused.message}",
                    reason=refused.reason or None,
                    retryable=refused.retryable,
                    details={
                        "protocol_version": refused.protocol_version,
                        "min_protocol_version": refused.min_protocol_version,
                        "client_protocol_version": PROTOCOL_VERSION,
                        "client_min_protocol_version": MIN_PROTOCOL_VERSION,
                    },
                )
            if not message.HasField("welcome") or message.request_id != _HELLO_ID:
                raise BrokerViolation(f"{path}: the answer to Hello is {message.WhichOneof('reply')}")
            version = message.welcome.protocol_version
            if not MIN_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
                raise BrokerViolation(
                    f"{path}: the broker chose version {version}, this side speaks {MIN_PROTOCOL_VERSION} to "
                    f"{PROTOCOL_VERSION}"
                )
            return cls(connection, reader, message.welcome)
        except OSError as error:
            reader.close()
            close(connection)
            raise BrokerUnavailable(f"{path}: {error.strerror}") from error
        except BaseException:
            reader.close()
            close(connection)
            raise

    # -- any thread ------------------------------------------------------------------------------------

    def post(self, request: pb.BrokerRequest, timeout_s: float) -> None:
        """Sends; nobody waits for the reply. Raises BrokerError."""
        with self._lock:
            request.request_id = self._next_id
            self._next_id += 1
        self._send(request, time.monotonic() + timeout_s)

    def request(
        self, request: pb.BrokerRequest, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> ReceivedReply:
        """Sends, descriptors along with it, and waits for the reply, whose descriptors are the caller's.
        Raises BrokerError."""
        ends_s = time.monotonic() + timeout_s
        waiting = _Waiting()
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            request.request_id = self._next_id
            self._next_id += 1
            self._waiting[request.request_id] = waiting
        try:
            self._send(request, ends_s, descriptors)
            arrived = waiting.done.wait(max(0.0, ends_s - time.monotonic()))
        except BaseException:
            self._discard(request.request_id, waiting)
            raise
        with self._lock:
            given_up = self._waiting.pop(request.request_id, None) is not None
        if not given_up:
            waiting.done.wait()  # the reading thread has it in hand
        elif not arrived:
            raise BrokerUnavailable(f"no reply of the broker within {timeout_s:g} s", reason="TIMEOUT")
        if waiting.error is not None:
            raise _again(waiting.error)
        assert waiting.reply is not None
        return _checked(waiting.reply)

    def lose(self, error: BrokerError) -> None:
        """Ends the link: ``pump`` returns, requests fail with this error. The first call counts."""
        with self._lock:
            if self._lost is None:
                self._lost = error
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.error = self._lost
            each.done.set()
        with self._send_lock:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # closed already, or by the other side

    def abandon_in_child(self) -> None:
        """After a fork, in the child: gives up its copies of the socket and of descriptors on their way,
        without a word to the broker, whose client is the parent."""
        self._socket.close()
        self._reader.close()

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
        with self._send_lock:
            close(self._socket)
        self._reader.close()
        assert self._lost is not None
        return self._lost

    def _read_on(self, on_notice: Callable[[pb.BrokerReply], None]) -> None:
        heartbeat_s = max(self.welcome.heartbeat_ms, 1) / 1000
        silence_s = max(self.welcome.idle_timeout_ms / 1000, 2 * heartbeat_s)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            while (reply := self._reader.next_reply()) is not None:
                self._deliver(reply, on_notice)
            now_s = time.monotonic()
            if now_s - self._heard_s > silence_s:
                raise BrokerUnavailable(
                    f"the broker has said nothing for {silence_s:g} s", reason="BROKER_SILENT"
                )
            if now_s - self._sent_s >= heartbeat_s:
                with self._lock:
                    ping = pb.BrokerRequest(request_id=self._next_id, ping=pb.BrokerPing())
                    self._next_id += 1
                self._send(ping, now_s + silence_s)
            wait_s = max(0.0, self._sent_s + heartbeat_s - time.monotonic())
            if not poll.poll(wait_s * 1000):
                continue
            try:
                if not self._reader.receive(self._socket):
                    return
            except BlockingIOError:
                continue
            self._heard_s = time.monotonic()

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
        if waiting is None:
            close_descriptors(reply.descriptors)  # a pong, or too late for whoever asked
            return
        waiting.reply = reply
        waiting.done.set()

    def _send(self, request: pb.BrokerRequest, ends_s: float, descriptors: Sequence[int] = ()) -> None:
        """Raises BrokerUnavailable; a frame that went out in part ends the link."""
        frame = encode_frame(request.SerializeToString())
        try:
            with self._send_lock:
                if self._socket.fileno() < 0:
                    raise BrokerUnavailable("the connection to the broker is closed")
                send_all(self._socket, frame, ends_s, descriptors)
                self._sent_s = time.monotonic()
        except OSError as error:
            lost = BrokerUnavailable(f"the connection to the broker broke: {error.strerror}")
            self.lose(lost)
            raise lost from error
        except BrokerUnavailable as error:
            self.lose(error)
            raise

    def _discard(self, request_id: int, waiting: _Waiting) -> None:
        """Nobody takes this reply any more."""
        with self._lock:
            self._waiting.pop(request_id, None)
        if waiting.reply is not None:
            close_descriptors(waiting.reply.descriptors)


def _again(error: BrokerError) -> BrokerError:
    """The same error for another raise: one exception's traceback belongs to one thread."""
    return type(error)(
        error.message, reason=error.reason, retryable=error.retryable, details=dict(error.details)
    )


def _checked(reply: ReceivedReply) -> ReceivedReply:
    message, descriptors = reply.message, reply.descriptors
    if message.HasField("failure"):
        close_descriptors(descriptors)
        failure = message.failure
        raise BrokerRequestFailed(
            f"the broker: {failure.message}", reason=failure.reason or None, retryable=failure.retryable
        )
    if len(descriptors) != message.num_descriptors:
        close_descriptors(descriptors)
        raise BrokerRequestFailed(
            f"{len(descriptors)} of {message.num_descriptors} descriptors arrived: this process has no room "
            "for more open files",
            reason="DESCRIPTORS_LOST",
            retryable=True,
        )
    return reply
