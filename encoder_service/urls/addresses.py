"""Which addresses a URL may lead to, and connections to exactly those.

Owns the rules for addresses and the one place where names become connections. A name is resolved once; every
address that it has is checked; the connection goes to an address that was checked, by number. A name that
resolves differently a moment later, or has one good and one bad address, gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import httpcore

from encoder_service.errors import UrlRefused, UrlUnreachable

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

# Never, whatever networks are allowed: where clouds give credentials to whoever asks (169.254.169.254 and the
# rest of its network are link-local, refused below as well).
METADATA: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::254/128",  # AWS
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle
        "fd20:ce::254/128",  # Google
    )
)
# IANA's special-purpose registries (iana.org/assignments/iana-ipv4-special-registry), and multicast.
NOT_PUBLIC_IPV4: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# Of IPv6 only global unicast is public, and in it not what carries an IPv4 address, nor what documents and
# tests use. Loopback, unique local, link-local, multicast, IPv4-mapped and NAT64 (64:ff9b::/96,
# 64:ff9b:1::/48) all lie outside.
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")
NOT_PUBLIC_IPV6: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
RESOLVER_THREADS = 8


class AddressRules:
    """networks: what is allowed although it is not public, such as an object store of one's own."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def check(self, text: str) -> Address:
        """The address, when it may be connected to. Raises UrlRefused, which does not repeat it: where a name
        leads inside is not the caller's to learn."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise UrlRefused("the URL's host has an address that cannot be read") from None
        # An IPv4 address in IPv6's clothes is refused as it stands, not looked at underneath.
        if not self._is_allowed(address):
            raise UrlRefused("the URL's host has an address that is not public")
        return address

    def _is_allowed(self, address: Address) -> bool:
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            return False
        if any(address in network for network in METADATA):
            return False
        if any(address in network for network in self._networks):
            return True
        if isinstance(address, ipaddress.IPv4Address):
            return not any(address in network for network in NOT_PUBLIC_IPV4)
        return address in PUBLIC_IPV6 and not any(address in network for network in NOT_PUBLIC_IPV6)


class SystemResolver:
    """The system's resolver on threads of its own: a name server that hangs holds up nobody else's work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Every address of the host, in the system's order. Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connections of one HTTP client, all of them to checked addresses. What is above (TLS, its server name,
    the Host header) still has the name."""

    def __init__(
        self, rules: AddressRules, resolve: Resolve, inner: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        self._rules = rules
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend() if inner is None else inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Tries the host's addresses in turn, once all of them have been checked. Raises UrlRefused,
        UrlUnreachable, and httpcore's errors of connecting."""
        try:
            async with asyncio.timeout(timeout):
                found = await self._resolve(host, port)
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            raise UrlUnreachable("the URL's host has no address now") from None
        addresses = [self._rules.check(text) for text in found]
        if not addresses:
            raise UrlUnreachable("the URL's host has no address now")
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(str(addresses[-1]), port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002, ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        raise UrlRefused("URLs lead to hosts")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
