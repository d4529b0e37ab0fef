"""URL items: which hosts and addresses may be contacted, and fetching within limits of bytes and time.

Owns the address filter, the HTTP exchange, and the shares of fetches and of name look-ups; ``allowed_urls``
has the list of allowed hosts. A name is resolved once per connection. All its addresses are checked, and the
connection is made to a checked address, not to the name. Every redirect passes the same checks. Nothing is
read from the environment (no proxies, no netrc), no cookies are kept, nothing is decompressed.

The bytes decide what a body is, since stores state the type and the encoding that an upload had. Labels
decide where they forbid: HTML, a real encoding, and types of text if the bytes are text.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpcore
from prometheus_client import Histogram

from encoder_service.config import Settings
from encoder_service.errors import (
    ClipTooLarge,
    ImageTooLarge,
    UrlContent,
    UrlRefused,
    UrlUnreachable,
    VisionEncoderError,
)
from encoder_service.ingest.allowed_urls import AllowList, CheckedUrl
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder, WaitingShares
from encoder_service.own_thread import on_own_thread
from encoder_service.types import Modality

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3
# For one URL, redirects included.
TIMEOUT_S, CLIP_TIMEOUT_S = 10.0, 60.0
# Concurrent fetches, each with a connection; others wait. One host of one namespace has about 20 of them.
MAX_FETCHES = 64
# Threads that resolve names. A thread that hangs cannot be ended: it counts until the system gives up.
MAX_LOOKUPS = 32
LOOKUP_TIMEOUT_S = 5.0
KEEP_S = 15.0
NO_HOLDER: Holder = ("",)
REDIRECTS = frozenset((301, 302, 303, 307, 308))
RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
# Registered content codings, except for the one that changes nothing. Other labels (``aws-chunked``,
# ``utf-8``) are left of an upload.
CODINGS = frozenset((
    "gzip", "x-gzip", "compress", "x-compress", "deflate", "br", "zstd", "dcb", "dcz", "exi", "pack200-gzip",
    "aes128gcm",
))  # fmt: skip
HTML_TYPES = ("text/html", "application/xhtml+xml")
HTML = re.compile(
    rb"(\xef\xbb\xbf)?\s*<(!--|(!doctype html|html|head|body|script|style|title|meta|h1|div|table|p)[\s>])",
    re.IGNORECASE,
)
# Types of text. Servers also give "text/plain" to files that they do not know.
TEXT_TYPE = re.compile(r"text/(?!plain\b)|.*(json|xml|javascript)")
# Bytes that no text has, and how many bytes are searched (https://mimesniff.spec.whatwg.org).
BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
SNIFFED_BYTES = 1445
TRANSPORT_ERRORS = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)
FETCH_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, text.split()))


# Refused even if the networks are allowed: the addresses at which clouds serve credentials (169.254.169.254;
# AWS, Alibaba, Azure, Oracle, Google).
METADATA = _networks(
    "169.254.0.0/16 fe80::/10 fd00:ec2::254/128 100.100.100.200/32 168.63.129.16/32 192.0.0.192/32 "
    "fd20:ce::254/128"
)
# In IPv6 only global unicast is public, except ranges that carry IPv4 addresses, documentation and tests.
# Loopback, unique local, link-local, multicast, IPv4-mapped and NAT64 addresses are outside of it.
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")
NOT_PUBLIC_IPV6 = _networks("2001::/23 2001:db8::/32 2002::/16 3fff::/20")


def check_address(text: str, allowed: Iterable[Network]) -> str:
    """Returns the address if connecting to it is allowed. allowed: networks that need not be public. Raises
    UrlRefused. Its text does not contain the address, so that a caller does not learn the internal address of
    a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise UrlRefused("the URL's host has an address that cannot be read") from None
    # An IPv4 address inside an IPv6 address need not be extracted, because those ranges are not public.
    is_public = address.is_global and not address.is_multicast
    if isinstance(address, ipaddress.IPv6Address):
        is_public &= address in PUBLIC_IPV6 and not any(address in network for network in NOT_PUBLIC_IPV6)
    is_public |= any(address in network for network in allowed)
    if not is_public or getattr(address, "scope_id", None) or any(address in network for network in METADATA):
        raise UrlRefused("the URL's host has an address that is not public")
    return str(address)


@dataclass
class _Attempt:
    """One request, for the layers below the HTTP client. holder: whose share of the name look-ups it takes.
    is_fresh: it opened a connection. has_answer: bytes of the answer have arrived."""

    holder: Holder
    is_fresh: bool = False
    has_answer: bool = False


_ATTEMPT: ContextVar[_Attempt] = ContextVar("attempt", default=_Attempt(NO_HOLDER))  # noqa: B039


@contextmanager
def _attempt_of(holder: Holder) -> Iterator[_Attempt]:
    attempt = _Attempt(holder)
    token = _ATTEMPT.set(attempt)
    try:
        yield attempt
    finally:
        _ATTEMPT.reset(token)


class Lookups:
    """Look-ups of names. Used on one event loop.

    At most one is in progress for a name: others that ask for it wait for its answer. Holders have shares of
    MAX_LOOKUPS. A look-up counts until it has ended, also after its callers have left.
    """

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._shares = WaitingShares(MAX_LOOKUPS)
        self._running: dict[str, asyncio.Task[Sequence[str]]] = {}

    async def find(self, host: str, port: int) -> Sequence[str]:
        """The host's addresses, by the share of the current attempt. Raises OSError; UrlUnreachable after
        LOOKUP_TIMEOUT_S, the wait for a share included."""
        holder = _ATTEMPT.get().holder
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                if host not in self._running:
                    taken = await self._shares.acquire(holder)
                    if host in self._running:
                        self._shares.release(holder, taken)
                    else:
                        running = asyncio.get_running_loop().create_task(self._run(host, port, holder, taken))
                        self._running[host] = running
                return await asyncio.shield(self._running[host])
        except TimeoutError:
            raise UrlUnreachable(
                f"the name of the URL's host was not resolved within {LOOKUP_TIMEOUT_S:g} s"
            ) from None

    def close(self) -> None:
        """Cancels the look-ups. Does not wait for their threads, which cannot be ended."""
        for running in self._running.values():
            running.cancel()

    async def _run(self, host: str, port: int, holder: Holder, taken: int) -> Sequence[str]:
        try:
            return await self._resolve(host, port)
        finally:
            del self._running[host]
            self._shares.release(holder, taken)


async def resolve_by_system(host: str, port: int) -> Sequence[str]:
    """All addresses of the host, in the system's order. Raises OSError."""

    def look_up() -> Sequence[tuple[Any, ...]]:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    found = await on_own_thread(look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class AnswerStream(httpcore.AsyncNetworkStream):
    """A connection that notes in the current attempt when bytes of an answer arrive."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        data = await self._inner.read(max_bytes, timeout)
        if data:
            _ATTEMPT.get().has_answer = True
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        return AnswerStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects an HTTP client to checked addresses only. TLS, its server name and the Host header still use
    the host's name."""

    def __init__(
        self,
        allowed: Sequence[Network],
        resolve: Resolve,
        inner: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._allowed = allowed
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
        """Checks all of the host's addresses and then tries them in turn. Raises UrlRefused, UrlUnreachable,
        and httpcore's connection errors."""
        _ATTEMPT.get().is_fresh = True
        try:
            async with asyncio.timeout(timeout):
                found = await self._resolve(host, port)
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            found = ()
        addresses = [check_address(text, self._allowed) for text in found]
        failure: Exception = UrlUnreachable("the URL's host has no address now")
        for address in addresses:
            try:
                return AnswerStream(
                    await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


def media_type(fields: dict[bytes, str]) -> str:
    """The stated type in lower case without its parameters; "" if there is none."""
    return fields.get(b"content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class Content:
    """What a URL's body may be. what: with its article, for messages. types: that are asked for.
    timeout_s: for the whole fetch."""

    what: str
    types: str
    max_bytes: int
    timeout_s: float
    too_large: type[VisionEncoderError]

    def check_answer(self, status: int, fields: dict[bytes, str]) -> None:
        """Raises UrlUnreachable or UrlContent for an answer without such a body."""
        if status in RETRYABLE:
            raise UrlUnreachable(f"the URL's server answers {status}", status=status)
        if status != 200:
            raise UrlContent(f"the URL's server answers {status}, not 200", status=status)
        encoding = fields.get(b"content-encoding", "").lower()
        if any(coding.strip() in CODINGS for coding in encoding.split(",")):
            raise UrlContent(f"the URL's body is encoded as {encoding[:40]!r}, which was not asked for")
        kind = media_type(fields)
        if kind in HTML_TYPES:
            raise UrlContent(f"the URL's body is {kind[:80]!r}, an HTML page, not {self.what}")

    def check_body(self, start: bytes, kind: str) -> None:
        """Raises UrlContent for a page or text. start: of the body. kind: its media type, "" if none is
        stated. Whether other bytes are an image or a clip is left to their decoder."""
        if HTML.match(start):
            raise UrlContent(f"the URL's body is an HTML page, not {self.what}")
        if TEXT_TYPE.match(kind) and not BINARY.search(start):
            raise UrlContent(
                f"the URL's body is {kind[:80]!r} and begins with the text {start[:16]!r}: not {self.what}"
            )

    def check_size(self, num_bytes: int) -> None:
        """Raises ``too_large``."""
        if num_bytes > self.max_bytes:
            raise self.too_large(
                f"the URL's body has at least {num_bytes} bytes, the limit is {self.max_bytes}",
                found_bytes=num_bytes,
                max_bytes=self.max_bytes,
            )


class UrlFetcher:
    """Fetches URLs. There is one fetcher per service, used on its event loop."""

    def __init__(
        self,
        allow: AllowList,
        *,
        max_bytes: int,
        max_clip_bytes: int,
        timeout_s: float = TIMEOUT_S,
        clip_timeout_s: float = CLIP_TIMEOUT_S,
        networks: Sequence[Network] = (),
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        observe: Callable[[str, float], None] = lambda _outcome, _seconds: None,
    ) -> None:
        """max_bytes, max_clip_bytes: limits of an image's and a clip's body. timeout_s, clip_timeout_s:
        limits of one URL including its redirects, excluding the wait for a permit. networks: may be
        contacted although they are not public. observe: receives the outcome (OK, the reason of a failure,
        CANCELLED) and the duration in seconds of every fetch."""
        self._allow = allow
        self._contents = {
            Modality.IMAGE: Content("an image", "image/*", max_bytes, timeout_s, ImageTooLarge),
            # A GIF is a clip with an image's type.
            Modality.VIDEO: Content(
                "a clip", "video/*, image/*", max_clip_bytes, clip_timeout_s, ClipTooLarge
            ),
        }
        self._observe = observe
        self._permits = WaitingShares(MAX_FETCHES)
        self._lookups = Lookups(resolve or resolve_by_system)
        backend = CheckedBackend(networks, self._lookups.find)
        tls = httpcore.default_ssl_context() if tls is None else tls
        # Without a limit of connections, which would be a second queue, without shares.
        self._kept = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=None,
            max_keepalive_connections=MAX_FETCHES,
            keepalive_expiry=KEEP_S,
            network_backend=backend,
        )
        self._fresh = httpcore.AsyncConnectionPool(
            ssl_context=tls, max_connections=None, max_keepalive_connections=0, network_backend=backend
        )

    async def close(self) -> None:
        await self._kept.aclose()
        await self._fresh.aclose()
        self._lookups.close()

    async def fetch(
        self,
        text: str,
        modality: Modality = Modality.IMAGE,
        count_bytes: Callable[[int], None] = lambda _: None,
        holder: Holder = NO_HOLDER,
    ) -> bytes:
        """The body at a URL. count_bytes: called with the size of each part before it is kept; may raise
        QueueFull. holder: whose share of the fetches is taken. Raises UrlRefused, UrlContent, UrlUnreachable,
        ImageTooLarge, ClipTooLarge."""
        started_s, outcome = time.monotonic(), "INTERNAL"
        try:
            url = self._allow.check(text)
            async with self._permits.hold(url.below((*holder, modality.value))):
                body = await self._fetch_in_time(url, self._contents[modality], count_bytes, holder)
            outcome = "OK"
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except VisionEncoderError as error:
            outcome = error.reason
            raise
        finally:
            self._observe(outcome, time.monotonic() - started_s)
        return body

    async def _fetch_in_time(
        self, url: CheckedUrl, content: Content, count_bytes: Callable[[int], None], holder: Holder
    ) -> bytes:
        try:
            async with asyncio.timeout(content.timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(url, content, count_bytes, holder)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise UrlUnreachable(f"the URL was not read within {content.timeout_s} s") from None
        except (*TRANSPORT_ERRORS, OSError) as error:  # ssl.SSLError is an OSError
            raise UrlUnreachable(f"the URL could not be read: {type(error).__name__}") from None
        raise UrlRefused(f"the URL redirects more than {MAX_REDIRECTS} times")

    async def _get(
        self, url: CheckedUrl, content: Content, count_bytes: Callable[[int], None], holder: Holder
    ) -> bytes | CheckedUrl:
        """The body, or the URL of a redirect. The server may close a kept connection just when a request goes
        out: then it is sent again, once, on a connection of its own (RFC 9110, section 9.2.2)."""
        with _attempt_of(url.below(holder)) as attempt:
            try:
                return await self._exchange(self._kept, url, content, count_bytes)
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
                if attempt.is_fresh or attempt.has_answer:
                    raise
            return await self._exchange(self._fresh, url, content, count_bytes)

    async def _exchange(
        self,
        client: httpcore.AsyncConnectionPool,
        url: CheckedUrl,
        content: Content,
        count_bytes: Callable[[int], None],
    ) -> bytes | CheckedUrl:
        """One request: returns the body, or the URL of a redirect."""
        headers: dict[bytes | str, bytes | str] = {
            "Host": url.authority,
            "User-Agent": "vision-encoder",
            "Accept": content.types,
            "Accept-Encoding": "identity",
        }
        parts, num_bytes = list[bytes](), 0
        async with client.stream("GET", url.text, headers=headers) as answer:
            fields = dict[bytes, str]()
            for name, value in answer.headers:
                before = fields.get(name.lower())
                text = value.decode("latin-1").strip()
                fields[name.lower()] = text if before is None else f"{before}, {text}"
            if answer.status in REDIRECTS:
                return self._redirected(url, fields.get(b"location", ""))
            content.check_answer(answer.status, fields)
            declared = fields.get(b"content-length", "")
            content.check_size(int(declared) if declared.isdigit() else 0)
            async for part in answer.aiter_stream():
                num_bytes += len(part)
                content.check_size(num_bytes)
                count_bytes(len(part))
                parts.append(part)
        if not num_bytes:
            raise UrlContent("the URL's body has 0 bytes")
        # CPython's join of many bytes releases the GIL.
        body = await asyncio.to_thread(b"".join, parts)
        content.check_body(body[:SNIFFED_BYTES], media_type(fields))
        return body

    def _redirected(self, url: CheckedUrl, location: str) -> CheckedUrl:
        """The target of a redirect. Raises UrlRefused."""
        try:
            found = self._allow.check(urllib.parse.urljoin(url.text, location))
        except ValueError:
            raise UrlRefused("the URL redirects to one that cannot be read") from None
        if url.scheme == "https" and found.scheme != "https":
            raise UrlRefused("the URL redirects from https to http")
        return found


def open_urls(settings: Settings, metrics: Metrics) -> UrlFetcher | None:
    """The service's fetcher; None without an allow-list, so that URL items are refused. Raises
    ConfigurationError."""
    if not settings.url_allow:
        return None
    seconds = Histogram(
        "ve_url_fetch_seconds",
        "Seconds of fetching one URL item, the wait for a permit included, by outcome.",
        ["outcome"],
        buckets=FETCH_BUCKETS_S,
        registry=metrics.registry,
    )
    return UrlFetcher(
        AllowList(settings.url_allow),
        max_bytes=settings.max_encoded_bytes,
        max_clip_bytes=settings.max_clip_bytes,
        networks=[ipaddress.ip_network(network) for network in settings.url_networks],
        observe=lambda outcome, elapsed_s: seconds.labels(outcome).observe(elapsed_s),
    )
