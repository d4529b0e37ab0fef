"""The TCP connections of a gRPC server, and how many of them one address may have.

gRPC does not report a connection before its first call. So connections are found among the descriptors of the
process, in ``/proc/self/fd``. Without this folder, only gRPC's own limit applies. gRPC keeps its descriptors:
this module never closes one. It ends a connection by a shutdown of its socket, and gRPC then closes the
descriptor as if the peer had closed the connection.
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
# Time between two checks, and while the process has many descriptors.
CHECK_S, FILLING_CHECK_S = 0.25, 0.02
# Offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h).
BYTES_RECEIVED_AT = 128


@dataclass(frozen=True)
class Connection:
    """port: the server's. peer: the client's address as gRPC writes it."""

    descriptor: int
    port: int
    peer: str

    def end(self) -> None:
        """Ends the connection, unless its descriptor refers to another file by now."""
        # The duplicate refers to the same socket even if gRPC closes the descriptor meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as duplicate:
            current = connection_of(duplicate.fileno())
            if current is not None and current.peer == self.peer:
                duplicate.shutdown(socket.SHUT_RDWR)


def open_connections() -> Iterator[Connection]:
    """The TCP connections of this process."""
    for name in _descriptor_names():
        connection = connection_of(int(name))
        if connection is not None:
            yield connection


def connection_of(descriptor: int) -> Connection | None:
    """None unless the descriptor is a TCP connection."""
    try:
        with _borrowed(descriptor) as opened:
            own, peer = opened.getsockname(), opened.getpeername()
    except OSError:  # not a socket, not connected, or closed meanwhile
        return None
    if isinstance(own, tuple) and isinstance(peer, tuple):
        return Connection(descriptor, own[1], _peer(peer))
    return None


def received_bytes(descriptor: int) -> int | None:
    """The bytes that a TCP connection has received. None where the kernel does not count them."""
    try:
        with _borrowed(descriptor) as opened:
            info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
    except OSError:
        return None
    if len(info) < BYTES_RECEIVED_AT + 8:
        return None
    return int.from_bytes(info[BYTES_RECEIVED_AT:], sys.byteorder)


class _borrowed:  # noqa: N801
    """A context manager: the descriptor as a Python socket, which does not close it."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError if the descriptor is not a socket."""
        # Python reads as many bytes of an address as the family has, and IPv6 has the longest addresses.
        self._socket = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=descriptor)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def _peer(address: tuple[str, int]) -> str:
    """The address as gRPC writes it. An IPv4 address on an IPv6 socket is written as IPv4."""
    host = address[0].removeprefix("::ffff:")
    if ":" in host:
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{address[1]}"
    return f"ipv4:{host}:{address[1]}"


def is_tcp(peer: str) -> bool:
    return peer.startswith(("ipv4:", "ipv6:"))


class ConnectionShares:
    """Ends the connections of an address above its share (``ops.shares``), the newest first. Does nothing
    while at most half of the limit is in use."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # Peers in the order of the checks that first found them.
        self._known: dict[str, None] = {}
        self._was_full = False

    async def run(self, ports: Collection[int]) -> None:
        """Checks the server's connections until it is cancelled. ports: of the server's addresses."""
        num_descriptors = 0
        while True:
            num_before, num_descriptors = num_descriptors, len(_descriptor_names())
            is_filling = num_descriptors > self._max_connections / 2
            # A client in a loop can open all remaining connections within milliseconds.
            is_urgent = is_filling and (num_descriptors > num_before or self._was_full)
            await asyncio.sleep(FILLING_CHECK_S if is_urgent else CHECK_S)
            if is_filling:
                hosts = await asyncio.to_thread(self.check, ports)
                if hosts and not self._was_full:
                    log.warning(
                        "connections above the share of their address were ended",
                        hosts=",".join(sorted(hosts)[:3]),
                        max_connections=self._max_connections,
                    )
                self._was_full = bool(hosts)

    def check(self, ports: Collection[int]) -> set[str]:
        """Ends connections above the share of their address. Returns the hosts that lost any."""
        connections = {
            connection.peer: connection for connection in open_connections() if connection.port in ports
        }
        known = {peer: None for peer in self._known if peer in connections}
        self._known = known | dict.fromkeys(connections)
        if len(connections) <= self._max_connections / 2:
            return set()
        shares, hosts = Shares(self._max_connections), set()
        for peer in list(self._known):
            host = host_of(peer)
            if not shares.take((f"peer {host}",)):
                connections[peer].end()
                del self._known[peer]
                hosts.add(host)
        return hosts


def _descriptor_names() -> list[str]:
    """The open descriptors of the process; none where the system has no list of them."""
    try:
        return os.listdir(DESCRIPTORS)
    except OSError:
        return []
