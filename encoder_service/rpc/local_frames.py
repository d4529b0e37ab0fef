"""Calls without gRPC as bytes: what the service reads of a call's head and what it says at its end. No I/O.

Owns the frames of ``broker.proto``'s local calls on the service's side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

import grpc
import structlog

from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

PREAMBLE = b"VELC"
HEADER = struct.Struct(">BI")


def metadata_of(entries: Iterable[pb.LocalMetadata]) -> Metadata:
    """As gRPC gives it: bytes for names that end in ``-bin``, else text."""
    return tuple(
        (each.name, each.value if each.name.endswith("-bin") else each.value.decode("latin-1"))
        for each in entries
    )


def entry_of(name: str, value: str | bytes) -> pb.LocalMetadata:
    """The same on its way out."""
    return pb.LocalMetadata(name=name, value=value if isinstance(value, bytes) else value.encode("latin-1"))


def end_of(status: grpc.StatusCode, details: str, trailers: Metadata) -> bytes:
    """How a call ended, as it travels; INTERNAL where what a handler said of it cannot."""
    code: int = status.value[0]
    try:
        end = pb.LocalCallEnd(status=code, details=details)
        end.metadata.extend(entry_of(name, value) for name, value in trailers)
    except (TypeError, ValueError) as error:  # text that UTF-8, or latin-1, does not have
        log.exception("the end of a call cannot be told", status=status.name)
        code = grpc.StatusCode.INTERNAL.value[0]
        end = pb.LocalCallEnd(status=code, details=f"no more than {status.name} can be told: {error}")
    return end.SerializeToString()
