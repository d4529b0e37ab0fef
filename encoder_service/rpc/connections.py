"""The TCP connections of a gRPC server, and how many of them an address may have.

gRPC reports no connection before its first call, so the process's descriptors are read (``/proc/self/fd``;
where there is no such folder, gRPC's own limit alone holds). Descriptors stay gRPC's: they are looked at, and
a connection is ended by a shutdown of its socket, upon which gRPC closes it as one that its peer has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from urllib.parse import quote

import structlog

from encoder_service.ops.shares import Shares
from encoder_service.rpc.auth import host_of

log = structlog.get_logger(__name__)

DESCRIPTORS = "/proc/self/fd"
CHECK_S, FILLING_CHECK_S = 0.25, 0.02
# Of tcpi_bytes_received in struct tcp_info of linux/tcp.h.
BYTES_RECEIVED_AT = 128


@dataclass(frozen=True)
class Connection:
    """port: the server's. peer: as gRPC names it."""

    descriptor: int
    port: int
    peer: str

    def end(self) -> None:
        """Ends the connection, unless the descriptor has become another's."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as own:
            # The copy keeps this socket, whatever becomes of the descriptor.
            found = connection_of(own.fileno())
            if found is not None and found.peer == self.peer:
                own.shutdown(socket.SHUT_RDWR)


def open_connections() -> Iterator[Connection]:
    """The TCP connections of this process."""
    try:
        names = os.listdir(DESCRIPTORS)
    except OSError:
        return
    for name in names:
        found = connection_of(int(name))
        if found is not None:
            yield found


def connection_of(descriptor: int) -> Connection | None:
    """None unless the descriptor is a TCP connection."""
    try:
        with _borrowed(descriptor) as found:
            own, peer = found.getsockname(), found.getpeername()
    except OSError:  # no socket, no connection, or closed by now
        return None
    if isinstance(own, tuple) and isinstance(peer, tuple):
        return Connection(descriptor, own[1], _peer(peer))
    return None


def received_bytes(descriptor: int) -> int | None:
    """What a TCP connection has received. None where the kernel does not count it."""
    try:
        with _borrowed(descriptor) as found:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    except OSError:
        return None
    if len(info) < BYTES_RECEIVED_AT + 8:
        return None
    return int.from_bytes(info[BYTES_RECEIVED_AT:], sys.byteorder)


class _borrowed:  # noqa: N801
    """The descriptor as a socket that does not close it: it is gRPC's."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError for what is no socket."""
        # The family with the longest addresses: Python reads as many bytes of one as the family has.
        self._socket = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=descriptor)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def _peer(address: tuple[str, int]) -> str:
    """The address as gRPC names its peer: an IPv4 address on an IPv6 socket is an IPv4 address."""
    host = address[0].removeprefix("::ffff:")
    if ":" in host:
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{address[1]}"
    return f"ipv4:{host}:{address[1]}"


def is_tcp(peer: str) -> bool:
    return peer.startswith(("ipv4:", "ipv6:"))


class ConnectionShares:
    """Ends connections above the share of their address, the newest first. The shares are those of
    ``ops.shares``; nothing is ended up to half of the limit."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # In the order in which they were first seen.
        self._known: dict[str, None] = {}
        self._was_full = False

    async def run(self, ports: Collection[int]) -> None:
        """Checks the server's connections until it is cancelled. ports: of its listening addresses."""
        while True:
            is_filling = _num_descriptors() > self._max_connections / 2
            # Those who open connections again and again fill what is free within milliseconds.
            await asyncio.sleep(FILLING_CHECK_S if is_filling else CHECK_S)
            if is_filling:
                ended = await asyncio.to_thread(self.check, ports)
                if ended and not self._was_full:
                    log.warning(
                        "connections above the share of their address were ended",
                        hosts=",".join(sorted(ended)[:3]),
                        max_connections=self._max_connections,
                    )
                self._was_full = bool(ended)

    def check(self, ports: Collection[int]) -> set[str]:
        """Ends what is above a share now. Returns the hosts concerned."""
        found = {each.peer: each for each in open_connections() if each.port in ports}
        known = {peer: None for peer in self._known if peer in found}
        self._known = known | dict.fromkeys(found)
        if len(found) <= self._max_connections / 2:
            return set()
        shares, hosts = Shares(self._max_connections), set()
        for peer in list(self._known):
            host = host_of(peer)
            if not shares.take((f"peer {host}",)):
                found[peer].end()
                del self._known[peer]
                hosts.add(host)
        return hosts


def _num_descriptors() -> int:
    try:
        return len(os.listdir(DESCRIPTORS))
    except OSError:
        return 0
