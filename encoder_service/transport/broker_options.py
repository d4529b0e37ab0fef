"""How one broker behaves and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from encoder_service.transport.access import BrokerAccess


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client is allowed. Times in seconds."""

    handshake_s: float = 5.0
    """From the connect to the whole Hello."""
    frame_s: float = 5.0
    """From a frame's first byte to its last."""
    send_s: float = 5.0
    """A client that takes nothing of what waits for it for this long does not read."""
    idle_s: float = 30.0
    """A client that is silent for this long is taken for dead."""
    unsent_bytes: int = 256 * 1024
    """In frames that the kernel has not taken yet."""
    unread_descriptors: int = 32
    """Sent, and lying in the client's socket still: the kernel bounds these for all connections together."""
    requests_per_s: float = 256.0
    request_burst: int = 64
    """Of requests a second; those for rows and leases that are taken do not count: what bounds them is how
    many are under way, or wait."""
    requests_under_way: int = 128
    """For rows and renewals: taken, and not answered by the event loop yet."""
    gathered_bytes: int = 1 << 20
    """Of releases and uses that wait for the event loop. They are never refused: nothing more is read of a
    connection that has more, until the loop has taken them."""


@dataclass(frozen=True)
class BrokerOptions:
    """How one broker behaves. instance_id is the one that GetServerInfo tells; mode and gid are the socket
    file's. calls_name: of the socket beside it that takes calls without gRPC; empty for none."""

    path: str
    instance_id: str
    host_id: str
    access: BrokerAccess = field(default_factory=BrokerAccess)
    mode: int = 0o660
    gid: int | None = None
    backlog: int = 1024
    heartbeat_s: float = 5.0
    max_connections: int = 512
    max_connections_per_namespace: int = 256
    calls_name: str = ""
    max_pending: int = 128
    """Connections before their Hello; one more ends the oldest of them."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


@dataclass
class BrokerCounters:
    """Read by metrics at any time; written by the broker's thread, those of rows by the loop's."""

    accepted: int = 0
    welcomed: int = 0
    attaches: int = 0
    descriptors_sent: int = 0
    accept_failures: int = 0
    fetched: int = 0
    """Items delivered by lease over the socket."""
    fetch_misses: int = 0
    """Keys asked for that were not to be had there."""
    read_unasked: int = 0
    """Items that clients read by a directory, as they say."""
    read_stale: int = 0
    """Such reads that found the rows gone, and were thrown away."""
    refused: Counter[str] = field(default_factory=Counter)
    """Connections, by reason."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that failed alone, by reason."""
    closed: Counter[str] = field(default_factory=Counter)
    """Connections that ended, by cause."""
