"""Brokers on sockets of their own, and a client that sends any bytes."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness.waiting import PATIENCE_S
from encoder_service.broker import Broker, BrokerLimits, BrokerOptions
from encoder_service.store.arena import Arena
from encoder_service.store.host_memory import HostMemory
from vision_encoder.layout import LAYOUT_VERSION
from vision_encoder.layout.frames import FrameReader, encode_frame
from vision_encoder.v1 import broker_pb2 as pb


def num_descriptors(pid: int | str = "self") -> int:
    gc.collect()  # cancelled tasks refer to their broker, and it to its arenas
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="ve-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def small_arena() -> Iterator[Arena]:
    arena = Arena(HostMemory(1 << 16), max_slots=8)
    yield arena
    arena.close()


@contextlib.contextmanager
def running_broker(
    *arenas: tuple[str | None, Arena],
    path: str | None = None,
    opens: Callable[[str, str], bool] = lambda namespace, token: True,
    limits: BrokerLimits | None = None,
    allowed_uids: frozenset[int] | None = None,
) -> Iterator[Broker]:
    """Starts one and stops it."""
    with contextlib.ExitStack() as stack:
        if path is None:
            path = str(stack.enter_context(socket_folder()) / "broker.sock")
        options = BrokerOptions(
            path, "one", "host-1", allowed_uids=allowed_uids, limits=limits or BrokerLimits()
        )
        broker = Broker(options, arenas, opens)
        broker.start()
        try:
            yield broker
            assert broker.is_serving()
        finally:
            assert broker.stop()
        assert broker.num_connections == 0
        assert not os.path.exists(path)


def hello(**given: object) -> pb.BrokerHello:
    fields = {"protocol_version": 1, "min_protocol_version": 1, "layout_version": LAYOUT_VERSION, **given}
    return pb.BrokerHello(**fields)  # type: ignore[arg-type]


class RawClient:
    """Speaks to a broker byte by byte."""

    def __init__(self, path: str, *, greet: bool = True, namespace: str = "", token: str = "") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.descriptors: list[int] = []
        self._request_id = 0
        self._reader = FrameReader()
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

    def attach_frame(self, arena_id: bytes, layout_version: int = LAYOUT_VERSION) -> bytes:
        return self.frame(attach=pb.BrokerAttach(arena_id=arena_id, layout_version=layout_version))

    def ask(self, **request: object) -> pb.BrokerReply:
        self.socket.sendall(self.frame(**request))
        reply = self.reply()
        assert reply is not None
        assert reply.request_id == self._request_id
        return reply

    def attach(self, arena_id: bytes, layout_version: int = LAYOUT_VERSION) -> pb.BrokerReply:
        return self.ask(attach=pb.BrokerAttach(arena_id=arena_id, layout_version=layout_version))

    def reply(self) -> pb.BrokerReply | None:
        """The next reply; None at the end of the stream. Its descriptors are in ``descriptors``."""
        while (payload := self._reader.next_payload()) is None:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(65536, 1024)
            except ConnectionResetError:
                return None
            for _, _, content in ancillary:
                self.descriptors.extend(array.array("i", content))
            if not data:
                return None
            self._reader.feed(data)
        return pb.BrokerReply.FromString(payload)

    def ended(self) -> bool:
        """Whether the broker ends the connection without another reply."""
        return self.reply() is None
