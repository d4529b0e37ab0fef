"""URL items: the allow-list, the address rules, and fetching from real servers on this machine.

The servers listen on 127.0.0.1, which is allowed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import socket
import ssl
import struct
import threading
import time
import timeit
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.errors import (
    ClipTooLarge,
    ConfigurationError,
    ImageTooLarge,
    QueueFull,
    UrlContent,
    UrlRefused,
    UrlUnreachable,
    VisionEncoderError,
)
from encoder_service.ingest import urls
from encoder_service.ingest.allowed_urls import AllowList
from encoder_service.ingest.urls import CheckedBackend, UrlFetcher, check_address
from encoder_service.scheduler.admission import Admission
from encoder_service.types import Modality
from tests.certificates import Authority

pytestmark = pytest.mark.anyio


def words(text: str) -> list[str]:
    return text.split()


ENTRIES = words("images.test files.test:8443 *.cdn.test http://plain.test [2606:4700::1]")
ALLOWED = words("""
    https://images.test/ https://images.test HTTPS://IMAGES.TEST./a.png?x=1&y=/../z https://images.test:443/a
    https://files.test:8443/a https://x.cdn.test/a/b https://x.y.cdn.test/ http://plain.test/a
    https://[2606:4700::1]/a
""")
REFUSED = [
    *words("""
    /a images.test/a http://images.test/a https://plain.test/a ftp://images.test/a file:///etc/passwd
    https://other.test/a https://images.test.evil.test/a https://evilimages.test/a https://images.test:8443/a
    https://files.test/a https://cdn.test/a https://evilcdn.test/a https://user:pw@images.test/a
    https://images.test@evil.test/a https://evil.test#@images.test/a https://evil.test\\@images.test/a
    https://images.test\\a https://im\u00e4ges.test/a https://images.test:99999/a https://images.test:x/a
    https://[::1]/a https://[images.test]/a https://127.0.0.1/a https://2130706433/a https://images..test/a
    """),
    "", "https://images.test/a b", "https://images.test/a\r\nHost: evil.test", "https://images.test\t/a",
    "https://images.test/" + "a" * 9000,
]  # fmt: skip
ADDRESSES_REFUSED = [
    *words("""
    127.0.0.1 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200 168.63.129.16
    192.0.0.192 224.0.0.1 239.255.255.255 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::7f00:1
    64:ff9b::7f00:1 64:ff9b::808:808 fe80::1 fe80::1%eth0 2606:4700::1%eth0 fc00::1 fd00:ec2::254 ff02::1
    2001::1 2001:db8::1 2002:7f00:1:: 3fff::1 100::1 4000::1 1.2.3 0x7f.1 2130706433
    """),
    "no address", "",
]  # fmt: skip


@pytest.mark.parametrize("url", ALLOWED)
def test_urls_that_an_entry_allows(url: str) -> None:
    assert "#" not in AllowList(ENTRIES).check(url + "#fragment").target


@pytest.mark.parametrize("url", REFUSED)
def test_urls_that_no_entry_allows(url: str) -> None:
    for entries in (ENTRIES, ()):
        with pytest.raises(UrlRefused):
            AllowList(entries).check(url)


@pytest.mark.parametrize(
    "entry", ["", "*", "*.com", "a.test/below", "a.test?q=1", "ftp://a.test", "u@a.test", "https://", "a b"]
)
def test_entries_without_a_meaning(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="--url-allow"):
        AllowList([entry])


@pytest.mark.parametrize("text", ADDRESSES_REFUSED)
def test_addresses_that_are_not_public_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UrlRefused) as caught:
        check_address(text, ())
    assert not text or text not in str(caught.value)


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_nothing_passes_that_the_standard_library_calls_not_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    try:
        check_address(str(address), ())
    except UrlRefused:
        is_metadata = any(address in network for network in urls.METADATA)
        assert address.version == 6 or not address.is_global or address.is_multicast or is_metadata
        return
    assert address.is_global
    assert not any((address.is_multicast, address.is_reserved, address.is_link_local, address.is_loopback))


def test_a_network_can_be_allowed_but_never_where_credentials_are_given_out() -> None:
    allowed = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("0.0.0.0/0")]
    assert check_address("10.1.2.3", allowed) == "10.1.2.3"
    for text in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "::ffff:10.1.2.3"):
        with pytest.raises(UrlRefused):
            check_address(text, allowed)


class Recorder(httpcore.AsyncNetworkBackend):
    """Records where it should connect to. failing: addresses that refuse."""

    def __init__(self, failing: Iterable[str]) -> None:
        self.connected: list[str] = []
        self._failing = set(failing)

    async def connect_tcp(
        self, host: str, port: int, *rest: object, **more: object
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        if host in self._failing:
            raise httpcore.ConnectError("refused")
        return httpcore.AsyncMockStream([])


def backend(*answers: Sequence[str], failing: Iterable[str] = ()) -> tuple[CheckedBackend, Recorder]:
    """A backend whose names resolve to each of the answers in turn."""
    left, recorder = list(answers), Recorder(failing)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return left.pop(0)

    return CheckedBackend((), resolve, recorder), recorder


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    mixed = [["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["::1", "8.8.8.8"]]
    checked, recorder = backend(["8.8.8.8"], ["127.0.0.1"], *mixed)
    await checked.connect_tcp("images.test", 443)
    for _ in range(4):  # the later answers lead inside
        with pytest.raises(UrlRefused):
            await checked.connect_tcp("images.test", 443)
    assert recorder.connected == ["8.8.8.8"]


async def test_addresses_are_tried_in_turn() -> None:
    checked, recorder = backend(["8.8.8.8", "1.1.1.1"], ["8.8.8.8"], [], failing=["8.8.8.8"])
    await checked.connect_tcp("images.test", 443)
    assert recorder.connected == ["8.8.8.8", "1.1.1.1"]
    with pytest.raises(httpcore.ConnectError):
        await checked.connect_tcp("images.test", 443)
    with pytest.raises(UrlUnreachable):
        await checked.connect_tcp("images.test", 443)


LOOPBACK = [ipaddress.ip_network("127.0.0.1/32")]
Answer = Callable[[list[str], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that hands each request's lines to ``answer``; its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    await answer(head.decode().split("\r\n"), writer)
                    await writer.drain()
                    if writer.is_closing():
                        return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def says(text: str, body: bytes = b"") -> Answer:
    async def answer(_: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(text.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        if "Connection: close" in text:
            writer.close()

    return answer


def image(body: bytes, kind: str = "image/png") -> Answer:
    return says(f"HTTP/1.1 200 OK\nContent-Type: {kind}\nContent-Length: {len(body)}", body)


async def resolves(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


@contextlib.asynccontextmanager
async def fetching(
    port: int, *more: str, scheme: str = "http://", **bounds: object
) -> AsyncIterator[UrlFetcher]:
    options: dict[str, Any] = {"max_bytes": 10_000, "max_clip_bytes": 20_000, "timeout_s": 5.0, **bounds}
    allow = AllowList([f"{scheme}images.test:{port}", *more])
    fetcher = UrlFetcher(allow, **{"networks": LOOPBACK, "resolve": resolves, **options})
    try:
        yield fetcher
    finally:
        await fetcher.close()


@contextlib.asynccontextmanager
async def served(answer: Answer, *more: str, **bounds: Any) -> AsyncIterator[tuple[UrlFetcher, str]]:
    """A server of images.test: a fetcher, and the URL of its root."""
    async with serving(answer) as port, fetching(port, *more, **bounds) as fetcher:
        yield fetcher, f"http://images.test:{port}/"


async def get(fetcher: UrlFetcher, url: str, admission: Admission | None = None) -> bytes:
    """The bytes, all of which were counted."""
    permit = (Admission(0, 1 << 20) if admission is None else admission).acquire(0)
    data = await fetcher.fetch(url, count_bytes=permit.add_bytes)
    assert permit.num_bytes == len(data)
    return data


async def fails(
    answer: Answer, kind: type[VisionEncoderError], text: str | None = None, **bounds: object
) -> None:
    async with served(answer, **bounds) as (fetcher, url):
        with pytest.raises(kind, match=text):
            await get(fetcher, url)


async def test_bytes_arrive_and_the_host_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nothing of the environment counts
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    body, seen = os.urandom(5000), list[list[str]]()

    async def answer(lines: list[str], writer: asyncio.StreamWriter) -> None:
        seen.append(lines)
        await image(body)(lines, writer)

    async with serving(answer) as port, fetching(port) as fetcher:
        assert await get(fetcher, f"http://images.test:{port}/a/b.png?x=1#y") == body
    assert seen[0][0] == "GET /a/b.png?x=1 HTTP/1.1"
    assert f"Host: images.test:{port}" in seen[0]
    assert "Accept-Encoding: identity" in seen[0]
    assert not any(line.lower().startswith(("cookie", "authorization", "referer")) for line in seen[0])


def identity(authority: Authority, host: str) -> ssl.SSLContext:
    """What a server of this name shows."""
    files, context = authority.issue(host, host), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    return context


async def test_tls_is_checked_against_the_name_though_the_address_is_connected_to(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=authority.ca)
    for host, good in (("images.test", True), ("other.test", False)):
        context = identity(authority, host)
        names: list[str | None] = []
        context.sni_callback = lambda _, name, __, names=names: names.append(name)  # type: ignore[misc]
        async with serving(image(b"x" * 10), context) as port:
            async with fetching(port, scheme="https://", tls=trusting) as fetcher:
                if good:
                    assert await get(fetcher, f"https://images.test:{port}/") == b"x" * 10
                else:
                    with pytest.raises(UrlUnreachable):
                        await get(fetcher, f"https://images.test:{port}/")
            assert names == ["images.test"]


async def test_redirects_are_checked_hop_by_hop_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(lines: list[str], writer: asyncio.StreamWriter) -> None:
        path = lines[0].split()[1]
        where = {
            "/0": "/1",
            "/1": "/2",
            "/2": f"http://images.test:{port}/end",
            "/loop": "/loop",
            "/out": "http://evil.test/",
            "/metadata": "http://169.254.169.254/latest",
            "/file": "file:///etc/passwd",
            "/junk": "http://[",
            "/none": "",
        }.get(path)
        if where is None:
            await image(b"found")(lines, writer)
        else:
            location = f"\nLocation: {where}" if where else ""
            await says(f"HTTP/1.1 302 Found{location}\nContent-Length: 0")(lines, writer)

    async with serving(answer) as port, fetching(port) as fetcher:
        assert await get(fetcher, f"http://images.test:{port}/0") == b"found"
        for path in ("loop", "out", "metadata", "file", "junk", "none"):
            with pytest.raises(UrlRefused):
                await get(fetcher, f"http://images.test:{port}/{path}")
        monkeypatch.setattr(urls, "MAX_REDIRECTS", 2)
        with pytest.raises(UrlRefused, match="more than 2 times"):
            await get(fetcher, f"http://images.test:{port}/0")


async def test_https_never_leads_to_http(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = identity(authority, "images.test")
    async with serving(image(b"x")) as plain:
        moved = f"HTTP/1.1 301 Moved\nLocation: http://images.test:{plain}/\nContent-Length: 0"
        trusting = ssl.create_default_context(cafile=authority.ca)
        async with (
            serving(says(moved), context) as port,
            fetching(port, f"http://images.test:{plain}", scheme="https://", tls=trusting) as fetcher,
        ):
            with pytest.raises(UrlRefused, match="from https to http"):
                await get(fetcher, f"https://images.test:{port}/")


async def test_too_many_bytes_are_refused_when_said_and_cut_when_not() -> None:
    await fails(image(bytes(10_001)), ImageTooLarge, "10001 bytes")
    async with served(image(bytes(20_001))) as (fetcher, url):
        with pytest.raises(ClipTooLarge, match="20001 bytes, the limit is 20000"):
            await fetcher.fetch(url, Modality.VIDEO)
    sent = 0

    async def endless(_: list[str], writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"400\r\n" + bytes(0x400) + b"\r\n")
            sent += 0x400
            await writer.drain()

    await fails(endless, ImageTooLarge)
    assert sent < 64 << 20


async def test_a_body_shorter_than_said_and_one_that_is_longer() -> None:
    short = "HTTP/1.1 200 OK\nContent-Type: image/png\nContent-Length: 100\nConnection: close"
    await fails(says(short, b"only this"), UrlUnreachable)
    longer = "HTTP/1.1 200 OK\nContent-Type: image/png\nContent-Length: 4\nConnection: close"
    async with served(says(longer, b"this and more")) as (fetcher, url):
        assert await get(fetcher, url) == b"this"
    two = "HTTP/1.1 200 OK\nContent-Length: 4\nContent-Length: 5\nConnection: close"
    await fails(says(two, b"12345"), UrlUnreachable)


async def test_a_server_that_sends_byte_by_byte_is_left_in_time() -> None:
    """One that says nothing: test_a_clip_has_longer_than_an_image."""

    async def loris(lines: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    started = asyncio.get_running_loop().time()
    await fails(loris, UrlUnreachable, timeout_s=0.3)
    assert asyncio.get_running_loop().time() - started < 5


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (image(b"<html>", "text/html"), UrlContent),
        (image(b"{}", "application/json; charset=utf-8"), UrlContent),
        (image(b""), UrlContent),
        (says("HTTP/1.1 404 Not Found\nContent-Length: 0"), UrlContent),
        (says("HTTP/1.1 206 Partial Content\nContent-Type: image/png\nContent-Length: 1", b"x"), UrlContent),
        (says("HTTP/1.1 429 Slow\nContent-Length: 0"), UrlUnreachable),
        (says("SSH-2.0-OpenSSH_9.6\nConnection: close"), UrlUnreachable),
        (says("HTTP/1.1 200 OK\nX: " + "y" * 200_000), UrlUnreachable),
    ],
)
async def test_answers_that_are_no_image(answer: Answer, kind: type[VisionEncoderError]) -> None:
    await fails(answer, kind)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
MP4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41"
PAGES = (
    b"<!DOCTYPE html><html>", b"<html lang=en>", b"\xef\xbb\xbf\r\n <!doctype HTML>", b"<!-- proxy --><html>",
    b"<HEAD>\n", b"<script>", b"<title>Sign in",
)  # fmt: skip


def labelled(body: bytes, *labels: str) -> Answer:
    return says("\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *labels]), body)


@pytest.mark.parametrize("modality", Modality)
@pytest.mark.parametrize("body", [PNG, MP4])
@pytest.mark.parametrize("labels", [
    "", "Content-Type:", "Content-Type: application/mp4", "Content-Type: Application/X-Matroska",
    "Content-Type: application/x-www-form-urlencoded", "Content-Type: multipart/form-data; boundary=x",
    "content-type: BINARY/octet-stream; charset=UTF-8", "Content-Type: application/octetstream",
    "Content-Type: video/mp4", "Content-Type: image/png", "Content-Type: text/plain; charset=utf-8",
    "Content-Type: application/json", "Content-Type: image/svg+xml", "Content-Type: no type",
    "Content-Encoding: aws-chunked", "Content-Encoding: AWS-Chunked, identity", "Content-Encoding:",
    "Content-Encoding: utf-8", "Content-Encoding: aws-chunked|Content-Encoding: binary",
])  # fmt: skip
async def test_p58_the_bytes_decide_whatever_the_labels_say(
    labels: str, body: bytes, modality: Modality
) -> None:
    async with served(labelled(body, *filter(None, labels.split("|")))) as (fetcher, url):
        assert await fetcher.fetch(url, modality) == body


CODINGS = (*words("gzip x-gzip BR deflate zstd compress gzip,aws-chunked"), "aws-chunked, gzip")
LABELLED_PAGES = itertools.product(PAGES, ("image/png", "application/octet-stream", "", "text/plain"))


@pytest.mark.parametrize(
    ("body", "labels", "text"),
    [
        (PNG, ["Content-Type: Text/HTML; charset=utf-8"], "'text/html', an HTML page, not an image"),
        (PNG, ["Content-Type: application/xhtml+xml"], "an HTML page"),
        *((page, [f"Content-Type: {kind}"], "an HTML page, not an image") for page, kind in LABELLED_PAGES),
        (b'{"error": 1}', ["Content-Type: application/problem+json"], "begins with the text b'{\"error"),
        (b"<?xml version='1.0'?>", ["Content-Type: application/xml"], "'application/xml' and begins"),
        (b"<svg xmlns='x'/>", ["Content-Type: image/svg+xml"], r"'image/svg\+xml' and begins"),
        *((PNG, [f"Content-Encoding: {coding}"], "which was not asked for") for coding in CODINGS),
        (PNG, ["Content-Encoding: zstd", "Content-Encoding: aws-chunked"], "which was not asked for"),
    ],
)
async def test_p58_labels_that_forbid_and_pages_under_any_label(
    body: bytes, labels: list[str], text: str
) -> None:
    await fails(labelled(body, *labels), UrlContent, text)


async def test_a_clip_has_longer_than_an_image() -> None:
    async def slow(lines: list[str], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        await image(b"x" * 10)(lines, writer)

    async with served(slow, timeout_s=0.1, clip_timeout_s=60.0) as (fetcher, url):
        assert await fetcher.fetch(url, Modality.VIDEO) == b"x" * 10
        with pytest.raises(UrlUnreachable, match=r"within 0\.1 s"):
            await fetcher.fetch(url)
    assert (urls.TIMEOUT_S, urls.CLIP_TIMEOUT_S) == (10.0, 60.0)


async def test_a_large_clip_does_not_hold_the_loop_up() -> None:
    """The loop's longest turn takes less than half as long as a copy of the body. Other work on the machine
    makes turns longer: one fetch of five has to show it."""
    size, piece = 128 << 20, bytes(1 << 20)

    async def answer(lines: list[str], writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode())
        for _ in range(size // len(piece)):
            writer.write(piece)
            await writer.drain()

    async def measure_turns(found: list[float]) -> None:
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0)
            found.append(time.perf_counter() - started_s)

    async def longest_turn_s(fetcher: UrlFetcher, url: str) -> float:
        turns_s = list[float]()
        measuring = asyncio.create_task(measure_turns(turns_s))
        assert len(await fetcher.fetch(url, Modality.VIDEO)) == size
        await asyncio.sleep(0)  # the turn that has ended the fetch counts
        measuring.cancel()
        return max(turns_s)

    body = bytearray(size)
    limit_s = min(timeit.repeat(lambda: bytes(body), number=1, repeat=3)) / 2
    found_s = list[float]()
    async with served(answer, max_clip_bytes=size, clip_timeout_s=60.0) as (fetcher, url):
        while len(found_s) < 5 and min(found_s, default=limit_s) >= limit_s:
            found_s.append(await longest_turn_s(fetcher, url))
    assert min(found_s) < limit_s


async def test_hosts_without_a_server_or_an_address_can_be_tried_again() -> None:
    async def lost(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    async with serving(image(b"x")) as port:
        pass
    for resolve in (resolves, lost):
        async with fetching(port, resolve=resolve) as fetcher:
            with pytest.raises(UrlUnreachable) as caught:
                await get(fetcher, f"http://images.test:{port}/")
            assert caught.value.retryable


async def test_p17_what_arrives_counts_as_content_and_is_refused_when_full() -> None:
    async with served(image(bytes(5000))) as (fetcher, url):
        with pytest.raises(QueueFull):
            await get(fetcher, url, Admission(0, 4000))


# -- shares --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held_open(fetcher: UrlFetcher, urls: Iterable[str], *more: Any) -> AsyncIterator[None]:
    """Fetches that do not end, as far as they get."""
    tasks = [asyncio.ensure_future(fetcher.fetch(url, *more)) for url in urls]
    await asyncio.sleep(0.1)
    yield
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


async def slow_or_not(lines: list[str], writer: asyncio.StreamWriter) -> None:
    if "/slow" in lines[0]:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
        await asyncio.Event().wait()
    await image(PNG)(lines, writer)


def uncounted(_: int) -> None:
    pass


async def test_p17_fetches_at_a_time_are_bounded_and_the_cancelled_ones_free_their_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 6, a namespace has 5, its images 4, and those of one host 3."""
    monkeypatch.setattr(urls, "MAX_FETCHES", 6)
    paths = list[str]()

    async def answer(lines: list[str], writer: asyncio.StreamWriter) -> None:
        paths.append(lines[0].split()[1])
        await slow_or_not(lines, writer)

    async with served(answer) as (fetcher, url):
        async with held_open(fetcher, [f"{url}slow"] * 6):
            assert paths == ["/slow"] * 3
        assert await get(fetcher, url) == PNG


@pytest.mark.parametrize("kind", Modality)
async def test_p51_slow_urls_leave_room_for_other_namespaces_modalities_and_hosts(kind: Modality) -> None:
    async with (
        serving(slow_or_not) as port,
        serving(slow_or_not) as other_port,
        fetching(
            port, f"http://files.test:{port}", f"http://*.cdn.test:{port}", f"http://images.test:{other_port}"
        ) as fetcher,
    ):
        slow = [f"http://images.test:{port}/slow{number}" for number in range(64)]
        other = Modality.VIDEO if kind is Modality.IMAGE else Modality.IMAGE
        async with held_open(fetcher, slow, kind, uncounted, ("peer", "bad")), asyncio.timeout(2):
            for server, modality, holder in (
                (f"images.test:{port}", kind, ("peer", "good")),
                (f"images.test:{port}", kind, ("elsewhere", "good")),
                (f"images.test:{port}", kind, ("",)),
                (f"images.test:{other_port}", kind, ("peer", "bad")),
                (f"files.test:{port}", kind, ("peer", "bad")),
                (f"a.cdn.test:{port}", kind, ("peer", "bad")),
                (f"images.test:{port}", other, ("peer", "bad")),
            ):
                assert await fetcher.fetch(f"http://{server}/", modality, uncounted, holder) == PNG


async def test_p51_all_hosts_of_a_wildcard_have_one_share() -> None:
    async with serving(slow_or_not) as port, fetching(port, f"http://*.cdn.test:{port}") as fetcher:
        slow = [f"http://{number}.cdn.test:{port}/slow" for number in range(64)]
        async with held_open(fetcher, slow), asyncio.timeout(2):
            assert await get(fetcher, f"http://images.test:{port}/") == PNG


async def test_p51_the_http_client_has_no_queue_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """More fetches at a time than it keeps connections, with idle connections to other hosts beside them."""
    monkeypatch.setattr(urls, "MAX_FETCHES", 1000)
    monkeypatch.setattr(urls, "MAX_LOOKUPS", 1000)
    hosts = [f"{number}.cdn.test" for number in range(64)]
    async with serving(slow_or_not) as port, fetching(port, f"http://*.cdn.test:{port}") as fetcher:
        for host in hosts[:20]:
            await fetcher.fetch(f"http://{host}:{port}/")
        slow = [f"http://{host}:{port}/slow" for host in hosts]
        async with held_open(fetcher, slow), asyncio.timeout(2):
            assert await get(fetcher, f"http://images.test:{port}/") == PNG


class Names:
    """Resolves names; those that begin with "lost" when it is told to. asked: of each."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.num_now = self.most = 0
        self.answered = asyncio.Event()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked[host] += 1
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        if host.startswith("lost"):
            await self.answered.wait()
        self.num_now -= 1
        return ["127.0.0.1"]


async def test_p51_names_that_hang_leave_room_for_other_namespaces_and_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for a name that a holder with a full share waits to look up."""
    monkeypatch.setattr(urls, "MAX_FETCHES", 1000)
    names = Names()
    async with (
        serving(slow_or_not) as port,
        fetching(port, f"http://*.cdn.test:{port}", resolve=names.resolve) as fetcher,
    ):
        lost = [f"http://lost{number}.cdn.test:{port}/" for number in range(64)]
        lost.append(f"http://good.cdn.test:{port}/")
        async with held_open(fetcher, lost, Modality.IMAGE, uncounted, ("peer", "bad")), asyncio.timeout(2):
            assert names.most <= urls.MAX_LOOKUPS * 3 // 4
            for host, holder in (("good.cdn.test", ("peer", "good")), ("images.test", ("peer", "bad"))):
                assert await fetcher.fetch(f"http://{host}:{port}/", holder=holder) == PNG


async def test_p51_a_name_is_looked_up_once_at_a_time_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread cannot be ended: it counts until it ends by itself, and the next answer is its."""
    monkeypatch.setattr(urls, "LOOKUP_TIMEOUT_S", 0.05)
    names = Names()
    async with (
        serving(slow_or_not) as port,
        fetching(port, f"http://lost.test:{port}", resolve=names.resolve) as fetcher,
    ):
        url = f"http://lost.test:{port}/"
        for _ in range(2):
            asked = (fetcher.fetch(url, holder=(name,)) for name in "abc")
            for found in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(found, UrlUnreachable)
                assert "not resolved within 0.05 s" in str(found)
        assert (names.asked["lost.test"], names.num_now) == (1, 1)
        monkeypatch.setattr(urls, "LOOKUP_TIMEOUT_S", 5.0)
        waiting = asyncio.ensure_future(fetcher.fetch(url))
        await asyncio.sleep(0)
        names.answered.set()
        assert await waiting == PNG
        assert (names.asked["lost.test"], names.num_now) == (1, 0)


async def test_p51_no_end_waits_for_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        asked.set()
        answered.wait(60)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with fetching(80, resolve=None) as fetcher:
        task = asyncio.ensure_future(fetcher.fetch("http://images.test/"))
        assert await asyncio.to_thread(asked.wait, 5)
        assert any(thread.name == "service-look_up" and thread.daemon for thread in threading.enumerate())
    answered.set()
    with pytest.raises((UrlUnreachable, asyncio.CancelledError)):
        await task


# -- connections that the server closes ----------------------------------------------------------------


class Closing:
    """A server that answers the first ``num_whole`` requests of each connection, and the next one with
    ``again`` before it closes. requests: those that came, by connection."""

    num_whole = 1

    def __init__(self, again: bytes = b"", *, is_reset: bool = False) -> None:
        self.requests: Counter[asyncio.StreamWriter] = Counter()
        self._again, self._is_reset = again, is_reset

    async def __call__(self, lines: list[str], writer: asyncio.StreamWriter) -> None:
        self.requests[writer] += 1
        if self.requests[writer] <= self.num_whole:
            await image(PNG)(lines, writer)
            return
        writer.write(self._again)
        if self._is_reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    @property
    def counts(self) -> list[int]:
        return list(self.requests.values())


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("scheme", ["http://", "https://"])
async def test_p56_a_request_on_a_kept_connection_that_the_server_closes_is_sent_again(
    scheme: str, is_reset: bool, tmp_path: Path
) -> None:
    closing, options, context = Closing(is_reset=is_reset), {}, None
    if scheme == "https://":
        authority = Authority(tmp_path)
        context = identity(authority, "images.test")
        options["tls"] = ssl.create_default_context(cafile=authority.ca)
    async with serving(closing, context) as port, fetching(port, scheme=scheme, **options) as fetcher:
        for _ in range(5):
            assert await get(fetcher, f"{scheme}images.test:{port}/") == PNG
    assert sum(closing.counts) > 5  # some were sent again


async def test_p56_it_is_sent_again_once_and_not_on_another_kept_connection() -> None:
    closing = Closing()
    async with served(closing) as (fetcher, url):
        await asyncio.gather(*(get(fetcher, url) for _ in range(6)))
        assert closing.counts == [1] * 6
        assert await get(fetcher, url) == PNG
    assert closing.counts == [2, 1, 1, 1, 1, 1, 1]


async def test_p56_a_fresh_connection_that_the_server_closes_is_a_failure() -> None:
    for num_before, counts in ((0, [1]), (1, [2, 1])):
        closing = Closing()
        async with served(closing) as (fetcher, url):
            for _ in range(num_before):
                await get(fetcher, url)
            closing.num_whole = 0
            with pytest.raises(UrlUnreachable):
                await get(fetcher, url)
        assert closing.counts == counts


@pytest.mark.parametrize(
    "again",
    [b"H", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", b"\0garbage"],
)
async def test_p56_once_bytes_of_an_answer_have_come_it_is_not_sent_again(again: bytes) -> None:
    closing = Closing(again)
    async with served(closing) as (fetcher, url):
        await get(fetcher, url)
        with pytest.raises(UrlUnreachable):
            await get(fetcher, url)
    assert closing.counts == [2]


async def test_p56_bytes_of_a_body_are_counted_once() -> None:
    async with served(Closing()) as (fetcher, url):
        for _ in range(2):
            assert await get(fetcher, url, Admission(0, len(PNG))) == PNG
