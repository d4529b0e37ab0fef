"""Frames of the broker's socket with their descriptors, as the adapter reads and writes them.

Owns received descriptors until a reply takes them. broker.proto's head says the format. On a stream socket
the kernel never joins the descriptors of two sendmsg calls in one recvmsg, so each arrival of descriptors
belongs to the next reply that announces some, also when this process had no room for all of them.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from lm_adapter.transport.broker_errors import BrokerViolation
from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["MAGIC", "MAX_PAYLOAD_BYTES", "ReceivedReply", "ReplyReader", "close_descriptors", "encode_frame"]

MAGIC = b"VEBR"
MAX_PAYLOAD_BYTES = 64 * 1024
_HEADER = struct.Struct(">4sI")
_RECEIVE_BYTES = 16 * 1024
_MAX_DESCRIPTORS = 8
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_MAX_ARRIVALS = 64


def encode_frame(payload: bytes) -> bytes:
    """One frame. Raises ValueError when the payload is over the bound."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
    return _HEADER.pack(MAGIC, len(payload)) + payload


def close_descriptors(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ReceivedReply:
    """descriptors are the reader's to close; they are fewer than the message says when this process could
    not take them all."""

    message: pb.BrokerReply
    descriptors: tuple[int, ...] = ()


class ReplyReader:
    """Puts replies together from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._arrivals: deque[tuple[int, ...]] = deque()

    def receive(self, connection: socket.socket) -> bool:
        """Reads once, without waiting. False at the end of the stream. Raises BlockingIOError when there is
        nothing, OSError, BrokerViolation."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, ancillary, received_flags, _ = connection.recvmsg(_RECEIVE_BYTES, _ANCILLARY_BYTES, flags)
        descriptors: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = array.array("i")
                whole.frombytes(content[: len(content) - len(content) % whole.itemsize])
                descriptors.extend(whole)
        truncated = bool(received_flags & socket.MSG_CTRUNC)
        self.feed(data, tuple(descriptors) if descriptors or truncated else None)
        return bool(data)

    def feed(self, data: bytes, arrival: tuple[int, ...] | None = None) -> None:
        """arrival: the descriptors that came with these bytes, empty when all were lost; None: there were
        none. Raises BrokerViolation, with everything held closed."""
        self._buffer += data
        if arrival is not None:
            self._arrivals.append(arrival)
            if len(self._arrivals) > _MAX_ARRIVALS:
                found = len(self._arrivals)
                self.close()
                raise BrokerViolation(f"{found} arrivals of descriptors that no reply announced")

    def next_reply(self) -> ReceivedReply | None:
        """The next whole reply, or None until more bytes come. Raises BrokerViolation."""
        payload = self._next_payload()
        if payload is None:
            return None
        try:
            message = pb.BrokerReply.FromString(payload)
        except DecodeError as error:
            raise BrokerViolation(f"a reply that is not one: {error}") from error
        if not message.num_descriptors:
            return ReceivedReply(message)
        if not self._arrivals:
            raise BrokerViolation(f"{message.num_descriptors} descriptors announced, none came")
        descriptors = self._arrivals.popleft()
        if len(descriptors) > message.num_descriptors:
            close_descriptors(descriptors)
            raise BrokerViolation(f"{message.num_descriptors} descriptors announced, {len(descriptors)} came")
        return ReceivedReply(message, descriptors)

    def close(self) -> None:
        """Closes what no reply took."""
        while self._arrivals:
            close_descriptors(self._arrivals.popleft())

    def _next_payload(self) -> bytes | None:
        head = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(head):
            raise BrokerViolation(f"a frame starts with {MAGIC!r}, found {head!r}")
        if len(self._buffer) < _HEADER.size:
            return None
        _, num_bytes = _HEADER.unpack_from(self._buffer)
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise BrokerViolation(f"a frame of {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
        end = _HEADER.size + num_bytes
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return payload
