"""Fetches what a URL item names, within bounds of bytes, time and number.

Owns the HTTP exchange: redirects hop by hop, what kind of answer is taken, when reading stops. What may be
asked for is ``allow``'s and ``addresses``'s; both are asked again for every hop. Nothing of the environment
is read (no proxies, no netrc), no cookies are kept, and nothing is decompressed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpcore

from encoder_service.errors import (
    ImageTooLarge,
    QueueFull,
    UrlContent,
    UrlRefused,
    UrlUnreachable,
    VisionEncoderError,
)
from encoder_service.scheduler.admission import RETRY_AFTER_MS, Admission, Permit
from encoder_service.urls.addresses import AddressRules, CheckedBackend, Resolve, SystemResolver
from encoder_service.urls.allow import AllowList, CheckedUrl

REDIRECTS = frozenset((301, 302, 303, 307, 308))
# Of a server that may answer otherwise later.
RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
# Object stores call by the last two whatever was uploaded without a type.
TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
KEPT_CONNECTIONS = 8
KEEP_S = 15.0
# Callers that wait for a turn; each is an item of a call that is counted already.
MAX_WAITING = 4096


@dataclass(frozen=True)
class FetchBounds:
    """max_bytes: of one body; timeout_s: of one URL with all its hops, waiting for a turn left out."""

    max_bytes: int
    timeout_s: float = 10.0
    max_redirects: int = 3
    max_fetches: int = 16


@dataclass
class UrlCounters:
    """Fetches by their end: OK, the error's reason, CANCELLED when nobody waited any more. num_bytes: of the
    bodies of those that ended well."""

    ended: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0


class UrlFetcher:
    """One for the service; used on its event loop."""

    def __init__(
        self,
        allow: AllowList,
        bounds: FetchBounds,
        *,
        rules: AddressRules | None = None,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        fetch_ended: Callable[[float, str], None] = lambda _seconds, _outcome: None,
    ) -> None:
        """fetch_ended: told of every fetch's seconds, waiting for its turn included, and its outcome."""
        self._clock = clock
        self._fetch_ended = fetch_ended
        self._allow = allow
        self._bounds = bounds
        self._turns = asyncio.Semaphore(bounds.max_fetches)
        self.num_waiting = 0
        self.num_fetching = 0
        self._own_resolver = SystemResolver() if resolve is None else None
        self._client = httpcore.AsyncConnectionPool(
            ssl_context=httpcore.default_ssl_context() if tls is None else tls,
            max_connections=bounds.max_fetches,
            max_keepalive_connections=min(KEPT_CONNECTIONS, bounds.max_fetches),
            keepalive_expiry=KEEP_S,
            network_backend=CheckedBackend(
                AddressRules() if rules is None else rules, resolve or self._own_resolver or SystemResolver()
            ),
        )
        self.counters = UrlCounters()

    async def close(self) -> None:
        await self._client.aclose()
        if self._own_resolver is not None:
            self._own_resolver.close()

    @contextlib.asynccontextmanager
    async def content(self, text: str, admission: Admission) -> AsyncIterator[bytes]:
        """The bytes at a URL, counted as content for as long as the block lasts, while they arrive too.

        Raises UrlRefused, UrlContent, UrlUnreachable, ImageTooLarge, QueueFull.
        """
        data, permit = await self._counted(text, admission)
        try:
            yield data
        finally:
            permit.release()

    async def _counted(self, text: str, admission: Admission) -> tuple[bytes, Permit]:
        started_s, outcome = self._clock(), "INTERNAL"
        try:
            found = await self._fetch(text, admission)
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except VisionEncoderError as error:
            outcome = error.reason
            raise
        else:
            outcome = "OK"
            self.counters.num_bytes += len(found[0])
            return found
        finally:
            self.counters.ended[outcome] += 1
            self._fetch_ended(self._clock() - started_s, outcome)

    async def _fetch(self, text: str, admission: Admission) -> tuple[bytes, Permit]:
        """What lies there, and the permit that counts it."""
        url = self._allow.check(text)
        async with self._turn():
            permit = admission.acquire(0)
            try:
                return await self._within_time(url, permit), permit
            except BaseException:
                permit.release()
                raise

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self.num_waiting >= MAX_WAITING:
            raise QueueFull(
                f"{self.num_waiting} URLs wait to be fetched, at most {MAX_WAITING} may",
                retry_after_ms=RETRY_AFTER_MS,
                num_waiting=self.num_waiting,
                max_waiting=MAX_WAITING,
            )
        self.num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.num_waiting -= 1
        self.num_fetching += 1
        try:
            yield
        finally:
            self.num_fetching -= 1
            self._turns.release()

    async def _within_time(self, url: CheckedUrl, permit: Permit) -> bytes:
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                return await self._follow(url, permit)
        except TimeoutError:
            raise UrlUnreachable(f"the URL was not read within {self._bounds.timeout_s} s") from None
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise UrlUnreachable(f"the URL could not be read: {type(error).__name__}") from None
        except (httpcore.UnsupportedProtocol, ssl.SSLError, OSError) as error:
            raise UrlUnreachable(f"the URL could not be read: {type(error).__name__}") from None

    async def _follow(self, url: CheckedUrl, permit: Permit) -> bytes:
        """The body after at most max_redirects hops."""
        for _ in range(self._bounds.max_redirects + 1):
            found = await self._get(url, permit)
            if isinstance(found, bytes):
                return found
            url = found
        raise UrlRefused(f"the URL redirects more than {self._bounds.max_redirects} times")

    async def _get(self, url: CheckedUrl, permit: Permit) -> bytes | CheckedUrl:
        """One hop: the body, or where it is said to be."""
        target = httpcore.URL(
            scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode()
        )
        default = url.port == (443 if url.scheme == "https" else 80)
        shown = f"[{url.host}]" if ":" in url.host else url.host
        headers = [
            (b"Host", (shown if default else f"{shown}:{url.port}").encode()),
            (b"User-Agent", b"vision-encoder"),
            (b"Accept", b"image/*"),
            (b"Accept-Encoding", b"identity"),
        ]
        seconds = self._bounds.timeout_s
        timeouts = {"connect": seconds, "read": seconds, "write": seconds, "pool": seconds}
        async with self._client.stream(
            "GET", target, headers=headers, extensions={"timeout": timeouts}
        ) as answer:
            fields = {name.lower(): value for name, value in answer.headers}
            if answer.status in REDIRECTS:
                return self._redirected(url, fields.get(b"location", b""))
            check_answer(answer.status, fields)
            return await self._read(answer, fields, permit)

    def _redirected(self, url: CheckedUrl, location: bytes) -> CheckedUrl:
        """Where a redirect leads, checked as if it were the caller's URL. Raises UrlRefused."""
        try:
            found = self._allow.check(urllib.parse.urljoin(url.text, location.decode("ascii")))
        except ValueError:
            raise UrlRefused("the URL redirects to one that cannot be read") from None
        if url.scheme == "https" and found.scheme != "https":
            raise UrlRefused("the URL redirects from https to http")
        return found

    async def _read(self, answer: httpcore.Response, fields: dict[bytes, bytes], permit: Permit) -> bytes:
        declared = fields.get(b"content-length", b"")
        if declared.isdigit():
            self._check_size(int(declared))
        chunks: list[bytes] = []
        async for chunk in answer.aiter_stream():
            self._check_size(permit.num_bytes + len(chunk))
            permit.add_bytes(len(chunk))
            chunks.append(chunk)
        if not chunks:
            raise UrlContent("the URL's body has 0 bytes")
        return b"".join(chunks)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._bounds.max_bytes:
            raise ImageTooLarge(
                f"the URL's body has {num_bytes} bytes or more, at most {self._bounds.max_bytes} are taken",
                found_bytes=num_bytes,
                max_bytes=self._bounds.max_bytes,
            )


def check_answer(status: int, fields: dict[bytes, bytes]) -> None:
    """Raises UrlContent, UrlUnreachable for an answer whose body is not wanted."""
    if status in RETRYABLE:
        raise UrlUnreachable(f"the URL's server answers {status}", status=status)
    if status != 200:
        raise UrlContent(f"the URL's server answers {status}, not 200", status=status)
    encoding = fields.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding not in ("", "identity"):
        raise UrlContent(f"the URL's body is encoded as {encoding[:40]!r}, which was not asked for")
    kind = fields.get(b"content-type", b"").decode("latin-1").strip().lower()
    if kind and not kind.startswith(TYPES):
        raise UrlContent(f"the URL's body is {kind.partition(';')[0][:80]!r}, not an image")
