"""Which token opens which namespace, over gRPC and at the broker.

Owns the tokens, where they come from and how they are compared. ``rpc.auth`` and the broker own how a token
is sent and how a caller without a valid one is answered.

Tokens come from the settings and from a file. The file is read again when it changes, so that tokens are
added and withdrawn without a restart. A namespace may have several tokens, for example during a rotation.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError

log = structlog.get_logger(__name__)

# A change of the file is noticed after at most this time.
RECHECK_S = 1.0
MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True)
class _Table:
    """Tokens as keyed digests. by_namespace: the digests of each namespace. known: all digests."""

    by_namespace: Mapping[str, tuple[bytes, ...]]
    known: frozenset[bytes]


class NamespaceTokens:
    """The tokens of all namespaces. Thread-safe. open_namespaces: namespaces without a token are open."""

    def __init__(
        self,
        tokens: Mapping[str, Iterable[str]] | None = None,
        *,
        file: Path | None = None,
        open_namespaces: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError for a file that cannot be read."""
        self.open_namespaces = open_namespaces
        self._given = {name: tuple(values) for name, values in (tokens or {}).items()}
        self._file = file
        self._clock = clock
        # The key is random per process, so that the time of a lookup reveals nothing about a token.
        self._secret = secrets.token_bytes(32)
        self._seen = None if file is None else signature(file)
        self._checked_s = clock()
        self._table = self._build()

    def opens(self, namespace: str, token: str) -> bool:
        """Whether a caller with this token may use the namespace. An empty token means none."""
        table = self._current()
        expected = table.by_namespace.get(namespace)
        digest = self._digest(token)
        # Every token of the namespace is compared in constant time; an unknown namespace costs one
        # comparison. The time reveals neither a near miss nor whether the namespace exists.
        found = False
        for candidate in expected or (self._digest(""),):
            found |= hmac.compare_digest(digest, candidate)
        return self.open_namespaces if expected is None else found

    def knows(self, token: str) -> bool:
        """Whether the token opens any namespace."""
        return self._digest(token) in self._current().known

    def is_everything_open(self) -> bool:
        """Whether there are no tokens and every caller may use every namespace."""
        return self.open_namespaces and not self._current().by_namespace

    def names(self) -> frozenset[str]:
        """The namespaces that have tokens."""
        return frozenset(self._current().by_namespace)

    def _current(self) -> _Table:
        now_s = self._clock()
        if self._file is not None and now_s - self._checked_s >= RECHECK_S:
            self._checked_s = now_s
            self._reload(self._file)
        return self._table

    def _reload(self, file: Path) -> None:
        """Reads the file again if it changed. Keeps the former tokens while it cannot be read."""
        try:
            seen = signature(file)
            if seen == self._seen:
                return
            self._table = self._build()
            self._seen = seen
        except ConfigurationError as error:
            log.warning("the tokens' file is not usable, the former tokens stay", reason=error.message)
        else:
            log.info("tokens read again", namespaces=len(self._table.by_namespace))

    def _build(self) -> _Table:
        found = {name: list(values) for name, values in self._given.items()}
        if self._file is not None:
            for name, values in read_tokens(self._file).items():
                found.setdefault(name, []).extend(values)
        by_namespace = {name: tuple(map(self._digest, values)) for name, values in found.items()}
        return _Table(by_namespace, frozenset(itertools.chain(*by_namespace.values())))

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._secret, token.encode(errors="surrogatepass"), hashlib.sha256)


def signature(file: Path) -> tuple[int, int, int]:
    """Modification time (ns), inode and size, which change when a file is replaced or rewritten. Raises
    ConfigurationError."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from None
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_tokens(file: Path) -> dict[str, list[str]]:
    """Tokens by namespace from lines of the form ``namespace=token``. Skips empty lines and lines that begin
    with ``#``. A namespace may have several lines. Raises ConfigurationError, never with a token in it."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        lines = text.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {file}: {type(error).__name__}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, token = line.partition("=")
        if not separator or not token.strip():
            raise ConfigurationError(f"{file}, line {number} is not namespace=token")
        found.setdefault(name.strip(), []).append(token.strip())
    return found
