"""A host arena and a broker in the test's own process, written with the shared layouts alone."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from lm_adapter.shm.attachment import host_id
from lm_adapter.testing import FakeEncoder
from vision_encoder.layout import LAYOUT_VERSION, control_page, directory
from vision_encoder.layout.frames import FrameReader, encode_frame
from vision_encoder.v1 import broker_pb2
from vision_encoder.v1 import encoder_pb2 as pb

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PROBE = bytes(range(64))
NAMESPACE = "tests"


def memfd(name: str, size_bytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Arena:
    """Slots of equal size, behind a probe. ``write`` publishes rows as the protocol says."""

    def __init__(
        self, *, num_slots: int = 8, slot_bytes: int = 1 << 16, version: int = LAYOUT_VERSION
    ) -> None:
        self.arena_id, self.instance = secrets.token_bytes(16), secrets.randbits(63)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.size_bytes = mmap.PAGESIZE + num_slots * slot_bytes
        self.page_bytes = control_page.page_bytes(num_slots)
        self.directory_bytes = directory.directory_bytes(num_slots)
        self.fds = [
            memfd(name, size)
            for name, size in (
                ("data", self.size_bytes),
                ("page", self.page_bytes),
                ("directory", self.directory_bytes),
            )
        ]
        self.data, self._page, self._directory = (mmap.mmap(fd, 0) for fd in self.fds)
        self.words = memoryview(self._page).cast("Q")
        self._cells = memoryview(self._directory).cast("Q")
        self.data[: len(PROBE)] = PROBE
        self.probe = control_page.Probe(0, len(PROBE), hashlib.sha256(PROBE).digest())
        header = control_page.pack_header(
            control_page.PageHeader(self.arena_id, self.instance, num_slots, self.probe)
        )
        self._page[: len(header)] = header
        listing = directory.pack_header(self.arena_id, self.instance, num_slots)
        self._directory[: len(listing)] = listing
        if version != LAYOUT_VERSION:
            self._set_version(self._page, control_page.HEADER.size, version)
            self._set_version(self._directory, directory.HEADER.size, version)
        self.next_slot = 0
        self._listed: dict[int, int] = {}
        self._lock = threading.Lock()

    @staticmethod
    def _set_version(page: mmap.mmap, header_bytes: int, version: int) -> None:
        page[8:16] = version.to_bytes(8, "little")
        checksum = control_page.checksum(page[:header_bytes])
        page[header_bytes : header_bytes + 8] = checksum.to_bytes(8, "little")

    def generation(self, slot: int) -> int:
        return self.words[control_page.FIRST_GENERATION_WORD + slot]

    def free(self, slot: int) -> None:
        """The generation becomes even, then the range may be written again."""
        self.words[control_page.FIRST_GENERATION_WORD + slot] += self.generation(slot) % 2

    def write(self, result: pb.ItemResult, rows: bytes, *, listed: bool = True) -> pb.RowsPlace:
        """Publishes rows in the next slot, whatever was there."""
        with self._lock:
            return self._write(result, rows, listed)

    def _write(self, result: pb.ItemResult, rows: bytes, listed: bool) -> pb.RowsPlace:
        slot, self.next_slot = self.next_slot, (self.next_slot + 1) % self.num_slots
        self.free(slot)
        offset = mmap.PAGESIZE + slot * self.slot_bytes
        self.data[offset : offset + len(rows)] = rows
        generation = self.generation(slot) + 1
        self.words[control_page.FIRST_GENERATION_WORD + slot] = generation
        if listed:
            self._list(slot, generation, offset, result)
        return pb.RowsPlace(
            arena_id=self.arena_id,
            instance=self.instance,
            slot_index=slot,
            generation=generation,
            offset_bytes=offset,
            delivery=pb.DELIVERY_HOST,
        )

    def _list(self, slot: int, generation: int, offset: int, result: pb.ItemResult) -> None:
        tag = directory.namespace_tag(self.arena_id, NAMESPACE)
        grid = result.grid_thw
        record = directory.Record(
            key=result.key,
            tag=tag,
            generation=generation,
            offset_bytes=offset,
            rows_bytes=result.rows_bytes,
            grid=(grid.t, grid.h, grid.w),
            num_rows=result.num_rows,
            width=result.width,
            dtype=pb.DType.Name(result.dtype).removeprefix("DTYPE_").lower(),
            num_deepstack_levels=result.num_deepstack_levels,
            content_digest=result.content_digest,
            slot_index=slot,
        )
        start = directory.record_offset(self.num_slots, slot)
        self._directory[start : start + directory.RECORD.size] = directory.pack_record(record, 2)
        self._listed[slot] = directory.name_hash(result.key, tag)
        self._write_cells()

    def _write_cells(self) -> None:
        """The table anew: a reader that misses an entry meanwhile asks for its rows."""
        num_cells = directory.num_cells(self.num_slots)
        words = [0] * num_cells
        for slot, hashed in self._listed.items():
            cell = hashed
            while words[cell % num_cells]:
                cell += 1
            words[cell % num_cells] = directory.pack_cell(hashed, slot)
        for cell, word in enumerate(words):
            self._cells[directory.FIRST_CELL_WORD + cell] = word

    def geometry(self) -> broker_pb2.ArenaGeometry:
        return broker_pb2.ArenaGeometry(
            arena_id=self.arena_id,
            kind=broker_pb2.ARENA_KIND_HOST,
            size_bytes=self.size_bytes,
            page_bytes=self.page_bytes,
            directory_bytes=self.directory_bytes,
        )

    def close(self) -> None:
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
        self.num_hellos = 0
        self.tokens: list[str] = []
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
                self.num_hellos += 1
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

    def __init__(self, folder: Path, **arena: Any) -> None:
        self.arena = Arena(**arena)
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
            self.arena.free(result.place.slot_index)
            self.arena.data[result.place.offset_bytes] ^= 0xFF

    def requests(self, method: str) -> list[Any]:
        return [call.request for call in self.fake.calls if call.method == method]

    def __enter__(self) -> Self:
        self.fake.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.fake.stop()
        self.broker.stop()
        self.arena.close()


def torn(data: bytes) -> bytes:
    """A record whose content does not fit its CRC-32."""
    assert zlib.crc32(data) != 0
    return data[:20] + bytes([data[20] ^ 1]) + data[21:]
