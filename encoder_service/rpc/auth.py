"""Who may use a namespace over gRPC: bearer tokens in the call's metadata.

Owns where the token is found and how a caller without a valid token is answered. ``ops.tokens`` decides which
token opens which namespace.

An unknown namespace and a namespace whose token the caller lacks get the same answer. A call without a token
or with an unknown one fails with UNAUTHENTICATED, a call with a token of another namespace with
PERMISSION_DENIED.
"""

from __future__ import annotations

from collections.abc import Iterable

from encoder_service.errors import PermissionDenied, Unauthenticated
from encoder_service.ops.tokens import NamespaceTokens

AUTHORIZATION = "authorization"
SCHEME = "bearer"
MAX_TOKEN_BYTES = 4096
# How many characters of a namespace's name an answer repeats.
SHOWN_CHARS = 64


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The call's token; empty if it has none. Raises Unauthenticated for several tokens or another scheme."""
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


def check_caller(tokens: NamespaceTokens, token: str) -> None:
    """Checks the token before the request is read. For calls without a namespace it is the only check. If no
    namespace is open, the caller needs a known token. Raises Unauthenticated."""
    if not (tokens.open_namespaces or tokens.knows(token)):
        raise unauthenticated(token)


def check_namespace(tokens: NamespaceTokens, token: str, namespace: str) -> None:
    """Checks that the token opens the namespace. Raises Unauthenticated, PermissionDenied."""
    if tokens.opens(namespace, token):
        return
    if not tokens.knows(token):
        raise unauthenticated(token)
    raise PermissionDenied(f"namespace {namespace[:SHOWN_CHARS]!r}: the token does not open it")


def unauthenticated(token: str) -> Unauthenticated:
    if token:
        return Unauthenticated("the token opens nothing here")
    return Unauthenticated("the call needs a token that opens its namespace: authorization: Bearer <token>")
