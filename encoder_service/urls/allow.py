"""Which URLs may be asked for at all: the allow-list.

Owns how an entry and a URL are read and compared. Addresses are ``addresses``'s.

Text is compared, so a URL that can be read in two ways is refused and not interpreted: user names, control
characters, backslashes, dot segments in any encoding, ports that are not the entry's.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass

from encoder_service.errors import ConfigurationError, UrlRefused

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"https": 443, "http": 80}
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\]")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class CheckedUrl:
    """A URL that the allow-list lets through. host: lower case, without brackets; target: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def text(self) -> str:
        """The whole URL, for joining a redirect's."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


@dataclass(frozen=True)
class Entry:
    """host: of one host, or of all below it when wildcard is set; prefix: empty, or a path that begins with a
    slash and ends without one."""

    scheme: str
    host: str
    port: int
    prefix: str
    wildcard: bool

    def lets_through(self, url: CheckedUrl) -> bool:
        if (url.scheme, url.port) != (self.scheme, self.port):
            return False
        if not (url.host.endswith("." + self.host) if self.wildcard else url.host == self.host):
            return False
        path = url.target.partition("?")[0]
        return not self.prefix or path == self.prefix or path.startswith(self.prefix + "/")


class AllowList:
    """Entries as the setting ``url_allow`` has them."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ConfigurationError."""
        self._entries = [parse_entry(entry) for entry in entries]

    def check(self, text: str) -> CheckedUrl:
        """The URL, read. Raises UrlRefused."""
        url = parse_url(text)
        if not any(entry.lets_through(url) for entry in self._entries):
            raise UrlRefused("the URL is not among those that this server fetches")
        return url


def parse_entry(entry: str) -> Entry:
    """Raises ConfigurationError."""
    text = entry if "://" in entry else f"https://{entry}"
    wildcard = "://*." in text
    try:
        url = parse_url(text.replace("://*.", "://", 1))
    except UrlRefused as error:
        raise ConfigurationError(f"url_allow has {entry!r}: {error.message}") from None
    if "?" in url.target or (wildcard and "." not in url.host):
        raise ConfigurationError(f"url_allow has {entry!r}; an entry has no query, and '*.' needs a domain")
    return Entry(url.scheme, url.host, url.port, url.target.rstrip("/"), wildcard)


def parse_url(text: str) -> CheckedUrl:
    """Raises UrlRefused."""
    if len(text) > MAX_URL_CHARS:
        raise UrlRefused(f"the URL has {len(text)} characters, at most {MAX_URL_CHARS} are taken")
    if not _PRINTABLE.fullmatch(text) or "\\" in text:
        raise UrlRefused("the URL has characters that a URL does not have")
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        raise UrlRefused("the URL cannot be read") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise UrlRefused("the URL's scheme is not https")
    if "@" in parts.netloc:
        raise UrlRefused("the URL has a user in it")
    host = parts.netloc.lower()
    if port is not None or host.endswith(":"):
        host = host.rpartition(":")[0]
    host = host.removesuffix(".")
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise UrlRefused("the URL's host cannot be read")
    check_path(parts.path)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CheckedUrl(parts.scheme, host.strip("[]"), port or DEFAULT_PORTS[parts.scheme], target)


def check_path(path: str) -> None:
    """Raises UrlRefused for a path that a server may read as another: dot segments, and slashes in disguise,
    however often they are encoded."""
    seen, decoded = "", path
    while seen != decoded:
        seen, decoded = decoded, urllib.parse.unquote(decoded, errors="replace")
    slashes = (path.count("/"), 0)
    if (decoded.count("/"), decoded.count("\\")) != slashes or any(
        segment.partition(";")[0] in (".", "..") for segment in decoded.split("/")
    ):
        raise UrlRefused("the URL's path has dot segments or encoded slashes")
