"""Pixels that go to a real service in shared memory: the same rows, and nothing left, however calls end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from encoder_service.rpc.servicer import VisionEncoderServicer
from encoder_service.transport import pixel_input, pixel_segments
from lm_adapter import AsyncVisionEncoderClient, EncodedRows, Grid, ItemFailed, PixelItem, VisionEncoderClient
from lm_adapter.transport import pixel_choice
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.publish import publish_pixels
from tests.integration.conftest import RunningService, running
from tests.integration.test_process import ENV
from tests.integration.test_service import figures
from tests.unit.lm_adapter.client_drivers import DRIVERS
from tests.unit.transport.broker_rig import socket_folder, wait_until
from tests.unit.transport.pixel_rig import segments
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

PREFIX = "ve-test-"
GRID = Grid(1, 8, 8)


class Rig:
    def __init__(self, service: RunningService, folder: Path, broker_path: str) -> None:
        self.service, self.folder, self.broker_path = service, folder, broker_path
        self.pixels = service.service.pixels
        self.target = service.target
        self.channel = grpc.insecure_channel(self.target)
        self.stub = encoder_pb2_grpc.VisionEncoderStub(self.channel)

    def client(self, pixels: str, **given: Any) -> VisionEncoderClient:
        client = VisionEncoderClient(
            self.target, timeout_s=60, pixels=pixels, **{"shm_dir": str(self.folder), **given}
        )
        client.wait_transport()
        return client

    @property
    def num_left(self) -> int:
        assert self.pixels.book is not None
        return len(segments(self.folder)) + len(self.pixels.book)

    @property
    def request_bytes(self) -> int:
        """Of content that the service counts for calls in progress."""
        (servicer,) = [
            each
            for each in gc.get_objects()
            if type(each) is VisionEncoderServicer and each._pixels is self.pixels
        ]
        return servicer.requests.num_bytes

    def publish(self, kind: str, values: Any, broker: BrokerClient) -> pb.ShmTensor:
        """A segment that the service is to end, and whose publisher does nothing more about it."""
        options: dict[str, Any] = (
            {"prefix": PREFIX, "folder": str(self.folder)} if kind == "shm" else {"broker": broker}
        )
        published = publish_pixels(values, **options)
        assert published._finalizer is not None
        published._finalizer.detach()
        return published.message()


@pytest.fixture(scope="module")
def module_rig(
    checkpoints: dict[str, Path], device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("shm")
    with socket_folder() as sockets:
        path = str(sockets / "broker.sock")
        settings = {"broker_path": path, "shm_prefixes": PREFIX, "shm_dir": folder, "arena_bytes": 8 << 20}
        with running(checkpoints["qwen3_vl"], device, **settings) as service:
            rig = Rig(service, folder, path)
            yield rig
            rig.channel.close()


@pytest.fixture
def rig(module_rig: Rig) -> Iterator[Rig]:
    yield module_rig
    wait_until(lambda: module_rig.num_left == 0, "the end of every segment")
    wait_until(lambda: not module_rig.pixels._items, "the end of every call")


@pytest.fixture
def broker(rig: Rig) -> Iterator[BrokerClient]:
    with BrokerClient(rig.broker_path) as found:
        found.connect(20)
        yield found


def patches(grid: Grid = GRID) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the tiny tower takes; no two are equal."""
    return np.random.default_rng().standard_normal((grid.num_patches, 1536), dtype=np.float32)


def item(values: Any, grid: Grid = GRID) -> PixelItem:
    return PixelItem(values, grid)


def proto_item(shm: pb.ShmTensor) -> pb.Item:
    grid = pb.GridTHW(t=GRID.t, h=GRID.h, w=GRID.w)
    return pb.Item(modality=pb.MODALITY_IMAGE, pixels=pb.PixelTensor(grid_thw=grid, shm=shm))


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("pixels", ["shm", "memfd"])
def test_p19_rows_are_those_of_the_same_pixels_inline(
    rig: Rig, driver: str, pixels: str, shared_kind: str
) -> None:
    """Whatever their layout; sent first in shared memory, so that the rows are made from that."""
    whole = patches()
    layouts: list[Any] = [
        whole,
        np.asfortranarray(patches()),
        patches().astype(np.float16),
        torch.from_numpy(np.ascontiguousarray(patches().T)).T,
        torch.from_numpy(patches()).to(torch.bfloat16),
        whole[::-1],
    ]
    before = rig.pixels.counters.consumed
    opened = DRIVERS[driver](rig.target, timeout_s=60, pixels=pixels, shm_dir=str(rig.folder))
    try:
        opened.call("wait_transport")
        shared = opened.call("encode", [item(values) for values in layouts])
    finally:
        opened.close()
    assert rig.pixels.counters.consumed == before + len(layouts)
    with rig.client("inline") as client:
        inline = client.encode([item(values) for values in layouts])
    for ours, theirs in zip(shared, inline, strict=True):
        assert isinstance(ours, EncodedRows)
        assert isinstance(theirs, EncodedRows)
        assert ours.key == theirs.key
        assert ours.tier.value == "miss"
        assert theirs.tier.value == shared_kind
        assert np.array_equal(ours.numpy(), theirs.numpy())
    assert rig.pixels.counters.consumed == before + len(layouts)


def test_large_pixels_go_by_memfd_by_themselves_where_rows_come_in_shared_memory(rig: Rig) -> None:
    large, small = Grid(1, 16, 16), Grid(1, 4, 4)
    before = rig.pixels.counters.published
    with rig.client("auto") as client:
        assert client.transport.is_shared
        outcomes = client.encode([item(patches(large), large), item(patches(small), small)])
        assert all(isinstance(each, EncodedRows) for each in outcomes)
    assert rig.pixels.counters.published == before + 1
    with rig.client("auto", transports=("inline",)) as client:
        client.encode_one(item(patches(large), large))
    assert rig.pixels.counters.published == before + 1


@pytest.mark.parametrize("pixels", ["shm", "memfd"])
def test_prefetched_pixels_go_by_shared_memory_too(rig: Rig, pixels: str) -> None:
    values = [patches() for _ in range(3)]
    before = rig.pixels.counters.consumed
    with rig.client(pixels) as client:
        statuses = client.prefetch([item(each) for each in values])
        assert not any(isinstance(status, ItemFailed) for status in statuses)
        assert rig.pixels.counters.consumed == before + 3
        assert all(isinstance(each, EncodedRows) for each in client.fetch([s.key for s in statuses]))  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["encode", "prefetch"])
def test_p19_what_the_service_does_not_see_goes_inline_and_is_not_tried_again_for_a_while(
    rig: Rig, tmp_path: Path, method: str
) -> None:
    """A folder that the two do not share, as between containers."""
    with rig.client("shm", shm_dir=str(tmp_path)) as client:
        refused = rig.pixels.counters.refused["NOT_FOUND"]
        outcomes = getattr(client, method)([item(patches()) for _ in range(3)])
        assert not any(isinstance(outcome, ItemFailed) for outcome in outcomes)
        assert rig.pixels.counters.refused["NOT_FOUND"] > refused
        refused = rig.pixels.counters.refused["NOT_FOUND"]
        assert isinstance(client.encode_one(item(patches())), EncodedRows)
        assert rig.pixels.counters.refused["NOT_FOUND"] == refused
    assert segments(tmp_path) == []


def test_refused_pixels_that_fit_no_single_message_go_in_several(
    rig: Rig, tmp_path: Path, checkpoints: dict[str, Path], device: torch.device
) -> None:
    with running(
        checkpoints["qwen3_vl"], device, shm_prefixes=PREFIX, shm_dir=tmp_path, max_message_bytes=1_200_000,
        chunk_bytes=1 << 16,
    ) as service, VisionEncoderClient(
        service.target, timeout_s=60, pixels="shm", shm_dir=str(rig.folder)
    ) as client:  # fmt: skip
        outcomes = client.encode([item(patches()) for _ in range(7)])
        assert all(isinstance(each, EncodedRows) for each in outcomes)
        assert service.service.pixels.counters.consumed == 0


def test_p19_a_lost_broker_connection_sends_its_segments_inline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service closed them with the connection; the call is none the wiser."""
    with rig.client("memfd") as client:
        publish = pixel_choice.publish_pixels

        def then_lose(*arguments: Any, **named: Any) -> Any:
            published = publish(*arguments, **named)
            named["broker"]._link.lose(ConnectionError("cut"))
            wait_until(lambda: rig.num_left == 0)
            return published

        monkeypatch.setattr(pixel_choice, "publish_pixels", then_lose)
        assert isinstance(client.encode_one(item(patches())), EncodedRows)


@pytest.mark.parametrize("kind", ["shm", "memfd"])
def test_p19_calls_that_are_refused_end_their_segments(rig: Rig, broker: BrokerClient, kind: str) -> None:
    request = pb.EncodeRequest(
        items=[proto_item(rig.publish(kind, patches(), broker)) for _ in range(3)], model="no such model"
    )
    assert rig.num_left == 3
    with pytest.raises(grpc.RpcError, match="no such model"):
        list(rig.stub.Encode(request, timeout=30))
    wait_until(lambda: rig.num_left == 0)
    request.ClearField("items")
    request.items.append(proto_item(rig.publish(kind, patches(), broker)))
    prefetch = pb.PrefetchRequest(items=request.items, namespace="x" * 300)
    with pytest.raises(grpc.RpcError, match="300 bytes"):
        rig.stub.Prefetch(prefetch, timeout=30)


@pytest.mark.parametrize("kind", ["shm", "memfd"])
@pytest.mark.parametrize("grid", [(1, 8, 9), (1, 4, 4)])
def test_p19_items_that_fail_end_their_segments_and_spare_their_neighbours(
    rig: Rig, broker: BrokerClient, kind: str, grid: tuple[int, int, int]
) -> None:
    good, bad = (proto_item(rig.publish(kind, patches(), broker)) for _ in range(2))
    bad.pixels.grid_thw.CopyFrom(pb.GridTHW(t=grid[0], h=grid[1], w=grid[2]))
    cut = proto_item(rig.publish(kind, patches(), broker))
    cut.pixels.shm.shape[0] += 1
    events = list(rig.stub.Encode(pb.EncodeRequest(items=[bad, good, cut]), timeout=60))
    found = {each.item_index: each for each in events if each.WhichOneof("event") != "chunk"}
    assert found[1].HasField("result")
    assert found[0].failure.reason == "GRID_MISMATCH"
    assert found[2].failure.reason == "PIXEL_TENSOR_MISMATCH"
    assert found[2].failure.details["found_bytes"] == str(patches().nbytes)


@pytest.mark.parametrize("kind", ["shm", "memfd"])
@pytest.mark.parametrize("stop", ["cancel", "deadline"])
def test_p19_aborted_and_late_calls_end_their_segments(
    rig: Rig, broker: BrokerClient, kind: str, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those under a copy, those that wait for a worker, all without the publisher's doing anything."""
    reading, go_on = hold_copies(monkeypatch)
    request = pb.EncodeRequest(items=[proto_item(rig.publish(kind, patches(), broker)) for _ in range(8)])
    stream = rig.stub.Encode(request, timeout=1.5 if stop == "deadline" else 60)
    try:
        assert reading.wait(30)
        if stop == "cancel":
            stream.cancel()
        with pytest.raises(grpc.RpcError):
            list(stream)
        wait_until(lambda: rig.num_left == 0, "the end of an aborted call's segments")
        wait_until(lambda: not rig.pixels._items, "the end of its items")
        assert rig.request_bytes > 0, "what is still written"
    finally:
        go_on.set()
    wait_until(lambda: rig.request_bytes == 0, "the end of what they counted")


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Copies run on workers and wait there. Set when one has begun; to be set for them to go on."""
    reading, go_on = threading.Event(), threading.Event()
    read: Callable[..., Any] = pixel_segments.read_tensor

    def slowly(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(pixel_input, "COPY_INLINE_BYTES", 0)
    monkeypatch.setattr(pixel_segments, "read_tensor", slowly)
    return reading, go_on


def test_p19_a_cancelled_task_of_the_async_client_leaves_nothing(rig: Rig) -> None:
    async def main(pixels: str) -> None:
        async with AsyncVisionEncoderClient(
            rig.target, timeout_s=60, pixels=pixels, shm_dir=str(rig.folder)
        ) as client:
            await client.wait_transport()
            for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
                with contextlib.suppress(TimeoutError):  # a fast machine may have them all by then
                    await asyncio.wait_for(client.encode([item(patches()) for _ in range(8)]), delay_s)
            assert isinstance(await client.encode_one(item(patches())), EncodedRows)

    for pixels in ("shm", "memfd"):
        asyncio.run(main(pixels))
        wait_until(lambda: rig.num_left == 0)


PUBLISHER = """
import sys, time
import numpy as np
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.publish import publish_pixels
folder, path = sys.argv[1:]
broker = BrokerClient(path)
broker.connect(20)
values = np.zeros((64, 1536), np.float32)
held = [publish_pixels(values, prefix="ve-test-", folder=folder), publish_pixels(values, broker=broker)]
print("ready", flush=True)
time.sleep(60)
"""


def kill_a_publisher(rig: Rig) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(rig.folder), rig.broker_path],
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert rig.num_left == 2
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_p19_a_killed_publishers_memfds_go_with_it_and_its_names_with_the_next_sweep(rig: Rig) -> None:
    kill_a_publisher(rig)
    wait_until(lambda: rig.num_left == 1, "the end of its memfd")
    with rig.client("inline") as client:
        assert isinstance(client.encode_one(item(patches())), EncodedRows)
    assert rig.pixels.folder is not None
    assert rig.pixels.folder.sweep() == 1


def test_p19_a_service_that_starts_sweeps(
    rig: Rig, checkpoints: dict[str, Path], device: torch.device
) -> None:
    kill_a_publisher(rig)
    with (
        publish_pixels(patches(), prefix=PREFIX, folder=str(rig.folder)) as alive,
        running(checkpoints["qwen3_vl"], device, shm_prefixes=PREFIX, shm_dir=rig.folder) as other,
    ):
        assert [path.name for path in segments(rig.folder)] == [alive.name]
        assert figures(other)["ve_pixels_swept_total"] == 1


def test_operators_see_it(rig: Rig, broker: BrokerClient) -> None:
    def read() -> dict[str, float]:
        return {name: value for name, value in figures(rig.service).items() if name.startswith("ve_pixels_")}

    before = read()
    message = proto_item(rig.publish("memfd", patches(), broker))
    assert read()["ve_pixels_held_bytes"] == patches().nbytes
    missing = proto_item(pb.ShmTensor(name=f"{PREFIX}none", dtype=pb.DTYPE_FLOAT32, shape=[64, 1536]))
    named = proto_item(rig.publish("shm", patches(), broker))
    list(rig.stub.Encode(pb.EncodeRequest(items=[message, missing, named]), timeout=60))
    after = read()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {
        "ve_pixels_published_total": 1,
        "ve_pixels_consumed_total": 2,
        "ve_pixels_consumed_bytes_total": 2 * patches().nbytes,
        "ve_pixels_unlinked_total": 1,
        "ve_pixels_refused_total": 1,
    }


def test_p34_a_large_copy_leaves_the_event_loop_free(
    rig: Rig, broker: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = hold_copies(monkeypatch)
    grid = Grid(1, 16, 16)
    message = proto_item(rig.publish("memfd", patches(grid), broker))
    message.pixels.grid_thw.CopyFrom(pb.GridTHW(t=1, h=16, w=16))
    stream = rig.stub.Encode(pb.EncodeRequest(items=[message]), timeout=60)
    try:
        assert reading.wait(30)
        assert rig.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).pixel_input.published
    finally:
        go_on.set()
    assert any(event.HasField("result") for event in stream)


def test_a_server_without_the_settings_announces_and_takes_nothing(service: RunningService) -> None:
    for pixels in ("shm", "memfd", "auto"):
        with VisionEncoderClient(service.target, timeout_s=60, pixels=pixels) as client:
            assert client.info().pixel_input is None
            assert isinstance(client.encode_one(item(patches())), EncodedRows)
    channel = grpc.insecure_channel(service.target)
    stub = encoder_pb2_grpc.VisionEncoderStub(channel)
    shm = pb.ShmTensor(name="ve-1", dtype=pb.DTYPE_FLOAT32, shape=[64, 1536], unlink_after_read=True)
    (event,) = stub.Encode(pb.EncodeRequest(items=[proto_item(shm)]), timeout=30)
    assert event.failure.reason == "TRANSPORT_UNAVAILABLE"
    assert event.failure.details["pixels"] == "NOT_OFFERED"
    channel.close()
