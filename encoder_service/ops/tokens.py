"""The tokens of namespaces, for gRPC and the broker.

Owns the file of the tokens and their comparison. ``rpc.auth`` and the broker own how a token is sent, and the
answer to a caller without a valid one.

The file is followed, so that tokens can be added and withdrawn without a restart. A namespace may have
several tokens, for example during a rotation. Once a namespace has had a token, it stays closed to callers
without one until the process ends, whatever the file says later.
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
    """Tokens as keyed digests. pairs: namespaces with the digest of a token that opens them. opened: the
    namespaces that a digest opens. names: the namespaces that have tokens. closed: the namespaces that have
    or had one."""

    pairs: Set[tuple[str, bytes]] = frozenset()
    opened: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    closed: Set[str] = frozenset()


class NamespaceTokens:
    """The tokens of all namespaces. Thread-safe. open_namespaces: namespaces without a token are open to all
    callers."""

    def __init__(self, file: Path | None = None, *, open_namespaces: bool = True) -> None:
        """file: None if no namespace has a token. Raises ConfigurationError for a file that cannot be read or
        has no tokens."""
        self.open_namespaces = open_namespaces
        self._file = file
        # Digests have a random key per process, so that the time of a lookup reveals nothing about a token.
        self._secret = secrets.token_bytes(32)
        self._newest = _Table()
        self._table = Reloaded([] if file is None else [file], self._build)

    def opens(self, namespace: str, token: str) -> bool:
        """Whether a caller with this token may use the namespace. token: empty for a caller without one."""
        if self._file is None:
            return self.open_namespaces
        table = self._table.current()
        # One digest and two lookups for every namespace and token. So the time reveals neither how much of a
        # token is right, nor whether the namespace exists or how many tokens it has.
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
        tokens_by_name = parse_tokens(text, self._file)
        former = self._newest
        if self._file is not None and not tokens_by_name:  # truncated, or not written yet
            raise ConfigurationError(f"{self._file} has no tokens: it needs lines of namespace=token")
        names = frozenset(tokens_by_name)
        if gone := former.names - names:
            log.warning("namespaces lost their last token and stay closed", namespaces=sorted(gone))
        pairs = {(name, self._digest(token)) for name, tokens in tokens_by_name.items() for token in tokens}
        opened: dict[bytes, tuple[str, ...]] = {}
        for name, digest in sorted(pairs):
            opened[digest] = (*opened.get(digest, ()), name)
        self._newest = _Table(pairs, opened, names, former.closed | names)
        return self._newest

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._secret, token.encode(errors="surrogatepass"), hashlib.sha256)


def parse_tokens(text: bytes, file: Path | None) -> dict[str, list[str]]:
    """Tokens by namespace, from lines of the form ``namespace=token``. Skips empty lines and lines that begin
    with ``#``. A namespace may have several lines. Raises ConfigurationError for other lines, and for a last
    line without a newline, which may have half of a token. The error never contains a token."""
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cannot read {file}: {type(error).__name__}") from None
    if text and not text.endswith(b"\n"):
        raise ConfigurationError(
            f"{file}, line {len(lines)} may not be complete: end the file with a newline"
        )
    tokens_by_name: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, token = line.partition("=")
        if not separator or not token.strip() or "\0" in line:
            raise ConfigurationError(f"{file}, line {number} is not namespace=token")
        tokens_by_name.setdefault(name.strip(), []).append(token.strip())
    return tokens_by_name
