"""A caller that speaks HTTP/2 by itself, for requests that no gRPC library sends.

Owns a connection and the few frames that such a request needs (RFC 9113, RFC 7541). Answers are read, not
understood.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
FRAME_HEADER_BYTES = 9
ANSWER_S = 10.0
SERVICE = "/vision_encoder.v1.VisionEncoder"
ENCODE_PATH, SERVER_INFO_PATH = f"{SERVICE}/Encode", f"{SERVICE}/GetServerInfo"
GRPC_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": ENCODE_PATH,
    ":authority": "encoders",
    "content-type": "application/grpc",
    "te": "trailers",
}


class RawCaller:
    """One connection; a context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), ANSWER_S)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._next_stream = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, headers: Mapping[str, str], body: bytes, *, is_whole: bool = True) -> int:
        """The request's stream. is_whole: without it the gateway has to expect more of the body."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        block = b"".join(literal(name, value) for name, value in headers.items())
        end = END_STREAM if is_whole else 0
        self._socket.sendall(frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, end, stream, body))
        return stream

    def wait_end(self, stream: int) -> None:
        """Until the answer to the request has ended, or the connection. Raises TimeoutError."""
        while head := self._read(FRAME_HEADER_BYTES):
            kind, flags, number = head[3], head[4], int.from_bytes(head[5:])
            self._read(int.from_bytes(head[:3]))
            has_ended = kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
            if number == stream and has_ended:
                return

    def _read(self, num_bytes: int) -> bytes:
        """Empty at the connection's end."""
        found = b""
        while len(found) < num_bytes:
            part = self._socket.recv(num_bytes - len(found))
            if not part:
                return b""
            found += part
        return found


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field without indexing, of less than 127 bytes each."""
    texts = [text.encode("ascii") for text in (name, value)]
    assert all(len(text) < 127 for text in texts)
    return b"\0" + b"".join(bytes([len(text)]) + text for text in texts)
