"""Who calls over gRPC, and who may use a namespace: bearer tokens in the call's metadata, the peer's address.

Owns where the token is found, how a caller without a valid token is answered, and under which name a caller
shares the limits (``ops.shares``). ``ops.tokens`` decides which token opens which namespace.

An unknown namespace and a namespace whose token the caller lacks get the same answer. A call without a token
or with an unknown one fails with UNAUTHENTICATED, a call with a token of another namespace with
PERMISSION_DENIED.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from encoder_service.errors import PermissionDenied, Unauthenticated
from encoder_service.ops.shares import Holder
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


def check_caller(tokens: NamespaceTokens, token: str) -> tuple[str, ...]:
    """Checks the token before the request is read, and returns the namespaces that it opens. For calls
    without a namespace it is the only check. If no namespace is open, the caller needs a known token. Raises
    Unauthenticated."""
    names = tokens.names_of(token) if token else ()
    if not (names or tokens.open_namespaces):
        raise unauthenticated(token)
    return names


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


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it: ipv4:10.0.0.7:4711, ipv6:%5Bfd00::7%5D:4711. Peers on unix sockets
    are one host, "unix"."""
    kind, _, address = peer.partition(":")
    return unquote(address).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else "unix"


def holder_of_caller(names: tuple[str, ...], host: str) -> Holder:
    """Under which name a caller shares limits before its request is read. names: the namespaces that its
    token opens."""
    return (f"token {','.join(names)}",) if names else (f"peer {host}",)


def holder_of_namespace(tokens: NamespaceTokens, host: str, namespace: str) -> Holder:
    """Under which name a call for the namespace shares limits. Namespaces without a token share what their
    caller's address may take, since any caller can make up such names."""
    if tokens.has_token(namespace):
        return (f"namespace {namespace}",)
    return (f"peer {host}", f"namespace {namespace}")
