"""The arena on a GPU, read by processes that share nothing with it but a socket."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.store.arena import Arena, Slot
from encoder_service.store.cuda_memory import CudaMemory, device_uuid
from encoder_service.store.host_memory import HostMemory
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import map_device, map_host

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SIZE = 64 << 20
ROOT = Path(__file__).parents[2]
ISOLATE = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"]
START_S, REPLY_S = 120.0, 60.0


@contextmanager
def arena_of(size_bytes: int = SIZE, max_slots: int = 64) -> Iterator[Arena]:
    arena = Arena(CudaMemory(size_bytes, CUDA), max_slots=max_slots)
    try:
        yield arena
        arena.check_integrity()
    finally:
        arena.close()


def filled(arena: Arena, num_bytes: int) -> tuple[Slot, str]:
    """A published slot of random rows, and their SHA-256."""
    slot = arena.allocate(num_bytes)
    assert slot is not None
    digest = fill(arena, slot)
    arena.publish(slot)
    return slot, digest


def fill(arena: Arena, slot: Slot) -> str:
    rows = torch.randint(0, 256, (slot.num_bytes,), dtype=torch.uint8)
    arena.view(slot, (slot.num_bytes,), torch.uint8).copy_(rows)
    torch.cuda.synchronize()
    return hashlib.sha256(bytes(rows.numpy())).hexdigest()


class Importer:
    """One process in its own PID, IPC and mount namespaces, with one GPU in sight."""

    def __init__(self, device_index: int) -> None:
        require_namespaces()
        self.connection, theirs = socket.socketpair()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = visible.split(",")[device_index] if visible else str(device_index)
        self.process = subprocess.Popen(
            [*ISOLATE, sys.executable, str(ROOT / "tests/gpu/arena_importer.py"), str(theirs.fileno())],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": name,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{os.environ.get('PYTHONPATH', '')}",
            },
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.connection.settimeout(START_S)

    def receive(self) -> dict[str, Any]:
        message = self.connection.recv(1 << 16)
        assert message, f"the importer ended with {self.process.wait(REPLY_S)}"
        self.connection.settimeout(REPLY_S)
        reply: dict[str, Any] = json.loads(message)
        return reply

    def send(self, do: str, **request: object) -> None:
        self.connection.sendall(json.dumps({"do": do, **request}).encode())

    def ask(self, do: str, **request: object) -> dict[str, Any]:
        self.send(do, **request)
        return self.receive()

    def map(self, arena: Arena) -> dict[str, Any]:
        geometry = arena.geometry
        request = {
            "do": "map",
            "size_bytes": geometry.size_bytes,
            "page_bytes": geometry.page_bytes,
            "arena_id": geometry.arena_id.hex(),
        }
        fds = [arena.export_fd(), arena.export_page_fd()]
        socket.send_fds(self.connection, [json.dumps(request).encode()], fds)
        for fd in fds:
            os.close(fd)
        return self.receive()

    def read(self, arena: Arena, slot: Slot, generation: int | None = None) -> dict[str, Any]:
        return self.ask("read", **place(slot), generation=generation or arena.generation(slot))

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


def place(slot: Slot) -> dict[str, int]:
    return {"slot": slot.index, "offset": slot.offset_bytes, "num_bytes": slot.num_bytes}


def require_namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("new PID and IPC namespaces need root and unshare")
    done = subprocess.run([*ISOLATE, "true"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"new PID and IPC namespaces are not permitted here: {done.stderr.strip()}")


@pytest.fixture
def importers() -> Iterator[Any]:
    """Starts importers, spread over all GPUs but the exporter's where there are others."""
    with ExitStack() as stack:

        def start(num_importers: int) -> list[Importer]:
            others = list(range(1, torch.cuda.device_count())) or [0]
            started = [Importer(others[index % len(others)]) for index in range(num_importers)]
            for importer in started:
                stack.callback(importer.close)
            for importer in started:
                assert importer.receive() == {"ready": True}
            return started

        yield start


@pytest.mark.whole_device
def test_device_memory_is_beside_torchs_own() -> None:
    torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    gc.collect()  # of earlier tests
    allocated = torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    memory = CudaMemory(SIZE + 1, CUDA)
    assert memory.size_bytes > SIZE
    assert memory.size_bytes % (2 << 20) == 0
    assert memory.device_uuid == device_uuid(0)
    assert memory.device_uuid.startswith(("GPU-", "MIG-"))
    assert not bool(memory.tensor.cpu().any())
    assert free_bytes - torch.cuda.mem_get_info(CUDA)[0] >= SIZE
    view = memory.tensor[256:512]
    memory.close()
    memory.close()
    assert memory.mapped
    view.fill_(3)
    torch.cuda.synchronize()
    del view
    gc.collect()
    assert not memory.mapped
    assert (torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)) == allocated
    # Other processes may use the GPU too: a margin of half the arena.
    assert torch.cuda.mem_get_info(CUDA)[0] >= free_bytes - SIZE // 2


@pytest.mark.whole_device
def test_no_descriptor_and_no_memory_stays_behind() -> None:
    # The first export and mapping open what the driver keeps for itself.
    with arena_of() as arena:
        fd = arena.export_fd()
        map_device(fd, arena.geometry.size_bytes, CUDA).close()
        os.close(fd)
    gc.collect()
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with arena_of() as arena:
            fd = arena.export_fd()
            map_device(fd, arena.geometry.size_bytes, CUDA).close()
            os.close(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert torch.cuda.mem_get_info(CUDA)[0] >= free_bytes - 2 * SIZE


def test_the_same_process_maps_it_too_on_every_gpu() -> None:
    with arena_of() as arena:
        slot, digest = filled(arena, 3_000_000)
        fd = arena.export_fd()
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            mapping = map_device(fd, arena.geometry.size_bytes, device)
            assert mapping.tensor.device == device
            rows = mapping.tensor[slot.offset_bytes : slot.offset_bytes + slot.num_bytes].clone()
            assert rows.device == device
            assert hashlib.sha256(bytes(rows.cpu().numpy())).hexdigest() == digest
            mapping.close()
        os.close(fd)


@pytest.mark.parametrize("num_importers", [1, 2, 4])
def test_isolated_processes_read_bit_equal_rows(importers: Any, num_importers: int) -> None:
    with arena_of() as arena:
        slots = [filled(arena, num_bytes) for num_bytes in (256, 400_001, 3 << 20, 32 << 20)]
        started = importers(num_importers)
        for importer in started:
            mapped = importer.map(arena)
            assert mapped["probe"]
            assert mapped["graph"]
            assert mapped["allocator_unchanged"]
            assert (mapped["num_devices"], mapped["device"]) == (1, "cuda:0")
            if torch.cuda.device_count() > 1:
                assert mapped["uuid"] != arena.geometry.device_uuid
            else:
                assert mapped["uuid"] == arena.geometry.device_uuid
            assert mapped["pid"] < 10, "the importer has its own process numbers"
        for slot, digest in slots:
            for importer in started:
                importer.send("read", **place(slot), generation=arena.generation(slot))
            for importer in started:
                assert importer.receive() == {"digest": digest, "unchanged": True}
        for importer in started:
            assert importer.ask("unmap") == {"mapped": False, "graph": True}


def test_a_graph_of_the_importer_reads_the_arena(importers: Any) -> None:
    with arena_of() as arena:
        slot, first = filled(arena, 4 << 20)
        (importer,) = importers(1)
        importer.map(arena)
        assert importer.ask("capture", **place(slot)) == {"empty": True}
        assert importer.ask("replay") == {"digest": first, "graph": True}
        second = fill(arena, slot)
        assert second != first
        assert importer.ask("replay") == {"digest": second, "graph": True}


def test_an_importer_cannot_write(importers: Any) -> None:
    with arena_of() as arena:
        slot, digest = filled(arena, 4 << 20)
        (importer,) = importers(1)
        importer.map(arena)
        refused = importer.ask("write", **place(slot))
        assert refused["status"] != 0
        assert refused["graph"], "a refused write leaves the importer's context in order"
        assert importer.read(arena, slot) == {"digest": digest, "unchanged": True}


def test_p21_a_late_read_is_found_stale(importers: Any) -> None:
    with arena_of(max_slots=1) as arena:
        slot, _ = filled(arena, 4 << 20)
        generation = arena.generation(slot)
        (importer,) = importers(1)
        importer.map(arena)
        arena.drop(slot)
        again, digest = filled(arena, 4 << 20)
        assert (again.index, again.offset_bytes) == (slot.index, slot.offset_bytes)
        assert importer.read(arena, again, generation) == {"digest": digest, "unchanged": False}
        assert importer.read(arena, again)["unchanged"]


def test_p21_no_torn_copy_is_taken_while_a_slot_is_rewritten(importers: Any) -> None:
    num_bytes = 32 << 20
    with arena_of(max_slots=1) as arena:
        slot = arena.allocate(num_bytes)
        assert slot is not None
        (importer,) = importers(1)
        importer.map(arena)
        importer.send("race", **place(slot))
        deadline, content = time.monotonic() + 3, 0
        while time.monotonic() < deadline:
            content += 1
            for quarter in arena.view(slot, (4, num_bytes // 4), torch.uint8):
                quarter.fill_(content % 256)
                torch.cuda.synchronize()
                time.sleep(0.0001)
            arena.publish(slot)
            time.sleep(0.002 * (content % 2))
            arena.drop(slot)
            slot = arena.allocate(num_bytes)
            assert slot is not None
        arena.close()
        seen = importer.receive()
    assert seen["wrong"] == 0
    assert min(seen["whole"], seen["stale"], seen["mixed"]) > 0, seen


def test_an_importer_outlives_the_exporters_arena(importers: Any) -> None:
    with arena_of() as arena:
        slot, digest = filled(arena, 4 << 20)
        generation = arena.generation(slot)
        where = place(slot)
        (importer,) = importers(1)
        importer.map(arena)
    gc.collect()
    late = importer.ask("read", **where, generation=generation)
    assert late == {"digest": digest, "unchanged": False}
    assert importer.ask("unmap") == {"mapped": False, "graph": True}


def test_an_importer_that_is_killed_leaves_the_exporter_in_order(importers: Any) -> None:
    with arena_of() as arena:
        slot, digest = filled(arena, 4 << 20)
        (importer,) = importers(1)
        importer.map(arena)
        importer.process.kill()
        importer.process.wait()
        rows = arena.view(slot, (slot.num_bytes,), torch.uint8)
        assert hashlib.sha256(bytes(rows.cpu().numpy())).hexdigest() == digest
        fill(arena, slot)


def test_pinned_host_memory_feeds_the_gpu_on_both_sides() -> None:
    memory = HostMemory(SIZE, pin=True)
    arena = Arena(memory, max_slots=4)
    slot = arena.allocate(8 << 20)
    assert slot is not None
    rows = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device=CUDA)
    view = arena.view(slot, (8 << 20,), torch.uint8)
    assert view.is_pinned()
    view.copy_(rows, non_blocking=True)
    torch.cuda.synchronize()
    generation = arena.publish(slot)
    fd, page_fd = arena.export_fd(), arena.export_page_fd()
    page = ControlPageReader(page_fd, arena.geometry.page_bytes, arena_id=arena.arena_id)
    for pin in (False, True):
        mapping = map_host(fd, SIZE, pin=pin)
        window = mapping.tensor[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
        copied = window.to(CUDA, non_blocking=True)
        torch.cuda.synchronize()
        assert page.unchanged(slot.index, generation)
        assert torch.equal(copied, rows)
        assert window.is_pinned() == mapping.pinned
        del window
        mapping.close()
        gc.collect()
        assert not mapping.mapped
    os.close(fd)
    os.close(page_fd)
    page.close()
    del view
    arena.close()
    gc.collect()
    assert not memory.mapped
    torch.zeros(1, device=CUDA).add_(1)
    torch.cuda.synchronize()
