"""Who may connect to the broker: protocol versions, user ids, tokens.

Owns the decision on a Hello and the words of a refusal. The kernel says who the peer is (SO_PEERCRED); what
a client says of itself is only logged.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vision_encoder.v1 import broker_pb2 as pb

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_NAME_CHARS = 128

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """As the kernel saw the peer at its connect. pid is 0 when the peer's is not visible from here."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Raises OSError for a socket that is not connected."""
    return PeerCredentials(
        *_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a client is not let in. reason is stable."""

    reason: str
    message: str
    retryable: bool = False


@dataclass(frozen=True)
class BrokerAccess:
    """tokens: namespace to the token that opens it. open_namespaces: a namespace without a token of its own
    is open to everyone who reaches the socket. allowed_uids: None means any. opens: decides on namespace and
    token in place of the first two, for tokens that change."""

    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    open_namespaces: bool = False
    allowed_uids: frozenset[int] | None = None
    opens: Callable[[str, str], bool] | None = field(default=None, repr=False)

    def refuse_peer(self, peer: PeerCredentials) -> Refusal | None:
        """What the kernel's word alone decides, before anything is read."""
        if self.allowed_uids is None or peer.uid in self.allowed_uids:
            return None
        allowed = ", ".join(str(uid) for uid in sorted(self.allowed_uids)) or "none"
        return Refusal("UID_NOT_ALLOWED", f"user id {peer.uid} may not connect, allowed: {allowed}")

    def refuse_hello(self, hello: pb.BrokerHello) -> Refusal | None:
        """The version is looked at first: without a common one nothing else has a meaning."""
        if hello.protocol_version < MIN_PROTOCOL_VERSION or hello.min_protocol_version > PROTOCOL_VERSION:
            return Refusal(
                "PROTOCOL_MISMATCH",
                f"the client speaks versions {hello.min_protocol_version} to {hello.protocol_version}, "
                f"the broker {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        for name in ("namespace", "client_name"):
            found = len(getattr(hello, name))
            if found > MAX_NAME_CHARS:
                return Refusal(
                    "INVALID_REQUEST", f"{name} has {found} characters, at most {MAX_NAME_CHARS} are allowed"
                )
        if not self.lets_in(hello.namespace, hello.token):
            # The same for a namespace that is not there and for a wrong token.
            return Refusal("UNAUTHENTICATED", f"namespace {hello.namespace!r}: the token does not open it")
        return None

    def lets_in(self, namespace: str, token: str) -> bool:
        """Whether the token opens the namespace now."""
        if self.opens is not None:
            return self.opens(namespace, token)
        expected = self.tokens.get(namespace)
        # Digests are equal in length; the comparison is made also where there is nothing to compare with, so
        # that its time tells nothing.
        equal = hmac.compare_digest(_digest(token), _digest("" if expected is None else expected))
        return self.open_namespaces if expected is None else equal


def common_version(hello: pb.BrokerHello) -> int:
    return min(PROTOCOL_VERSION, hello.protocol_version)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
