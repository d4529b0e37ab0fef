"""The first words on the broker's socket: Hello, and Welcome or Refused.

Owns the connection until it is welcomed; after that it is ``broker_link``'s.
"""

from __future__ import annotations

import socket
import time

from lm_adapter.transport.broker_errors import BrokerRefused, BrokerUnavailable, BrokerViolation
from lm_adapter.transport.broker_frames import ReplyReader, close_descriptors, encode_frame
from lm_adapter.transport.broker_socket import close, connect, receive_reply, send_all
from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["HELLO_ID", "MIN_PROTOCOL_VERSION", "PROTOCOL_VERSION", "shake_hands"]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
HELLO_ID = 1


def shake_hands(
    path: str, hello: pb.BrokerHello, timeout_s: float
) -> tuple[socket.socket, ReplyReader, pb.BrokerWelcome]:
    """Connects; what has been read beyond the welcome is in the reader. Raises BrokerUnavailable,
    BrokerRefused, BrokerViolation."""
    ends_s = time.monotonic() + timeout_s
    connection = connect(path, ends_s)
    reader = ReplyReader()
    try:
        frame = encode_frame(pb.BrokerRequest(request_id=HELLO_ID, hello=hello).SerializeToString())
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
        if not message.HasField("welcome") or message.request_id != HELLO_ID:
            raise BrokerViolation(f"{path}: the answer to Hello is {message.WhichOneof('reply')}")
        version = message.welcome.protocol_version
        if not MIN_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
            raise BrokerViolation(
                f"{path}: the broker chose version {version}, this side speaks {MIN_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}"
            )
        return connection, reader, message.welcome
    except OSError as error:
        reader.close()
        close(connection)
        raise BrokerUnavailable(f"{path}: {error.strerror}") from error
    except BaseException:
        reader.close()
        close(connection)
        raise
