"""HTTP/2 by hand (RFC 9113, 7541), for calls that gRPC's own client does not make."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE, CANCEL = 4, 8
ENCODE = "/vision_encoder.v1.VisionEncoder/Encode"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(stream: int, path: str = ENCODE, **entries: str) -> bytes:
    """A call's begin. Names and values are literals of at most 126 bytes."""
    # POST, http and the names of path, authority and content-type are entries of the static table.
    block = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("host") + b"\x0f\x10" + _text("application/grpc")
    for name, value in {"te": "trailers", **entries}.items():
        block += b"\0" + _text(name.replace("_", "-")) + _text(value)
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
