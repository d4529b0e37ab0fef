"""Who may use a namespace over gRPC: bearer tokens in the call's metadata.

Owns where the token is found and what a caller without the right one is told. Which token opens what is
``tokens``'s.

A namespace that does not exist and one whose token the caller lacks are answered alike. The two codes tell
only what the caller knows: UNAUTHENTICATED is for none, or one that opens nothing here; PERMISSION_DENIED for
one that is good somewhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from encoder_service.errors import PermissionDenied, Unauthenticated
from encoder_service.tokens import NamespaceTokens

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
        """What can be said before the request is read, and all there is for calls without a namespace: where
        nothing is open, a caller has to have some token of ours. Raises Unauthenticated."""
        if self._tokens.open_namespaces or self._tokens.knows(token):
            return
        raise no_token() if not token else unknown_token()

    def check_namespace(self, token: str, namespace: str) -> None:
        """Raises Unauthenticated, PermissionDenied."""
        if self._tokens.is_everything_open():
            return
        if self._tokens.opens(namespace, token):
            return
        if not token:
            raise no_token()
        if not self._tokens.knows(token):
            raise unknown_token()
        raise PermissionDenied(f"namespace {namespace[:SHOWN_CHARS]!r}: the token does not open it")


def no_token() -> Unauthenticated:
    return Unauthenticated("the call needs a token that opens its namespace: authorization: Bearer <token>")


def unknown_token() -> Unauthenticated:
    return Unauthenticated("the token opens nothing here")
