"""A name server for Envoy's DNS: one name whose addresses the test sets, as a headless Service's.

Answers A questions over UDP. The TTL is as long as a cluster's DNS may set it (30 s); the gateway must not
keep an answer for that time.
"""

from __future__ import annotations

import socket
import struct
import threading
from types import TracebackType
from typing import Self

TTL_S = 30
HEADER_BYTES = 12
TYPE_A, CLASS_IN = 1, 1
ANSWER_FLAGS = 0x8580  # an authoritative answer
NO_SUCH_NAME = 3


class NameServer:
    """A context manager. ``addresses`` may be replaced at any time."""

    def __init__(self, name: str) -> None:
        self.addresses: tuple[str, ...] = ()
        self._name = name.lower()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="name-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, sender = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answer(question), sender)

    def _answer(self, message: bytes) -> bytes:
        name, kind, end = read_question(message)
        is_known = name == self._name
        addresses = self.addresses if is_known and kind == TYPE_A else ()
        flags = ANSWER_FLAGS | (0 if is_known else NO_SUCH_NAME)
        header = message[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0)
        # 0xC00C points at the question's name.
        records = [
            struct.pack(">HHHIH", 0xC00C, TYPE_A, CLASS_IN, TTL_S, 4) + socket.inet_aton(address)
            for address in addresses
        ]
        return header + message[HEADER_BYTES:end] + b"".join(records)


def read_question(message: bytes) -> tuple[str, int, int]:
    """Name, type and end of the only question."""
    labels, offset = [], HEADER_BYTES
    while length := message[offset]:
        labels.append(message[offset + 1 : offset + 1 + length].decode("ascii").lower())
        offset += 1 + length
    (kind,) = struct.unpack_from(">H", message, offset + 1)
    return ".".join(labels), kind, offset + 5
