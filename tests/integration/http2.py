"""HTTP/2 by hand (RFC 9113, 7541), for calls that no gRPC library makes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE, CANCEL = 4, 8
SERVICE = "/vision_encoder.v1.VisionEncoder"
ENCODE, SERVER_INFO = f"{SERVICE}/Encode", f"{SERVICE}/GetServerInfo"
GRPC_HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": ENCODE,
    ":authority": "encoders",
    "content-type": "application/grpc",
    "te": "trailers",
}


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(stream: int, path: str = ENCODE, **entries: str) -> bytes:
    """A call's begin."""
    return head(stream, {**GRPC_HEADERS, ":path": path, **entries})


def head(stream: int, entries: Mapping[str, str]) -> bytes:
    """Names and values are literals of at most 126 bytes."""
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in entries.items())
    return frame(HEADERS, END_HEADERS, stream, block)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def message(data: bytes, *, is_compressed: bool = False) -> bytes:
    return struct.pack(">BI", is_compressed, len(data)) + data


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


class Connection:
    """A connection to a server whose answers are read and thrown away."""

    def __init__(self, target: str, *, source: str = "127.0.0.1", window: int | None = None) -> None:
        """window: bytes that the server may send for a call; None: the protocol's default."""
        host, _, port = target.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30, source_address=(source, 0))
        settings = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        try:
            self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        except OSError:
            self.socket.close()
            raise
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def send(self, data: bytes) -> None:
        """A server that has had enough of the connection is no error."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 16):
                pass

    def is_closed(self, timeout_s: float) -> bool:
        """Whether the server closes the connection within the time."""
        self._reading.join(timeout_s)
        return not self._reading.is_alive()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._reading.join(10)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawCaller:
    """A connection whose answers are read, not understood; a context manager."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._next_stream = 1

    def __enter__(self) -> RawCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, entries: Mapping[str, str], body: bytes, *, is_whole: bool = True) -> None:
        """Waits until the answer has ended, or the connection. is_whole: without it the server has to expect
        more of the body. Raises TimeoutError."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        end = END_STREAM if is_whole else 0
        self._socket.sendall(head(stream, entries) + frame(DATA, end, stream, body))
        while received := self._read(9):
            kind, flags, number = received[3], received[4], int.from_bytes(received[5:])
            self._read(int.from_bytes(received[:3]))
            has_ended = kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)
            if number == stream and has_ended:
                return

    def _read(self, num_bytes: int) -> bytes:
        """Empty at the connection's end."""
        found = b""
        while len(found) < num_bytes and (part := self._socket.recv(num_bytes - len(found))):
            found += part
        return found if len(found) == num_bytes else b""
