"""Which token opens which namespace, over gRPC and at the broker.

Owns the tokens, where they come from and how they are compared. ``rpc.auth`` and the broker own how a token
is sent and how a caller without a valid one is answered.

Tokens come from a file, which is read again when it changes, so that tokens are added and withdrawn without a
restart. A namespace may have several tokens, for example during a rotation. A namespace that has had a token
stays closed until the process ends, whatever becomes of the file.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from encoder_service.errors import ConfigurationError
from encoder_service.ops.reloaded import Reloaded

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Table:
    """Tokens as keyed digests. pairs: each namespace with the digest of a token that opens it. opened: the
    namespaces that each digest opens. names: the namespaces that have tokens. closed: those that have or had
    one."""

    pairs: Set[tuple[str, bytes]] = frozenset()
    opened: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    closed: Set[str] = frozenset()


class NamespaceTokens:
    """The tokens of all namespaces. Thread-safe. open_namespaces: namespaces without a token are open."""

    def __init__(self, file: Path | None = None, *, open_namespaces: bool = True) -> None:
        """file: None if no namespace has a token. Raises ConfigurationError for one that cannot be read, and
        for one without tokens."""
        self.open_namespaces = open_namespaces
        self._file = file
        # The key is random per process, so that the time of a look-up reveals nothing about a token.
        self._secret = secrets.token_bytes(32)
        self._newest = _Table()
        self._table = Reloaded([] if file is None else [file], self._build)

    def opens(self, namespace: str, token: str) -> bool:
        """Whether a caller with this token may use the namespace. An empty token means none."""
        if self._file is None:
            # No namespace has a token that a time could reveal.
            return self.open_namespaces
        table = self._table.current()
        # One digest and two look-ups for every namespace and token: the time reveals neither a near miss nor
        # whether the namespace exists, nor how many tokens it has.
        is_theirs = (namespace, self._digest(token)) in table.pairs
        is_open = namespace not in table.closed and self.open_namespaces
        return is_theirs or is_open

    def knows(self, token: str) -> bool:
        """Whether the token opens any namespace."""
        return bool(self.names_of(token))

    def names_of(self, token: str) -> tuple[str, ...]:
        """The namespaces that the token opens."""
        return self._table.current().opened.get(self._digest(token), ())

    def has_token(self, namespace: str) -> bool:
        """Whether the namespace has, or has had, a token."""
        return namespace in self._table.current().closed

    def names(self) -> frozenset[str]:
        """The namespaces that have tokens."""
        return self._table.current().names

    def _build(self, text: bytes = b"") -> _Table:
        found = parse_tokens(text, self._file)
        former = self._newest
        if self._file is not None and not found:  # cut off, or about to be written
            raise ConfigurationError(f"{self._file} has no tokens: it needs lines of namespace=token")
        names = frozenset(found)
        if gone := former.names - names:
            log.warning("namespaces lost their last token and stay closed", namespaces=sorted(gone))
        pairs = {(name, self._digest(token)) for name, tokens in found.items() for token in tokens}
        opened: dict[bytes, tuple[str, ...]] = {}
        for name, digest in sorted(pairs):
            opened[digest] = (*opened.get(digest, ()), name)
        self._newest = _Table(pairs, opened, names, former.closed | names)
        return self._newest

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._secret, token.encode(errors="surrogatepass"), hashlib.sha256)


def parse_tokens(text: bytes, file: Path | None) -> dict[str, list[str]]:
    """Tokens by namespace from lines of the form ``namespace=token``. Skips empty lines and lines that begin
    with ``#``. A namespace may have several lines. Raises ConfigurationError, never with a token in it, also
    for a last line without its end, which may be half of a token."""
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cannot read {file}: {type(error).__name__}") from None
    if text and not text.endswith(b"\n"):
        raise ConfigurationError(
            f"{file}, line {len(lines)} may not be complete: end the file with a newline"
        )
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, token = line.partition("=")
        if not separator or not token.strip() or "\0" in line:
            raise ConfigurationError(f"{file}, line {number} is not namespace=token")
        found.setdefault(name.strip(), []).append(token.strip())
    return found
