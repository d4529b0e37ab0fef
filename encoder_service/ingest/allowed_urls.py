"""Which URLs the service may fetch: parsing them, and the setting ``url_allow``. Imports no torch, so that a
wrong setting is refused at once."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, replace

from encoder_service.errors import ConfigurationError, UrlRefused
from encoder_service.ops.shares import Holder

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"https": 443, "http": 80}

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\]")
_PRINTABLE = re.compile(r"[\x21-\x5b\x5d-\x7e]+")  # no backslash: some parsers read it as a slash


@dataclass(frozen=True)
class CheckedUrl:
    """A parsed URL. host: lower case, without brackets. target: path and query. entry: host and port of the
    entry that allows it, which for a wildcard is above its own host."""

    scheme: str
    host: str
    port: int
    target: str
    entry: str = ""

    def below(self, holder: Holder) -> Holder:
        """The server as a part of what a holder may take. All servers of a wildcard share a part."""
        return (
            (*holder, self.entry) if self.entry == self.authority else (*holder, self.entry, self.authority)
        )

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str) -> CheckedUrl:
    """Parses a URL. Raises UrlRefused for anything but an http or https URL of a plain host."""
    if len(text) > MAX_URL_CHARS:
        raise UrlRefused(f"the URL has {len(text)} characters, the limit is {MAX_URL_CHARS}")
    if not _PRINTABLE.fullmatch(text):
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
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CheckedUrl(parts.scheme, host.strip("[]"), port or DEFAULT_PORTS[parts.scheme], target)


class AllowList:
    """Entries of the setting ``url_allow``: a host, or ``*.`` and a domain; scheme and port are optional."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ConfigurationError for an invalid entry."""
        self._entries = [self._parse(entry) for entry in entries]

    @staticmethod
    def _parse(entry: str) -> tuple[CheckedUrl, bool]:
        """The entry as a URL, and whether it matches all hosts below its own."""
        text = entry if "://" in entry else f"https://{entry}"
        is_wildcard = "://*." in text
        try:
            url = parse_url(text.replace("://*.", "://", 1))
        except UrlRefused as error:
            raise ConfigurationError(f"--url-allow has {entry!r}: {error.message}") from None
        if url.target != "/" or (is_wildcard and "." not in url.host):
            raise ConfigurationError(
                f"--url-allow has {entry!r}; an entry has no path, and '*.' needs a domain"
            )
        return url, is_wildcard

    def check(self, text: str) -> CheckedUrl:
        """Parses a URL. Raises UrlRefused if it is not allowed."""
        url = parse_url(text)
        for entry, is_wildcard in self._entries:
            is_host = url.host.endswith("." + entry.host) if is_wildcard else url.host == entry.host
            if is_host and (url.scheme, url.port) == (entry.scheme, entry.port):
                return replace(url, entry=entry.authority)
        raise UrlRefused("the URL is not among those that this server fetches")
