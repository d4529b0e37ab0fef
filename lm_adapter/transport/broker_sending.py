"""The sending half of a connection to the broker: one frame after another, from any thread.

Owns the order of what is sent, and that whatever nobody waits for (``broker_unasked``) goes out along with
it. When something is sent is ``broker_link``'s.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from lm_adapter.transport.broker_errors import BrokerError, BrokerUnavailable
from lm_adapter.transport.broker_frames import encode_frame
from lm_adapter.transport.broker_socket import close, send_all
from lm_adapter.transport.broker_unasked import Unasked
from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["Sending"]

SEND_UNASKED_S = 1.0


class Sending:
    """``lose``, called for whatever goes wrong, ends the link: a frame that went out in part cannot be
    taken back."""

    def __init__(
        self, connection: socket.socket, unasked: Unasked, lose: Callable[[BrokerError], None]
    ) -> None:
        self.sent_s = time.monotonic()
        """When something was sent last."""
        self._socket = connection
        self._unasked = unasked
        self._lose = lose
        self._lock = threading.Lock()

    def send(self, request: pb.BrokerRequest, ends_s: float, descriptors: Sequence[int] = ()) -> None:
        """Raises BrokerUnavailable."""
        frame = encode_frame(request.SerializeToString())
        if descriptors:  # they go with the first byte, which is therefore this request's
            self._send(lambda: frame, ends_s, descriptors)
        else:
            self._send(lambda: self._unasked.take_requests() + frame, ends_s)

    def send_given_back(self, ends_s: float) -> None:
        """What is unasked but for reads. Raises BrokerUnavailable."""
        self._send(self._unasked.take_requests, ends_s)

    def tell(self) -> tuple[bool, bool]:
        """What is unasked: whether there was any, and whether to look again without being woken. Raises
        BrokerUnavailable."""
        look_again = False

        def take() -> bytes:
            nonlocal look_again
            frames, look_again = self._unasked.take()
            return frames

        return self._send(take, time.monotonic() + SEND_UNASKED_S), look_again

    def takes_more(self) -> bool:
        """Whether the socket has room for what is unasked, or is lost."""
        with self._lock:
            if self._socket.fileno() < 0:
                return True
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            return bool(poll.poll(0))

    def shut_down(self) -> None:
        """Nothing is sent or received any more."""
        with self._lock:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # closed already, or by the other side

    def close(self) -> None:
        """Closes the socket."""
        with self._lock:
            close(self._socket)

    def _send(self, take: Callable[[], bytes], ends_s: float, descriptors: Sequence[int] = ()) -> bool:
        """What ``take`` gives, and whether that was anything. Whoever finds nothing left to take may close
        the link: what was taken has been sent by then."""
        try:
            with self._lock:
                if self._socket.fileno() < 0:
                    raise BrokerUnavailable("the connection to the broker is closed")
                frames = take()
                if frames:
                    send_all(self._socket, frames, ends_s, descriptors)
                    self.sent_s = time.monotonic()
                return bool(frames)
        except OSError as error:
            lost = BrokerUnavailable(f"the connection to the broker broke: {error.strerror}")
            self._lose(lost)
            raise lost from error
        except BrokerUnavailable as error:
            self._lose(error)
            raise
