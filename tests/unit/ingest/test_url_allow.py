"""The allow-list: what an entry lets through, and URLs that can be read in two ways."""

from __future__ import annotations

import pytest

from encoder_service.errors import ConfigurationError, UrlRefused
from encoder_service.ingest.urls import AllowList

ENTRIES = (
    "images.test",
    "files.test:8443",
    "store.test/public/",
    "*.cdn.test/a",
    "http://plain.test",
    "[2606:4700::1]",
)


@pytest.mark.parametrize(
    "url",
    [
        "https://images.test/",
        "https://images.test",
        "HTTPS://IMAGES.test./a.png?x=1&y=/../z",
        "https://images.test:443/a",
        "https://files.test:8443/a",
        "https://store.test/public/a/b.png",
        "https://store.test/public",
        "https://store.test/public/..a/%20b",
        "https://x.cdn.test/a/b",
        "https://x.y.cdn.test/a",
        "http://plain.test/a",
        "https://[2606:4700::1]/a",
    ],
)
def test_what_passes(url: str) -> None:
    AllowList(ENTRIES).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/a",
        "images.test/a",
        "http://images.test/a",
        "https://plain.test/a",
        "ftp://images.test/a",
        "file:///etc/passwd",
        "gopher://images.test/",
        "https://other.test/a",
        "https://images.test.evil.test/a",
        "https://evilimages.test/a",
        "https://images.test:8443/a",
        "https://files.test/a",
        "https://store.test/",
        "https://store.test/publicity/a",
        "https://store.test/Public/a",
        "https://store.test/public/../private/a",
        "https://store.test/public/%2e%2e/private",
        "https://store.test/public/%252e%252e/private",
        "https://store.test/public/..;/private",
        "https://store.test/public%2fa",
        "https://store.test/public/a%5c..%5cb",
        "https://store.test/public\\..\\private",
        "https://cdn.test/a",
        "https://evilcdn.test/a",
        "https://x.cdn.test/b",
        "https://user@images.test/a",
        "https://user:pw@images.test/a",
        "https://images.test@evil.test/a",
        "https://evil.test#@images.test/a",
        "https://evil.test\\@images.test/a",
        "https://images.test/a b",
        "https://images.test/a\r\nHost: evil.test",
        "https://images.test\t/a",
        "https://imäges.test/a",
        "https://images.test:99999/a",
        "https://images.test:x/a",
        "https://[::1]/a",
        "https://[images.test]/a",
        "https://127.0.0.1/a",
        "https://2130706433/a",
        "https://images..test/a",
        "https://images.test/" + "a" * 9000,
    ],
)
def test_what_does_not(url: str) -> None:
    with pytest.raises(UrlRefused):
        AllowList(ENTRIES).check(url)


def test_nothing_passes_an_empty_list() -> None:
    with pytest.raises(UrlRefused):
        AllowList(()).check("https://images.test/")


@pytest.mark.parametrize(
    "entry", ["", "*", "*.test/?q=1", "*.com", "ftp://a.test", "a.test/../b", "u@a.test", "https://", "a b"]
)
def test_entries_without_a_meaning(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="url_allow"):
        AllowList([entry])


def test_a_fragment_is_not_sent() -> None:
    assert AllowList(ENTRIES).check("https://images.test/a?b#c").target == "/a?b"
