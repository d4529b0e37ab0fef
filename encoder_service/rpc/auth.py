"""Who may use a namespace over gRPC: bearer tokens in the call's metadata.

Owns where the token is found and what a caller without the right one is answered. Which token opens what is
``tokens``'.

A namespace that does not exist and one whose token the caller lacks are answered alike. UNAUTHENTICATED is
for no token or an unknown one, PERMISSION_DENIED for a token of another namespace.
"""

from __future__ import annotations

from collections.abc import Iterable

from encoder_service.errors import PermissionDenied, Unauthenticated
from encoder_service.ops.tokens import NamespaceTokens

AUTHORIZATION = "authorization"
SCHEME = "bearer"
MAX_TOKEN_BYTES = 4096
# How much of a namespace's name an answer repeats.
SHOWN_CHARS = 64


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The call's token, empty for none. Raises Unauthenticated for several, or another scheme."""
    found = [value for name, value in metadata if name == AUTHORIZATION]
    if not found:
        return ""
    if len(found) > 1:
        raise Unauthenticated(f"the call has {len(found)} authorization entries, 1 is allowed")
    text = found[0]
    scheme, _, token = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if scheme.lower() != SCHEME or not token.strip():
        raise Unauthenticated("authorization is not 'Bearer' and a token")
    if len(token) > MAX_TOKEN_BYTES:
        raise Unauthenticated(f"the token has {len(token)} bytes, at most {MAX_TOKEN_BYTES} are possible")
    return token.strip()


class Access:
    """Decides for calls."""

    def __init__(self, tokens: NamespaceTokens) -> None:
        self._tokens = tokens

    def check_caller(self, token: str) -> None:
        """Before the request is read, and the only check of calls without a namespace: where no namespace is
        open, a caller needs some known token. Raises Unauthenticated."""
        if not (self._tokens.open_namespaces or self._tokens.knows(token)):
            raise unauthenticated(token)

    def check_namespace(self, token: str, namespace: str) -> None:
        """Raises Unauthenticated, PermissionDenied."""
        if self._tokens.is_everything_open() or self._tokens.opens(namespace, token):
            return
        if not self._tokens.knows(token):
            raise unauthenticated(token)
        raise PermissionDenied(f"namespace {namespace[:SHOWN_CHARS]!r}: the token does not open it")


def unauthenticated(token: str) -> Unauthenticated:
    if token:
        return Unauthenticated("the token opens nothing here")
    return Unauthenticated("the call needs a token that opens its namespace: authorization: Bearer <token>")
