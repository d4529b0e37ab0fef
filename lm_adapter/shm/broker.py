"""The client side of the broker's socket: hello, attach, probe, and waiting for the end of the connection.

Owns one connection. Requests are sent one at a time, from one thread. ``vision_encoder.layout.frames`` owns
the framing, ``broker.proto`` the messages."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError

from lm_adapter.errors import BrokerError
from vision_encoder.layout import LAYOUT_VERSION
from vision_encoder.layout.frames import FrameError, FrameReader, encode_frame
from vision_encoder.v1 import broker_pb2 as pb

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_PATH_BYTES = 107
NUM_ATTACH_DESCRIPTORS = 3
_RECEIVE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 16


class Attachment(NamedTuple):
    """An arena's geometry and file descriptors, which are closed when the ``attach`` block exits."""

    geometry: pb.ArenaGeometry
    data_fd: int
    page_fd: int
    directory_fd: int


class BrokerConnection:
    """An accepted connection. ``welcome`` lists the arenas that the namespace may read."""

    def __init__(self, path: str, *, namespace: str, token: str, timeout_s: float) -> None:
        """timeout_s: for connecting and for each request. Raises BrokerError, with reason LAYOUT_MISMATCH if
        this version cannot read the encoder's shared memory."""
        self._path = path
        self._reader = FrameReader()
        self._num_requests = 0
        num_bytes = len(os.fsencode(path))
        if num_bytes > MAX_PATH_BYTES:
            raise self._error(
                f"the path has {num_bytes} bytes, a unix socket has at most {MAX_PATH_BYTES}", retryable=False
            )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._connect()
            hello = pb.BrokerHello(
                protocol_version=PROTOCOL_VERSION,
                min_protocol_version=MIN_PROTOCOL_VERSION,
                namespace=namespace,
                token=token,
                client_name=f"lm_adapter pid {os.getpid()}",
                layout_version=LAYOUT_VERSION,
            )
            reply, _ = self._ask(pb.BrokerRequest(hello=hello), "welcome")
            self.welcome = reply.welcome
            if self.welcome.layout_version != LAYOUT_VERSION:
                raise self._error(
                    f"the encoder's layout version is {self.welcome.layout_version}, this side reads "
                    f"{LAYOUT_VERSION}",
                    reason="LAYOUT_MISMATCH",
                    retryable=False,
                )
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def attach(self, arena_id: bytes) -> Iterator[Attachment]:
        """Requests the descriptors of an arena. Raises BrokerError."""
        request = pb.BrokerAttach(arena_id=arena_id, layout_version=LAYOUT_VERSION)
        reply, descriptors = self._ask(
            pb.BrokerRequest(attach=request), "attached", num_descriptors=NUM_ATTACH_DESCRIPTORS
        )
        try:
            yield Attachment(reply.attached.geometry, *descriptors)
        finally:
            _close_all(descriptors)

    def probe(self, arena_id: bytes) -> pb.BrokerProbeSlot:
        """Requests a range of the arena with constant content, and its SHA-256. Raises BrokerError."""
        request = pb.BrokerRequest(probe=pb.BrokerProbe(arena_id=arena_id))
        reply, _ = self._ask(request, "probe_slot")
        return reply.probe_slot

    def wait_end(self) -> None:
        """Blocks until either side closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(None)
            while self._socket.recv(_RECEIVE_BYTES):
                pass

    def close(self) -> None:
        """Ends ``wait_end`` and requests in progress. Thread-safe; can be repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _connect(self) -> None:
        try:
            self._socket.connect(self._path)
        except OSError as error:
            reason = "PERMISSION_DENIED" if isinstance(error, PermissionError) else None
            raise self._error(
                f"cannot connect: {error.strerror or error}", reason=reason, retryable=reason is None
            ) from error

    def _ask(
        self, request: pb.BrokerRequest, kind: str, *, num_descriptors: int = 0
    ) -> tuple[pb.BrokerReply, list[int]]:
        """Sends a request and returns a reply of this kind and its descriptors, which the caller closes."""
        self._num_requests += 1
        request.request_id = self._num_requests
        descriptors: list[int] = []
        try:
            # A broker that refuses may close before it reads the request. Its reply can still be received.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(encode_frame(request.SerializeToString()))
            while (payload := self._reader.next_payload()) is None:
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += fds
                if not data:
                    raise self._error("the broker closed the connection")
                self._reader.feed(data)
            reply = pb.BrokerReply.FromString(payload)
            found_kind = reply.WhichOneof("reply")
            if found_kind == "refused" or found_kind == "failure":
                failure = reply.refused if found_kind == "refused" else reply.failure
                raise self._error(failure.message, reason=failure.reason, retryable=failure.retryable)
            found = (found_kind, reply.request_id, reply.num_descriptors, len(descriptors))
            expected = (kind, self._num_requests, num_descriptors, num_descriptors)
            if found != expected:
                raise self._error(
                    f"the reply (kind, request_id, num_descriptors, descriptors) is {found}, expected "
                    f"{expected}"
                )
        except BaseException as error:
            _close_all(descriptors)
            if isinstance(error, OSError | FrameError | DecodeError):
                raise self._error(f"{type(error).__name__}: {error}") from error
            raise
        return reply, descriptors

    def _error(self, message: str, *, reason: str | None = None, retryable: bool = True) -> BrokerError:
        return BrokerError(f"{self._path}: {message}", reason=reason or None, retryable=retryable)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
