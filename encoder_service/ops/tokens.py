"""Which token opens which namespace, over gRPC and at the broker.

Owns the tokens, where they come from and how they are compared. ``rpc.auth`` and the broker own how a token
is sent and how a caller without a valid one is answered.

Tokens come from a file, which is read again when it changes, so that tokens are added and withdrawn without a
restart. A namespace may have several tokens, for example during a rotation.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from encoder_service.errors import ConfigurationError
from encoder_service.ops.reloaded import Reloaded


@dataclass(frozen=True)
class _Table:
    """Tokens as keyed digests. by_namespace: the digests of each namespace. names: the namespaces that each
    digest opens."""

    by_namespace: Mapping[str, tuple[bytes, ...]]
    names: Mapping[bytes, tuple[str, ...]]


class NamespaceTokens:
    """The tokens of all namespaces. Thread-safe. open_namespaces: namespaces without a token are open."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        open_namespaces: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """file: None if no namespace has a token. Raises ConfigurationError for one that cannot be read."""
        self.open_namespaces = open_namespaces
        self._file = file
        # The key is random per process, so that the time of a lookup reveals nothing about a token.
        self._secret = secrets.token_bytes(32)
        self._table = Reloaded([] if file is None else [file], self._build, clock)

    def opens(self, namespace: str, token: str) -> bool:
        """Whether a caller with this token may use the namespace. An empty token means none."""
        if self._file is None:
            # No namespace has a token that a time could reveal.
            return self.open_namespaces
        table = self._table.current()
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
        return bool(self.names_of(token))

    def names_of(self, token: str) -> tuple[str, ...]:
        """The namespaces that the token opens."""
        return self._table.current().names.get(self._digest(token), ())

    def has_token(self, namespace: str) -> bool:
        """Whether the namespace has a token."""
        return namespace in self._table.current().by_namespace

    def names(self) -> frozenset[str]:
        """The namespaces that have tokens."""
        return frozenset(self._table.current().by_namespace)

    def _build(self, text: bytes = b"") -> _Table:
        found = parse_tokens(text, self._file)
        by_namespace = {name: tuple(map(self._digest, values)) for name, values in found.items()}
        names: dict[bytes, tuple[str, ...]] = {}
        for name, digests in by_namespace.items():
            for digest in digests:
                names[digest] = (*names.get(digest, ()), name)
        return _Table(by_namespace, names)

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._secret, token.encode(errors="surrogatepass"), hashlib.sha256)


def parse_tokens(text: bytes, file: Path | None) -> dict[str, list[str]]:
    """Tokens by namespace from lines of the form ``namespace=token``. Skips empty lines and lines that begin
    with ``#``. A namespace may have several lines. Raises ConfigurationError, never with a token in it."""
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cannot read {file}: {type(error).__name__}") from None
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, token = line.partition("=")
        if not separator or not token.strip():
            raise ConfigurationError(f"{file}, line {number} is not namespace=token")
        found.setdefault(name.strip(), []).append(token.strip())
    return found
