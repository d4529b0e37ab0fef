"""The adapter's rows by device lease on a GPU: streams, buffers, graphs, staleness, several processes."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_service.store.cuda_memory import CudaMemory
from lm_adapter import StaleRows, VisionEncoderClient
from lm_adapter.testing import fake_model
from lm_adapter.transport.device_lease import DeviceArena
from lm_adapter.transport.unmapping import num_waiting
from tests.unit.lm_adapter.shared_rig import SharingFake, break_off, sharing_fake
from tests.unit.lm_adapter.test_client import assert_rows_of, digest_of, image
from tests.unit.transport.broker_rig import wait_until

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
ROOT = Path(__file__).parents[2]
READER_S = 120


@pytest.fixture
def encoder() -> Iterator[SharingFake]:
    with sharing_fake(kind="device", new_memory=lambda: CudaMemory(64 << 20, CUDA)) as running:
        running.fake.script.model = fake_model(out_width=1024, dtype="bfloat16")
        yield running


@pytest.fixture
def client(encoder: SharingFake) -> Iterator[VisionEncoderClient]:
    with VisionEncoderClient(encoder.target, device=CUDA, transports=("device",), timeout_s=60) as client:
        choice = client.wait_transport()
        assert choice.name == "device", choice
        assert "this GPU itself" in choice.reason
        yield client


def test_rows_are_bit_equal_to_inline(encoder: SharingFake, client: VisionEncoderClient) -> None:
    with VisionEncoderClient(encoder.target, transports=("inline",), timeout_s=60) as inline:
        for index in range(8):
            rows, expected = client.encode_one(image(index)), inline.encode_one(image(index))
            assert rows.torch().device == CUDA
            assert torch.equal(rows.torch().cpu(), expected.torch())
            assert_rows_of(rows, digest_of(index))
    assert encoder.num_placed == 8


def test_copies_run_on_the_callers_stream_into_its_buffer(
    encoder: SharingFake, client: VisionEncoderClient
) -> None:
    expected = client.encode_one(image(0)).torch()
    on_gpu = torch.empty_like(expected)
    on_host = torch.empty(expected.shape, dtype=expected.dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        rows = client.encode_one(image(0), out=[on_gpu], confirm_later=True)
        doubled = rows.torch() * 2  # in the stream's order: after the copy
        rows.confirm()
    stream.synchronize()
    assert rows.payload.data_ptr() == on_gpu.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(doubled, expected * 2)
    client.encode_one(image(0), out=[on_host])
    assert torch.equal(on_host, expected.cpu())


def test_borrowed_rows_are_read_where_they_lie(encoder: SharingFake, client: VisionEncoderClient) -> None:
    expected = client.encode_one(image(1)).torch()
    allocated = torch.cuda.memory_allocated(CUDA)
    with client.encode_one(image(1), borrow=True) as rows:
        view = rows.torch()
        assert torch.cuda.memory_allocated(CUDA) == allocated
        assert torch.equal(view, expected)
    stale = client.encode_one(image(1), borrow=True)
    encoder.overwrite(encoder.slots[stale.key])
    with pytest.raises(StaleRows):
        stale.confirm()
    del rows, view, stale


def test_a_capture_under_way_and_earlier_graphs_are_not_disturbed(encoder: SharingFake) -> None:
    number = torch.ones(1024, device=CUDA)
    doubled = torch.zeros_like(number)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with VisionEncoderClient(encoder.target, device=CUDA, transports=("device",), timeout_s=60) as client:
        with torch.cuda.graph(graph):
            torch.mul(number, 2, out=doubled)
            client.info()  # the probe maps and reads while this thread captures
            assert client.wait_transport().name == "device"
        graph.replay()
        torch.cuda.synchronize()
        assert bool((doubled == 2).all())
        for index in range(4):
            assert_rows_of(client.encode_one(image(index)), digest_of(index))
        number.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((doubled == 6).all())
    graph.replay()
    torch.cuda.synchronize()


def test_an_encoder_that_goes_while_a_graph_is_captured(encoder: SharingFake) -> None:
    """The arena is unmapped, after a copy that nobody waited for, while another thread captures."""
    number = torch.ones(1024, device=CUDA)
    doubled = torch.zeros_like(number)
    graph = torch.cuda.CUDAGraph()
    ways = ("device", "inline")
    with VisionEncoderClient(encoder.target, device=CUDA, transports=ways, timeout_s=60) as client:
        assert client.wait_transport().name == "device"
        transports = client._session.transports
        transports.lost_grace_s = 0.2
        rows = client.encode_one(image(0), confirm_later=True)
        (arena,) = transports._arenas.of("device")
        assert isinstance(arena.memory, DeviceArena)
        mapping = arena.memory._mapping
        expected = rows.torch().cpu()
        del rows
        gc.collect()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            torch.mul(number, 2, out=doubled)
            away = break_off(client, encoder)
            wait_until(lambda: not mapping.mapped, "the end of the mapping")
            assert num_waiting() == 0
        graph.replay()
        torch.cuda.synchronize()
        assert bool((doubled == 2).all())
        away.rename(encoder.path)
        wait_until(lambda: client.wait_transport().name == "device", "the way back")
        assert torch.equal(client.encode_one(image(0)).torch().cpu(), expected)


def test_reads_beside_a_capture_of_another_thread(encoder: SharingFake, client: VisionEncoderClient) -> None:
    expected = client.encode_one(image(0)).torch()
    outs = [torch.zeros_like(expected) for _ in range(2)]
    number = torch.ones(1024, device=CUDA)
    doubled = torch.zeros_like(number)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    (arena,) = client._session.transports._arenas.of("device")
    first_bytes = bytes(arena.memory.copy_now(0, 4096, None).cpu().numpy())  # type: ignore[union-attr]
    on_gpu = torch.zeros(4096, dtype=torch.uint8, device=CUDA)
    on_host = np.zeros(4096, dtype=np.uint8)

    def read() -> None:
        with torch.cuda.stream(side):
            for out in (on_gpu, on_host, None):  # as rows without a lease are read
                arena.memory.copy_now(0, 4096, out)
            client.encode_one(image(0), out=outs[:1])
            later = client.encode_one(image(0), out=outs[1:], confirm_later=True)
            later.confirm()

    with ThreadPoolExecutor(1) as reader, torch.cuda.graph(graph):
        torch.mul(number, 2, out=doubled)
        reader.submit(read).result()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((doubled == 2).all())
    for out in outs:
        assert torch.equal(out, expected)
    assert bytes(on_gpu.cpu().numpy()) == bytes(on_host) == first_bytes


def test_mappings_go_with_the_client(encoder: SharingFake) -> None:
    for _ in range(10):
        with VisionEncoderClient(encoder.target, device=CUDA, timeout_s=60) as client:
            assert client.wait_transport().name == "device"
            assert_rows_of(client.encode_one(image(0)), digest_of(0))


@pytest.mark.parametrize("num_readers", [2, 4])
def test_every_rank_reads_the_slot_on_its_own_gpu(
    encoder: SharingFake, client: VisionEncoderClient, num_readers: int
) -> None:
    rows = client.encode_one(image(0), num_readers=num_readers)
    digest = hashlib.sha256(bytes(rows.payload.cpu().numpy())).hexdigest()  # type: ignore[union-attr]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    readers = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/gpu/device_reader.py"), encoder.target, str(reader)],
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": names[reader % len(names)],
                "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{os.environ.get('PYTHONPATH', '')}",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for reader in range(1, num_readers)
    ]
    try:
        for reader in readers:
            answer, _ = reader.communicate(pickle.dumps(rows.shared), READER_S)
            found = json.loads(answer.splitlines()[-1])
            assert (found["transport"], found["digest"], found["in_place"]) == ("device", digest, True), found
    finally:
        for reader in readers:
            reader.kill()
    client.close()
    assert {reader for _, reader in encoder.released} == set(range(num_readers))
    assert len(encoder.leases) == 0
