"""An encoder in the test's own process: the fake service, an arena of the real one, and a broker that can
misbehave."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch

from encoder_service.store import arena
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import EncodedItem, Grid
from lm_adapter.testing import FakeEncoder
from vision_encoder.layout import LAYOUT_VERSION, control_page, directory
from vision_encoder.layout.frames import FrameReader, encode_frame
from vision_encoder.layout.host import host_id
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

NAMESPACE = "tests"


class Arena(arena.Arena):
    """Of eight slots, in host memory. ``fds``: its descriptors. ``write`` publishes rows as the service does,
    in place of the oldest ones when all slots are in use."""

    def __init__(self, *, version: int = LAYOUT_VERSION) -> None:
        with (
            mock.patch.object(control_page, "LAYOUT_VERSION", version),
            mock.patch.object(directory, "LAYOUT_VERSION", version),
        ):
            super().__init__(HostMemory(1 << 20), max_slots=8)
        self.fds = list(self.export_all())
        self._written: deque[arena.Slot] = deque()
        self._lock = threading.Lock()

    @property
    def data(self) -> torch.Tensor:
        return self._memory.tensor

    # A writer that damages its own pages: nothing public does that.

    @property
    def words(self) -> memoryview:
        """Of the control page."""
        return self.page._words

    @property
    def directory_bytes(self) -> mmap.mmap:
        return self.directory._file.mapping

    def write(self, result: pb.ItemResult, rows: bytes, *, listed: bool = True) -> pb.RowsPlace:
        with self._lock:
            return self._write(result, rows, listed)

    def lose_newest(self) -> None:
        """Frees the slot that was written last, and overwrites it."""
        slot = self._written.pop()
        self.drop(slot)
        self.data[slot.offset_bytes] ^= 0xFF

    def _write(self, result: pb.ItemResult, rows: bytes, listed: bool) -> pb.RowsPlace:
        if len(self._written) == self.num_slots:
            self.drop(self._written.popleft())
        slot = self.allocate(len(rows))
        assert slot is not None
        self._written.append(slot)
        source = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
        self.view(slot, source.shape, torch.uint8).copy_(source)
        generation = self.publish(slot)
        if listed:
            grid, dtype = result.grid_thw, pb.DType.Name(result.dtype).removeprefix("DTYPE_").lower()
            shaped = torch.empty(result.num_rows, result.width, dtype=getattr(torch, dtype), device="meta")
            item = EncodedItem(
                result.key,
                result.content_digest,
                Grid(grid.t, grid.h, grid.w),
                shaped,
                result.num_deepstack_levels,
            )
            self.index(slot, NAMESPACE, item)
        return pb.RowsPlace(
            arena_id=self.arena_id,
            instance=self.instance,
            slot_index=slot.index,
            generation=generation,
            offset_bytes=slot.offset_bytes,
            delivery=pb.DELIVERY_HOST,
        )

    def geometry(self) -> broker_pb2.ArenaGeometry:
        return broker_pb2.ArenaGeometry(
            arena_id=self.arena_id,
            kind=broker_pb2.ARENA_KIND_HOST,
            size_bytes=self.size_bytes,
            page_bytes=self.page.size_bytes,
            directory_bytes=self.directory.size_bytes,
        )

    def close(self) -> None:
        super().close()
        for fd in self.fds:
            os.close(fd)


class Broker:
    """Answers hello, attach and probe for one arena. ``refusal`` answers every hello instead."""

    def __init__(self, path: Path, arena: Arena, instance_id: str) -> None:
        self.path = path
        self.arena = arena
        self.instance_id = instance_id
        self.layout_version = LAYOUT_VERSION
        self.refusal: broker_pb2.BrokerRefused | None = None
        self.tokens: list[str] = []
        """Of each hello."""
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """Ends every connection, as an encoder that was killed does."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader()
        try:
            while data := connection.recv(65536):
                reader.feed(data)
                while (payload := reader.next_payload()) is not None:
                    request = broker_pb2.BrokerRequest.FromString(payload)
                    reply, fds = self._answer(request)
                    reply.request_id, reply.num_descriptors = request.request_id, len(fds)
                    socket.send_fds(connection, [encode_frame(reply.SerializeToString())], fds)
        except OSError:
            return

    def _answer(self, request: broker_pb2.BrokerRequest) -> tuple[broker_pb2.BrokerReply, Sequence[int]]:
        arena = self.arena
        match request.WhichOneof("request"):
            case "hello":
                self.tokens.append(request.hello.token)
                if self.refusal is not None:
                    return broker_pb2.BrokerReply(refused=self.refusal), ()
                welcome = broker_pb2.BrokerWelcome(
                    protocol_version=1,
                    instance_id=self.instance_id,
                    host_id=host_id(),
                    arenas=[arena.geometry()],
                    layout_version=self.layout_version,
                )
                return broker_pb2.BrokerReply(welcome=welcome), ()
            case "attach":
                attached = broker_pb2.BrokerAttached(geometry=arena.geometry())
                return broker_pb2.BrokerReply(attached=attached), arena.fds
            case _:
                probe = broker_pb2.BrokerProbeSlot(arena_id=arena.arena_id, **arena.probe._asdict())
                return broker_pb2.BrokerReply(probe_slot=probe), ()


class Encoder:
    """The fake service with an arena and a broker. Rows go to the arena as long as ``places`` is set."""

    def __init__(self, folder: Path, *, version: int = LAYOUT_VERSION) -> None:
        self.arena = Arena(version=version)
        self.fake = FakeEncoder()
        self.broker = Broker(folder / "broker.sock", self.arena, self.fake.instance_id)
        self.fake.script.transports = [
            pb.TransportInfo(delivery=pb.DELIVERY_HOST, broker_path=str(self.broker.path), host_id=host_id())
        ]
        self.fake.script.place = self.place
        self.places = True
        self.listed = True
        self.lose_next = 0
        """As many of the next placed rows are overwritten before their answer is sent."""

    def place(self, request: Any, result: pb.ItemResult, rows: bytes) -> None:
        if not self.places or request.after_lost_read:
            return
        result.place.CopyFrom(self.arena.write(result, rows, listed=self.listed))
        if self.lose_next:
            self.lose_next -= 1
            self.arena.lose_newest()

    def requests(self, method: str) -> list[Any]:
        return [call.request for call in self.fake.calls if call.method == method]

    def __enter__(self) -> Self:
        self.fake.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.fake.stop()
        self.broker.stop()
        self.arena.close()
