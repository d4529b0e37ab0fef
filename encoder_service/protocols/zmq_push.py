"""Sends ZMQ messages to the hosts that a request names, if those hosts may receive rows.

Owns the rule which hosts may receive, and the limits on concurrent sends. Used by the servers of other
systems' protocols (``sglang``, ``tokenspeed``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import reprlib
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import zmq
import zmq.asyncio

from encoder_service.errors import (
    ConfigurationError,
    InvalidRequest,
    PermissionDenied,
    TransportUnavailable,
)

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_HOST_CHARS = 64
# Limits on concurrent sends: in total, to one host, to one of its ports. Each send has its own socket.
MAX_SENDS, MAX_SENDS_TO_HOST, MAX_SENDS_TO_PORT = 256, 64, 16
# Interval at which a message's tracker is polled, because libzmq has no callback for it.
FLUSH_POLL_S = 0.002
# For how long a closed socket still sends what libzmq has buffered, which is at most 8 KiB.
LINGER_MS = 1000


class AllowedReceivers:
    """The hosts that may receive rows: the request's peer, and the networks of an allow-list.

    A peer on this machine may name any address of this machine, because SGLang sends requests on loopback and
    receives on an interface.
    """

    def __init__(self, setting: str, allowed: Sequence[str]) -> None:
        """setting: the name of the allow-list in error messages. allowed: its networks. Raises ValueError."""
        self._setting = setting
        self._allowed: list[Network] = [ipaddress.ip_network(network) for network in allowed]

    def endpoint(self, host: str, port: int, peer: str) -> str:
        """The ZMQ endpoint of a host and port that a request names. peer: the address that sent the request.
        Raises InvalidRequest, PermissionDenied."""
        if len(host) > MAX_HOST_CHARS:
            raise InvalidRequest(
                f"the receiving host has {len(host)} characters, at most {MAX_HOST_CHARS} are taken"
            )
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"the receiving port is {port}, needed is a number from 1 to 65535")
        try:
            address = parse_address(host)
        except ValueError:
            raise InvalidRequest(f"the receiving host {host!r} is not an IP address") from None
        if not self._may_receive(address, parse_address(peer)):
            raise PermissionDenied(
                f"rows may not be sent to {address}: the request comes from {peer}, and {self._setting} has "
                "no network of it"
            )
        return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"

    def endpoint_of(self, url: str, peer: str) -> str:
        """As ``endpoint``, for a text ``host:port``."""
        host, _, port = url.rpartition(":")
        if not re.fullmatch("[0-9]{1,5}", port):
            raise InvalidRequest(f"receive_url is {reprlib.repr(url)}, needed is host:port")
        return self.endpoint(host, int(port), peer)

    def _may_receive(self, address: Address, peer: Address) -> bool:
        if address == peer or any(address in network for network in self._allowed):
            return True
        return is_of_this_machine(peer) and is_of_this_machine(address)


def parse_address(text: str) -> Address:
    """An IP address; an IPv4 address mapped into IPv6 becomes IPv4. Raises ValueError, also for a scope id,
    because ``ipaddress`` does not check its text, which would become part of a ZMQ endpoint."""
    address = ipaddress.ip_address(text.strip("[]"))
    if getattr(address, "scope_id", None):
        raise ValueError(f"{text!r} has a scope id")
    return getattr(address, "ipv4_mapped", None) or address


def is_of_this_machine(address: Address) -> bool:
    """Whether the address is one of this machine: packets to it would leave from itself. Sends nothing."""
    if address.is_unspecified or address.is_multicast:
        return False
    if address.is_loopback:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))
        return bool(probe.getsockname()[0] == str(address))
    return False


# -- sending -------------------------------------------------------------------------------------------


class Sender:
    """Sends each message on a socket of its own. A message is sent or fails within ``timeout_s``, which
    includes the wait for a permit.

    A dead port delays its own messages. Others wait only when dead ports use up ``MAX_SENDS_TO_HOST`` or
    ``MAX_SENDS``.
    """

    def __init__(self, timeout_s: float) -> None:
        self._context = zmq.asyncio.Context()
        self._permits = asyncio.Semaphore(MAX_SENDS)
        # By host and by endpoint. An entry lasts as long as a send refers to it.
        self._permits_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Closes all sockets and drops messages that have not left."""
        self._context.destroy(linger=0)

    def bind_puller(self, host: str, port: int, max_part_bytes: int) -> tuple[Any, int]:
        """A socket that receives messages at an IP address, and its port. port: 0 for any. max_part_bytes: a
        peer that sends a longer part is disconnected. Raises ConfigurationError."""
        puller = self._context.socket(zmq.PULL)
        for option, value in ((zmq.MAXMSGSIZE, max_part_bytes), (zmq.IPV6, 1)):
            puller.setsockopt(option, value)
        try:
            puller.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            puller.close()
            address = f"{host}:{port}"
            raise ConfigurationError(f"cannot listen on {address}: {error}", address=address) from None
        return puller, int(puller.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def push(self, endpoint: str, frames: Sequence[bytes | memoryview]) -> None:
        """Returns once the message is written to the receiver's connection. The memory of the frames is not
        read after this returns or raises. Raises TransportUnavailable."""
        host = endpoint.rpartition(":")[0]
        of_host = self._permits_of.setdefault(host, asyncio.Semaphore(MAX_SENDS_TO_HOST))
        of_port = self._permits_of.setdefault(endpoint, asyncio.Semaphore(MAX_SENDS_TO_PORT))
        try:
            # The port's permit first: a message that waits for it holds no permit of its host.
            async with asyncio.timeout(self._timeout_s), of_port, of_host, self._permits:
                await self._push(endpoint, frames)
        except TimeoutError:
            raise TransportUnavailable(
                f"the receiver at {endpoint} did not take {sum(map(len, frames))} bytes within "
                f"{self._timeout_s} s"
            ) from None
        except zmq.ZMQError as error:  # for example too many sockets
            raise TransportUnavailable(f"nothing can be sent to {endpoint}: {error}") from None

    async def _push(self, endpoint: str, frames: Sequence[bytes | memoryview]) -> None:
        pusher = self._context.socket(zmq.PUSH)
        linger_ms = 0
        try:
            # IMMEDIATE: queue nothing for a receiver that is not connected.
            for option, value in ((zmq.IMMEDIATE, 1), (zmq.SNDHWM, 1), (zmq.LINGER, 0), (zmq.IPV6, 1)):
                pusher.setsockopt(option, value)
            pusher.connect(endpoint)
            tracker = await pusher.send_multipart(list(frames), copy=False, track=True)
            assert tracker is not None
            while not tracker.done:  # noqa: ASYNC110
                await asyncio.sleep(FLUSH_POLL_S)
            linger_ms = LINGER_MS
        finally:
            pusher.close(linger=linger_ms)
