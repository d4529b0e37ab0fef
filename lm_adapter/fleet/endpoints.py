"""Where the replicas of a fleet are: a list, the addresses behind a name, or the user's own answer.

Owns the resolving of names, and the threads of lookups that block. Names are looked up again and again and
not only when a connection breaks, which is when gRPC looks: a replica that was added is found although all is
well.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from lm_adapter.errors import EncoderUnavailable, InvalidRequest

__all__ = ["DnsEndpoints", "Endpoints", "Lookup", "resolver_of"]

Lookup: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]
"""Addresses (no ports) of a host name; raises OSError."""
Resolve: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
Endpoints: TypeAlias = str | Sequence[str] | Callable[[], Sequence[str] | Awaitable[Sequence[str]]]
"""``dns:///host:port``, a list of ``host:port`` or ``unix:/path``, or a function that returns such a list; a
plain function runs on a thread."""
AnswerT = TypeVar("AnswerT")


class OnThread(Generic[AnswerT]):
    """A function that blocks, for a loop: on a daemon thread, which nobody waits for at the end. A name
    server that says nothing holds up neither the loop, nor the threads of its pool, nor its close. One at a
    time: who asks while the last answer is still to come gets that one."""

    def __init__(self, work: Callable[[], AnswerT]) -> None:
        self._work = work
        self._answer: asyncio.Future[tuple[AnswerT | None, Exception | None]] | None = None

    async def __call__(self) -> AnswerT:
        """Raises what the function raises."""
        loop = asyncio.get_running_loop()
        if self._answer is None or self._answer.done() or self._answer.get_loop() is not loop:
            self._answer = loop.create_future()
            threading.Thread(
                target=self._run, args=(self._answer,), name="fleet-endpoints", daemon=True
            ).start()
        await asyncio.wait((self._answer,))
        found, error = self._answer.result()
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    def _run(self, answer: asyncio.Future[Any]) -> None:
        found: tuple[AnswerT | None, Exception | None]
        try:
            found = self._work(), None
        except Exception as error:
            found = None, error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            answer.get_loop().call_soon_threadsafe(answer.set_result, found)


def system_lookup(host: str, port: int) -> list[str]:
    """All addresses of the host, by the system's resolver. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no host name: {error}") from error
    return [str(address[0]) for *_, address in found]


class DnsEndpoints:
    """Every address behind a name, as a headless service publishes them."""

    def __init__(self, name: str, *, lookup: Lookup | None = None) -> None:
        """name: ``host:port``, or with ``dns:///`` before it. lookup: the system's resolver by default.
        Raises InvalidRequest."""
        host, separator, port = name.removeprefix("dns:///").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (separator and host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise InvalidRequest(f"a fleet's name is dns:///host:port, found {name!r}")
        self.host, self.port = host, int(port)
        on_thread = OnThread(partial(system_lookup, self.host, self.port))
        self._lookup: Lookup = lookup or (lambda *_: on_thread())

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
        is_async = inspect.iscoroutinefunction(endpoints) or isinstance(endpoints, DnsEndpoints)
        asked: Callable[[], Any] = endpoints if is_async else OnThread(endpoints)

        async def ask() -> Sequence[str]:
            answer = await asked()
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
