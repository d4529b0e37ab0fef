"""Calls without gRPC as bytes: what a client sends, and what it is answered with. No I/O.

Owns the frames of ``broker.proto``'s local calls on the client's side, and how a call that failed looks to
whoever knows gRPC's errors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from vision_encoder.v1 import broker_pb2 as pb

__all__ = ["PREAMBLE", "LocalAnswer", "LocalError", "head_of"]

PREAMBLE = b"VELC"
MAX_FRAME_BYTES = 1 << 31
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_HEADER = struct.Struct(">BI")
_ANSWERS = (pb.LOCAL_FRAME_MESSAGE, pb.LOCAL_FRAME_END)
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class LocalError(grpc.RpcError):
    """A call that failed, as gRPC would have it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str | bytes], ...] = ()
    ) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        """Names and values."""
        return self._trailers


def head_of(method: str, metadata: Metadata, timeout_s: float, num_bytes: int) -> bytes:
    """What goes before a request's num_bytes."""
    entries = [
        pb.LocalMetadata(name=name, value=value if isinstance(value, bytes) else value.encode("latin-1"))
        for name, value in metadata
    ]
    call = pb.LocalCall(method=method, metadata=entries, timeout_us=max(1, int(timeout_s * 1e6)))
    head = call.SerializeToString()
    return (
        _HEADER.pack(pb.LOCAL_FRAME_HEAD, len(head)) + head + _HEADER.pack(pb.LOCAL_FRAME_MESSAGE, num_bytes)
    )


class LocalAnswer:
    """What comes back of one call: ``feed`` bytes, take ``message`` until it says None."""

    def __init__(self, *, is_greeted: bool) -> None:
        """is_greeted: it is not the connection's first."""
        self._buffer: bytes | bytearray = b""
        self._at = 0
        """How much of the buffer has been taken."""
        self.is_greeted = is_greeted
        """The encoder has taken the connection."""
        self.trailers: tuple[tuple[str, str | bytes], ...] = ()
        self.has_ended = False
        self.is_empty = True
        """Nothing has come yet."""

    def feed(self, data: bytes) -> None:
        self.is_empty = False
        if self._at == len(self._buffer):
            self._buffer, self._at = data, 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer)
        del self._buffer[: self._at]
        self._buffer += data
        self._at = 0

    def message(self) -> bytes | None:
        """The next message; None when more has to come, or nothing does (``has_ended``). Raises LocalError
        for a call that failed, and for an answer that is none."""
        buffer, at = self._buffer, self._at
        if not self.is_greeted and len(buffer) >= len(PREAMBLE):
            at = self._at = len(PREAMBLE)
            if buffer[:at] != PREAMBLE:
                found = bytes(buffer[:at])
                raise LocalError(grpc.StatusCode.INTERNAL, f"an answer that begins with {found!r} is none")
            self.is_greeted = True
        start = at + _HEADER.size
        if not self.is_greeted or self.has_ended or len(buffer) < start:
            return None
        kind, num_bytes = _HEADER.unpack_from(buffer, at)
        if kind not in _ANSWERS or num_bytes > MAX_FRAME_BYTES:
            raise LocalError(
                grpc.StatusCode.INTERNAL, f"a frame of kind {kind} and {num_bytes} bytes is no answer"
            )
        end = start + num_bytes
        if len(buffer) < end:
            return None
        self._at = end
        payload = buffer[start:end] if isinstance(buffer, bytes) else bytes(memoryview(buffer)[start:end])
        if kind == pb.LOCAL_FRAME_MESSAGE:
            return payload
        self._end(payload)
        return None

    def failed(self, code: grpc.StatusCode, details: str) -> LocalError:
        """The error for a call that came to no end."""
        return LocalError(code, details)

    def cut_off(self, why: str) -> LocalError:
        """The error for a connection that ended before its call did."""
        return self.failed(grpc.StatusCode.UNAVAILABLE, f"the connection to the encoder broke: {why}")

    def _end(self, payload: bytes) -> None:
        num_more = len(self._buffer) - self._at
        if num_more:
            raise LocalError(
                grpc.StatusCode.INTERNAL, f"{num_more} bytes behind the end of a call are no answer"
            )
        try:
            end = pb.LocalCallEnd.FromString(payload)
        except DecodeError:
            text = f"{len(payload)} bytes are no end of a call"
            raise LocalError(grpc.StatusCode.INTERNAL, text) from None
        self.trailers = tuple(
            [
                (each.name, each.value if each.name.endswith("-bin") else each.value.decode("latin-1"))
                for each in end.metadata
            ]
        )
        self.has_ended = True  # whole, and nothing behind it: the connection is good for another call
        if end.status:
            code = _CODES.get(end.status, grpc.StatusCode.UNKNOWN)
            raise LocalError(code, end.details, self.trailers)
