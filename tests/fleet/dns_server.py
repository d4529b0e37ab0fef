"""A name server for tests: one name, whatever addresses it is given, on a UDP port of the loopback.

Owns the few bytes of RFC 1035 that A queries need; every other question is answered with no records.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Self

TYPE_A = 1
FLAGS_ANSWER = 0x8480
"""A response, authoritative, recursion available."""
NAME_POINTER = 0xC00C
"""The name is where the question has it."""


class DnsServer(asyncio.DatagramProtocol):
    """``addresses`` may be changed at any time; ``num_asked`` counts A queries."""

    def __init__(self, addresses: Sequence[str] = (), ttl_s: int = 1) -> None:
        self.addresses = list(addresses)
        self.ttl_s = ttl_s
        self.num_asked = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        (number,) = struct.unpack_from("!H", data)
        end = data.index(b"\0", 12) + 5
        question = data[12:end]
        (kind,) = struct.unpack_from("!H", question, len(question) - 4)
        answers = self.addresses if kind == TYPE_A else []
        self.num_asked += kind == TYPE_A
        head = struct.pack("!6H", number, FLAGS_ANSWER, 1, len(answers), 0, 0)
        records = b"".join(
            struct.pack("!3HIH", NAME_POINTER, TYPE_A, 1, self.ttl_s, 4) + socket.inet_aton(address)
            for address in answers
        )
        assert self._transport is not None
        self._transport.sendto(head + question + records, addr)
