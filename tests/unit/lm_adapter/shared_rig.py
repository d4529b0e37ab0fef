"""An encoder that shares host memory: the fake's service over a real arena, lease table and broker."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from encoder_service.errors import UnknownLease
from encoder_service.store.arena import Arena, ArenaMemory, Slot
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.leases import LeaseTable
from encoder_service.transport.shared_memory import offer_of
from lm_adapter import VisionEncoderClient
from lm_adapter.errors import ItemFailed
from lm_adapter.testing import FakeEncoder
from lm_adapter.transport import arenas, broker_socket
from lm_adapter.transport.broker_errors import BrokerUnavailable
from lm_adapter.transport.probe import host_id
from tests.unit.transport.broker_rig import Rig, running_broker, socket_folder, wait_until
from vision_encoder.v1 import encoder_pb2 as pb

ARENA_BYTES = 1 << 20


def num_mappings() -> int:
    """Of the encoder's memory, in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:vision-encoder" in line for line in maps)


def num_descriptors() -> int:
    """Of shared memory and of sockets to brokers; gRPC's own come and go as it likes."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:vision-encoder" in link for link in links) + len(broker_socket._sockets)


class SharingFake:
    """A FakeEncoder whose rows lie in an arena. The arena's own mappings are this process's too."""

    def __init__(
        self, path: str, kind: str = "host", new_memory: Callable[[], ArenaMemory] | None = None
    ) -> None:
        """kind: what the arena is said to be; over host memory, ``device`` is for readers without a GPU."""
        self.path = path
        self.kind = kind
        self.new_memory = new_memory or (lambda: HostMemory(ARENA_BYTES))
        self.host_id = host_id()
        self.fake = FakeEncoder()
        self.fake.script.sharing = self
        self.lock = threading.Lock()
        self.before_answer: Callable[[Slot], None] = lambda slot: None
        self.refuse: set[bytes] = set()
        self.num_placed = 0
        self.released: list[tuple[bytes, int | None]] = []
        self._stack = contextlib.ExitStack()

    @property
    def target(self) -> str:
        return self.fake.target

    def start(self) -> None:
        """A new instance with a new arena and a new broker at the same addresses."""
        self.fake.start()
        self.start_sharing()

    def start_sharing(self) -> None:
        self._stack = contextlib.ExitStack()
        self.leases = LeaseTable(time.monotonic, 600.0, 1000)
        self.arena = Arena(self.new_memory(), max_slots=64)
        self.slots: dict[bytes, Slot] = {}
        self._stack.callback(self.arena.close)
        self.rig: Rig = self._stack.enter_context(
            running_broker(self.path, instance_id=self.fake.instance_id)
        )
        self.offer(self.arena)

    def offer(self, arena: Arena) -> None:
        fds = arena.export_all()
        uuid = arena.geometry.device_uuid or ("GPU-test" if self.kind == "device" else "")
        self.device_uuid = uuid
        geometry = replace(arena.geometry, kind=self.kind, device_uuid=uuid)
        self.rig.broker.offer(offer_of(geometry), fds[0], fds[1], directory_fd=fds[2])
        for fd in fds:
            os.close(fd)

    def stop_sharing(self) -> None:
        self._stack.close()

    def stop(self) -> None:
        self.fake.stop()
        self.stop_sharing()

    def replace_arena(self) -> None:
        """The old one is closed in good order and its rows are gone."""
        old, self.arena = self.arena, Arena(self.new_memory(), max_slots=64)
        self._stack.callback(self.arena.close)
        self.slots.clear()
        self.offer(self.arena)
        self.rig.broker.withdraw(old.arena_id, self.arena.arena_id)
        old.close()

    def overwrite(self, slot: Slot) -> None:
        """Another tenant takes the slot."""
        self.arena.page.retire(slot.index)
        self.arena.view(slot, (slot.num_bytes,), torch.uint8).fill_(0xEE)
        self.arena._memory.synchronize()
        self.arena.publish(slot)

    # -- FakeSharing -----------------------------------------------------------------------------------

    def transports(self) -> list[pb.TransportInfo]:
        return [
            pb.TransportInfo(
                delivery=pb.DELIVERY_DEVICE_LEASE if self.kind == "device" else pb.DELIVERY_HOST_SHM,
                broker_path=self.path,
                host_id=self.host_id,
                device_uuid=self.device_uuid,
            )
        ]

    def place(self, delivery: int, lease: pb.LeaseOptions, result: pb.ItemResult, rows: bytes) -> None:
        if result.content_digest in self.refuse:
            raise ItemFailed("no room in the arena", reason="TRANSPORT_UNAVAILABLE", status=9)
        owner = lease.owner_id.decode()
        with self.lock:
            if self.arena.closed or not self.rig.broker.is_connected(owner, ""):
                raise ItemFailed("no such owner", reason="TRANSPORT_UNAVAILABLE", status=9)
            slot = self.slots.get(result.key)
            if slot is None:
                slot = self.arena.allocate(len(rows))
                assert slot is not None
                view = self.arena.view(slot, (len(rows),), torch.uint8)
                view.copy_(torch.frombuffer(bytearray(rows), dtype=torch.uint8))
                self.arena._memory.synchronize()
                self.arena.publish(slot)
                self.slots[result.key] = slot
            granted = self.leases.grant(
                self.arena, slot, owner, num_readers=lease.num_readers or 1, ttl_s=lease.lease_ms / 1e3 or 60
            )
            self.num_placed += 1
            arena_id = self.arena.arena_id
        place = result.lease if self.kind == "device" else result.host
        place.arena_id, place.slot_index = arena_id, slot.index
        place.offset_bytes, place.generation = slot.offset_bytes, granted.generation
        place.lease_id, place.expires_at_unix_ms = granted.lease_id, int((time.time() + 60) * 1000)
        if self.kind == "device":
            result.lease.shape.extend((result.num_rows, result.width))
            result.lease.dtype = result.dtype
            result.lease.device_uuid = self.device_uuid
        self.before_answer(slot)

    def release(self, lease_id: bytes, reader: int | None) -> bool:
        with self.lock:
            self.released.append((lease_id, reader))
            try:
                self.leases.release(lease_id, reader)
            except UnknownLease:
                return False
        return True


def break_off(client: VisionEncoderClient, encoder: SharingFake) -> Path:
    """The connection is lost without a word, and there is no socket to come back to: its new place."""
    away = Path(encoder.path).with_name("away")
    Path(encoder.path).rename(away)
    broker = client._session.transports._broker
    assert broker is not None
    link = broker._link
    assert link is not None
    link.lose(BrokerUnavailable("the connection to the broker broke"))
    return away


@contextlib.contextmanager
def sharing_fake(**options: Any) -> Iterator[SharingFake]:
    """Runs one; afterwards nothing of it, nor of the clients that used it, may be left."""
    gc.collect()
    descriptors, mappings, attached = num_descriptors(), num_mappings(), arenas.num_attached()
    with socket_folder() as folder:
        fake = SharingFake(str(folder / "broker.sock"), **options)
        fake.start()
        try:
            yield fake
        finally:
            fake.stop()
    del fake.arena, fake.slots, fake.leases

    def nothing_is_left() -> bool:
        gc.collect()
        return (arenas.num_attached(), num_mappings()) == (attached, mappings)

    wait_until(nothing_is_left, "every mapping's end")
    wait_until(lambda: num_descriptors() == descriptors, "every descriptor's close")
