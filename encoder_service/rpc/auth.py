"""Identity and access of gRPC callers: bearer tokens in the call's metadata, and the peer's address.

Owns where the token is found, the errors for a caller without a valid token, and the holder that a caller
counts as in shared limits (``ops.shares``). ``ops.tokens`` decides which token opens which namespace.

A call without a token or with an unknown one fails with UNAUTHENTICATED, a call with a token of another
namespace with PERMISSION_DENIED. The answer is the same whether or not the namespace exists.
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
# Number of characters of a namespace that an error repeats.
SHOWN_CHARS = 64


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The call's token; empty if it has none. Raises Unauthenticated for several tokens or another scheme."""
    entries = [value for name, value in metadata if name == AUTHORIZATION]
    if not entries:
        return ""
    if len(entries) > 1:
        raise Unauthenticated(f"the call has {len(entries)} authorization entries, 1 is allowed")
    text = entries[0]
    scheme, _, token = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if scheme.lower() != SCHEME or not token.strip():
        raise Unauthenticated("authorization is not 'Bearer' and a token")
    if len(token) > MAX_TOKEN_BYTES:
        raise Unauthenticated(f"the token has {len(token)} bytes, at most {MAX_TOKEN_BYTES} are allowed")
    return token.strip()


def check_caller(tokens: NamespaceTokens, token: str) -> tuple[str, ...]:
    """Returns the namespaces that the token opens. This is the check before the request is read, and the only
    one for calls without a namespace. Raises Unauthenticated if the token opens none and no namespace is open
    without a token."""
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
        return Unauthenticated("the token opens no namespace")
    return Unauthenticated("the call needs a token that opens its namespace: authorization: Bearer <token>")


def host_port_of(peer: str) -> str:
    """host:port of a peer, which gRPC writes as ipv4:10.0.0.7:4711 or ipv6:%5Bfd00::7%5D:4711. All peers on
    unix sockets are "unix"."""
    kind, _, address = peer.partition(":")
    return unquote(address) if kind in ("ipv4", "ipv6") else "unix"


def host_of(peer: str) -> str:
    """The host of a peer, without its port."""
    address = host_port_of(peer)
    return address if address == "unix" else address.rpartition(":")[0].strip("[]")


def holder_of_caller(names: tuple[str, ...], host: str) -> Holder:
    """The holder that a caller counts as before its request is read. names: the namespaces that its token
    opens."""
    return (f"token {','.join(names)}",) if names else (f"peer {host}",)


def holder_of_namespace(tokens: NamespaceTokens, host: str, namespace: str) -> Holder:
    """The holder that a call for the namespace counts as. Namespaces without a token count within the share
    of their caller's address, because any caller can make up such names."""
    if tokens.has_token(namespace):
        return (f"namespace {namespace}",)
    return (f"peer {host}", f"namespace {namespace}")
