"""Brokers on sockets of their own, arenas of plain memfds, and a client that sends whatever a test wants."""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from encoder_service.transport.access import BrokerAccess
from encoder_service.transport.broker import Broker
from encoder_service.transport.broker_options import BrokerOptions, ConnectionLimits
from encoder_service.transport.framing import encode_frame
from encoder_service.transport.offers import ArenaOffer, OfferBook, ProbeSlot
from encoder_service.transport.pixel_book import SegmentBook
from vision_encoder.v1 import broker_pb2 as pb

OPEN = BrokerAccess(open_namespaces=True)
PATIENCE_S = 20.0


def wait_until(condition: Callable[[], bool], what: str = "it") -> None:
    """Fails when the condition does not come true."""
    ends_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_s, f"{what} did not happen within {PATIENCE_S:g} s"
        time.sleep(0.005)


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="ve-") as folder:
        yield Path(folder)


@dataclass
class Rig:
    """A running broker and what it has reported."""

    broker: Broker
    path: str
    gone: list[str] = field(default_factory=list)

    def offer(
        self, content: bytes, *, namespace: str | None = None, arena_id: bytes | None = None, probe: int = 16
    ) -> bytes:
        """An arena of host memory with this content; its control page holds b"page" and its id."""
        arena_id = os.urandom(16) if arena_id is None else arena_id
        page = b"page" + arena_id
        data_fd, page_fd = os.memfd_create("arena"), os.memfd_create("page")
        try:
            os.write(data_fd, content)
            os.write(page_fd, page)
            probe = min(probe, len(content))
            slot = ProbeSlot(0, probe, hashlib.sha256(content[:probe]).digest()) if probe else None
            offer = ArenaOffer(arena_id, "host", len(content), len(page), probe=slot)
            self.broker.offer(offer, data_fd, page_fd, namespace)
        finally:
            os.close(data_fd)
            os.close(page_fd)
        return arena_id


@contextlib.contextmanager
def running_broker(
    path: str | None = None,
    *,
    access: BrokerAccess = OPEN,
    limits: ConnectionLimits | None = None,
    isolated: tuple[str, ...] = (),
    instance_id: str = "one",
    segments: SegmentBook | None = None,
    **options: object,
) -> Iterator[Rig]:
    """Starts one and stops it; no descriptor of its own may be left afterwards."""
    with contextlib.ExitStack() as stack:
        if path is None:
            path = str(stack.enter_context(socket_folder()) / "broker.sock")
        gone: list[str] = []
        broker = Broker(
            BrokerOptions(
                path,
                instance_id,
                "host-1",
                access=access,
                limits=ConnectionLimits() if limits is None else limits,
                **options,  # type: ignore[arg-type]
            ),
            OfferBook(isolated),
            on_disconnect=gone.append,
        )
        if segments is not None:
            broker.take_segments(segments)
        broker.start()
        try:
            yield Rig(broker, path, gone)
        finally:
            assert broker.stop()
            assert broker.failure is None
            assert broker.num_connections == 0


class RawClient:
    """Speaks to a broker byte by byte."""

    def __init__(self, path: str, *, greet: bool = True, namespace: str = "", token: str = "") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.descriptors: list[int] = []
        self._request_id = 0
        self._buffer = b""
        try:
            self.socket.connect(path)
            if greet:
                self.welcome = self.ask(hello=hello(namespace=namespace, token=token)).welcome
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def frame(self, **request: object) -> bytes:
        self._request_id += 1
        message = pb.BrokerRequest(request_id=self._request_id, **request)  # type: ignore[arg-type]
        return encode_frame(message.SerializeToString())

    def ask(self, **request: object) -> pb.BrokerReply:
        self.socket.sendall(self.frame(**request))
        reply = self.reply()
        assert reply is not None
        assert reply.request_id == self._request_id
        return reply

    def reply(self) -> pb.BrokerReply | None:
        """The next reply; None at the end of the stream. Its descriptors are in ``descriptors``."""
        while True:
            if len(self._buffer) >= 8:
                (num_bytes,) = struct.unpack(">I", self._buffer[4:8])
                if len(self._buffer) >= 8 + num_bytes:
                    payload = self._buffer[8 : 8 + num_bytes]
                    self._buffer = self._buffer[8 + num_bytes :]
                    return pb.BrokerReply.FromString(payload)
            try:
                data, ancillary, _, _ = self.socket.recvmsg(65536, 1024)
            except ConnectionResetError:
                return None
            for _, _, content in ancillary:
                self.descriptors.extend(array.array("i", content))
            if not data:
                return None
            self._buffer += data

    def ended(self) -> bool:
        """Whether the broker ends the connection without another reply."""
        return self.reply() is None


def hello(**given: object) -> pb.BrokerHello:
    return pb.BrokerHello(**{"protocol_version": 1, "min_protocol_version": 1, **given})  # type: ignore[arg-type]
