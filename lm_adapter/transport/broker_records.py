"""What the broker tells a client, as records: its session, arenas, descriptors, probes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from lm_adapter.transport.broker_errors import BrokerViolation
from lm_adapter.transport.broker_frames import close_descriptors
from vision_encoder.v1 import broker_pb2 as pb

__all__ = [
    "ArenaGeometry",
    "Attachment",
    "BrokerSession",
    "ProbeSlot",
    "geometry_of",
    "known_arenas",
    "path_beside",
]

_KINDS: dict[int, Literal["host", "device"]] = {pb.ARENA_KIND_HOST: "host", pb.ARENA_KIND_DEVICE: "device"}


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """What the broker says of an arena. page_bytes: of its control page. device_uuid: empty on the host.
    directory_bytes: 0 where there is no directory."""

    arena_id: bytes
    kind: Literal["host", "device"]
    size_bytes: int
    page_bytes: int
    device_uuid: str
    directory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProbeSlot:
    """A stretch of an arena whose content never changes; a client that reads it right can read the arena."""

    arena_id: bytes
    offset_bytes: int
    num_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class BrokerSession:
    """One connection's life. owner_id names it in gRPC requests. number counts this client's sessions from 1;
    restarted: the encoder is another process than in the session before. calls_path: of the socket that takes
    calls without gRPC, as this process sees it; empty for none."""

    instance_id: str
    host_id: str
    owner_id: str
    protocol_version: int
    arenas: tuple[ArenaGeometry, ...]
    number: int
    restarted: bool
    calls_path: str = ""


@dataclass(eq=False)
class Attachment:
    """Descriptors of an arena, this object's to close. A mapping made of them outlives them. directory_fd: -1
    without a directory."""

    geometry: ArenaGeometry
    data_fd: int
    page_fd: int
    directory_fd: int = -1

    def close(self) -> None:
        """Twice is once."""
        descriptors = [fd for fd in (self.data_fd, self.page_fd, self.directory_fd) if fd >= 0]
        self.data_fd = self.page_fd = self.directory_fd = -1
        close_descriptors(descriptors)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def path_beside(broker_path: str, name: str) -> str:
    """Of the socket with this name in the broker's folder; empty for none, and for what is no name."""
    return os.path.join(os.path.dirname(broker_path), name) if name and "/" not in name else ""


def geometry_of(message: pb.ArenaGeometry) -> ArenaGeometry:
    """Raises BrokerViolation for a kind of memory that this side does not know."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise BrokerViolation(f"arena {message.arena_id.hex()} is of the unknown kind {message.kind}")
    return ArenaGeometry(
        arena_id=message.arena_id,
        kind=kind,
        size_bytes=message.size_bytes,
        page_bytes=message.page_bytes,
        device_uuid=message.device_uuid,
        directory_bytes=message.directory_bytes,
    )


def known_arenas(messages: Iterable[pb.ArenaGeometry]) -> tuple[ArenaGeometry, ...]:
    """Those of a kind that this side knows; a later broker may have others."""
    return tuple(geometry_of(message) for message in messages if message.kind in _KINDS)
