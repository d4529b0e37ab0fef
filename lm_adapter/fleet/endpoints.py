"""Where the replicas of a fleet are: a list, the addresses behind a name, or the user's own answer.

Owns the resolving of names. Names are looked up again and again and not only when a connection breaks, which
is when gRPC looks: a replica that was added is found although all is well.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from lm_adapter.errors import EncoderUnavailable, InvalidRequest

__all__ = ["DnsEndpoints", "Endpoints", "Lookup", "resolver_of"]

Lookup: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]
"""Addresses (no ports) of a host name; raises OSError."""
Resolve: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
Endpoints: TypeAlias = str | Sequence[str] | Callable[[], Sequence[str] | Awaitable[Sequence[str]]]
"""``dns:///host:port``, a list of ``host:port`` or ``unix:/path``, or a function that returns such a list."""


async def system_lookup(host: str, port: int) -> list[str]:
    """All addresses of the host, by the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(address[0]) for *_, address in found]


class DnsEndpoints:
    """Every address behind a name, as a headless service publishes them."""

    def __init__(self, name: str, *, lookup: Lookup = system_lookup) -> None:
        """name: ``host:port``, or with ``dns:///`` before it. Raises InvalidRequest."""
        host, separator, port = name.removeprefix("dns:///").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise InvalidRequest(f"a fleet's name is dns:///host:port, found {name!r}")
        self.host, self.port = host, int(port)
        self._lookup = lookup

    async def __call__(self) -> list[str]:
        """``address:port``, each once, sorted. Raises EncoderUnavailable for a name without addresses."""
        try:
            addresses = set(await self._lookup(self.host, self.port))
        except OSError as error:
            raise EncoderUnavailable(f"no address of {self.host}: {error}", reason="NO_ENDPOINTS") from error
        return sorted(f"[{one}]:{self.port}" if ":" in one else f"{one}:{self.port}" for one in addresses)


def resolver_of(endpoints: Endpoints) -> Resolve:
    """What answers with the targets of now. Raises InvalidRequest."""
    if isinstance(endpoints, str):
        if endpoints.startswith("dns:"):
            return DnsEndpoints(endpoints)
        endpoints = [endpoints]
    if callable(endpoints):
        asked = endpoints

        async def ask() -> Sequence[str]:
            answer = asked()
            return _checked(await answer if inspect.isawaitable(answer) else answer)

        return ask
    targets = _checked(endpoints)
    if not targets:
        raise InvalidRequest("a fleet has 0 endpoints, needs at least 1")

    async def same() -> Sequence[str]:
        return targets

    return same


def _checked(targets: Sequence[str]) -> list[str]:
    """Each once, in order. Raises InvalidRequest."""
    if isinstance(targets, str):
        raise InvalidRequest(f"endpoints are a list of targets, found the text {targets!r}")
    for target in targets:
        if not isinstance(target, str) or not target:
            raise InvalidRequest(f"an endpoint is host:port, found {target!r}")
    return list(dict.fromkeys(targets))
