"""Device memory mapped by descriptor: copies, beside a capture of another thread, and unmapping."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from encoder_service.store.cuda_memory import CudaMemory
from lm_adapter.shm.device import DeviceMemory, relaxed_capture

pytestmark = pytest.mark.gpu
SIZE_BYTES = 64 << 20


class Exported:
    """The encoder's memory, filled with bytes that follow from their offset."""

    def __init__(self, device: torch.device) -> None:
        self.memory = CudaMemory(SIZE_BYTES, device)
        self.fd = self.memory.export_fd()
        self.content = (torch.arange(SIZE_BYTES, device=device) * 31 % 251).to(torch.uint8)
        self.memory.tensor.copy_(self.content)
        torch.cuda.synchronize()

    def close(self) -> None:
        os.close(self.fd)
        self.memory.close()


@pytest.fixture
def exported() -> Iterator[Exported]:
    torch.cuda.init()
    found = Exported(torch.device("cuda", torch.cuda.current_device()))
    yield found
    found.close()


def test_p39_copies_are_the_exporters_bytes_on_a_device_without_an_index(exported: Exported) -> None:
    memory = DeviceMemory(exported.fd, SIZE_BYTES, torch.device("cuda"))
    for offset, num_bytes in ((0, SIZE_BYTES), (4096, 1), (123, 45_678)):
        copied = memory.copy(offset, num_bytes)
        assert copied.device == memory.device
        assert torch.equal(copied, exported.content[offset : offset + num_bytes])
    assert memory.read(7, 100) == bytes(exported.content[7:107].cpu().numpy())
    memory.unmap()


def test_a_copy_does_not_wait_for_the_callers_stream(exported: Exported) -> None:
    memory = DeviceMemory(exported.fd, SIZE_BYTES, torch.device("cuda"))
    memory.copy(0, 1024)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
        copied = memory.copy(0, 1024)
        assert not stream.query(), "the caller's stream still works"
    assert torch.equal(copied, exported.content[:1024])
    stream.synchronize()
    memory.unmap()


def test_reads_mapping_and_unmapping_beside_a_capture_leave_the_graph_whole(exported: Exported) -> None:
    """An engine captures its graphs in the default, global mode while the connector reads."""
    values = torch.ones(1024, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    began, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            assert began.wait(60)
            for _ in range(3):
                memory = DeviceMemory(exported.fd, SIZE_BYTES, torch.device("cuda"))
                for num_bytes in (1000, 40 << 20):
                    copied = memory.copy(0, num_bytes)
                    with relaxed_capture():
                        found = copied.cpu()
                    assert bytes(found[:1000].numpy()) == expected
                memory.unmap()
        except BaseException as error:
            errors.append(error)
        finally:
            go_on.set()

    expected = bytes(exported.content[:1000].cpu().numpy())
    thread = threading.Thread(target=read)
    thread.start()
    with torch.cuda.graph(graph, stream=stream):
        values += 1
        began.set()
        assert go_on.wait(120)
        values *= 2
    thread.join()
    assert not errors, errors
    before = values.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(values, (before + 1) * 2)


@pytest.mark.whole_device
def test_a_mapping_keeps_the_memory_until_it_is_unmapped() -> None:
    torch.cuda.init()
    exported = Exported(torch.device("cuda", torch.cuda.current_device()))
    memory = DeviceMemory(exported.fd, SIZE_BYTES, torch.device("cuda"))
    content = exported.content[:1000].clone()
    exported.close()
    del exported
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(memory.copy(0, 1000), content)
    with_mapping = torch.cuda.mem_get_info()[0]
    memory.unmap()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= with_mapping + SIZE_BYTES
