"""Can this process read what the encoder shares? Asked before the first row comes that way.

Owns the checks of one way of delivery, from the server's announcement to a test read with a checksum. What
follows from the answers is ``chooser``'s.
"""

from __future__ import annotations

from pathlib import Path

from lm_adapter.errors import EncoderError
from lm_adapter.transport.arenas import AttachedArena
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.broker_records import ArenaGeometry, BrokerSession
from lm_adapter.types import ServerInfo, TransportInfo

__all__ = ["DELIVERIES", "NotPossible", "announced", "arenas_of", "check_all", "check_instance", "host_id"]

DELIVERIES = {"host": "host_shm", "device": "device_lease"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NotPossible(EncoderError):
    """Rows cannot come in this way, and why."""

    default_reason = "NOT_POSSIBLE"


def host_id() -> str:
    """What tells one running kernel from every other, containers of one host alike; empty where it is not
    to be had."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def announced(info: ServerInfo, name: str) -> TransportInfo:
    """The server's announcement of a way of delivery, on this host. Raises NotPossible."""
    found = next((each for each in info.transports if each.delivery == DELIVERIES[name]), None)
    if found is None:
        raise NotPossible("the server does not offer it")
    ours = host_id()
    if found.host_id != ours:
        raise NotPossible(f"the server is on host {found.host_id!r}, this process on {ours!r}")
    return found


def check_instance(info: ServerInfo, session: BrokerSession) -> None:
    """The socket and the gRPC address lead to one process. Raises NotPossible."""
    if session.instance_id != info.instance_id:
        raise NotPossible(
            f"the broker belongs to instance {session.instance_id!r}, the server is {info.instance_id!r}",
            reason="OTHER_INSTANCE",
            retryable=True,
        )


def arenas_of(broker: BrokerClient, name: str) -> list[ArenaGeometry]:
    """The arenas of this kind that the broker hands out. Raises BrokerError, NotPossible for none."""
    found = [each for each in broker.list_arenas() if each.kind == name]
    if not found:
        raise NotPossible(f"the broker has no {name} arena for this namespace", retryable=True)
    return found


def check_all(arenas: list[AttachedArena]) -> str:
    """Reads every arena's probe. What was found, for the log. Raises MappingFailed."""
    for arena in arenas:
        arena.check_probe()
    num_bytes = sum(arena.size_bytes for arena in arenas)
    return f"{len(arenas)} arenas of {num_bytes} bytes in all are mapped and read right"
